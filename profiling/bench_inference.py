"""Inference by decoder depth, and against Hugging Face's generate: RTFx.

    python profiling/bench_inference.py [--size small|full] [--shapes 24/24 32/4 17/4 18/8]
        [--batch 16] [--peer] [--output ROWS.csv]
    python profiling/bench_inference.py --streams 1 16 64 [--chunks 13 7 3] [--longest 30]
        [--beam 4]
        [--output ROWS.csv]

Models of random weights, encoder layers / decoder layers, transcribe utterances as long as real
ones, each by as many tokens as English of that length has, whatever they are: so depth alone
decides. Each pass that is timed is split, without waiting for the device: encoder (features
included), prefill (keys and values of the encoded speech, and reading the prompts), decoder steps,
and the rest, the host's own bookkeeping; the split of the median pass is given. With --peer,
transformers' Canary generates from the same weights and audio, padded, as many tokens of each
utterance; how far transcripts agree is checked before anything is timed. With random weights two
tokens are now and then equally likely up to rounding; from there on an utterance goes its own way.

With --streams, the encoder of each shape (17 layers by default) with a CTC head decodes that many
streams at a time, frame by frame, with each chunk of --chunks frames, which sees about five seconds
before it. All streams are noise of --longest seconds. See `bench.streams` for the delays.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from bench import rows
from bench.peer_features import parakeet_features
from bench.provenance import provenance
from bench.workload import LISTED, read_durations

from effasr.data.batch import Batch
from effasr.data.collate import Example, collate
from effasr.data.features.config import FeatureConfig
from effasr.data.tokenizer import Tokenizer
from effasr.decoding.continuous_batching.engine import Engine, Utterance
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.transcription.cpu_weights import OneDNNWeights
from effasr_kernels import Context

TOKENS_PER_SECOND = 3.6
PROMPT = (7, 4, 16, 5)
SHAPES = ("24/24", "32/4", "17/4", "18/8")
SEEN_FRAMES = 64
"""Earlier frames that a chunk of a stream sees."""
COLUMNS = (
    *("system", "shape", "size", "batch", "audio_s", "tokens", "rtfx", "p20_s", "p50_s", "p80_s"),
    *("encoder_s", "prefill_s", "decode_s", "host_s", "agreement", "dtype"),
    *("device", "torch", "triton", "git", "date"),
)


@dataclass(frozen=True)
class Size:
    """Widths of a model.

    Attributes:
        width: Width of encoder and decoder.
        heads: Heads of their attention.
        mel_bins: Mel bins of the features.
        channels: Channels of the subsampling.
        classes: Tokens of the vocabulary.
    """

    width: int
    heads: int
    mel_bins: int
    channels: int
    classes: int


SIZES = {
    "tiny": Size(16, 2, 16, 4, 40),
    "small": Size(128, 4, 80, 32, 1024),
    "full": Size(1024, 8, 128, 256, 16384),
}


@dataclass(frozen=True)
class Utterances:
    """The transcribed utterances.

    Attributes:
        batch: Batch on the device.
        seconds: Seconds of all audio.
        limits: Number of tokens to generate for each.
    """

    batch: Batch
    seconds: float
    limits: list[int]


def build(shape: str, size: Size, device: torch.device, dtype: torch.dtype) -> ASRModel:
    """Return a model of random weights in evaluation mode.

    Raises:
        ValueError: The shape is not two numbers of layers.
    """
    encoder, decoder = _layers(shape)
    config = ModelConfig(
        ctc=False,
        features=FeatureConfig(mel_bins=size.mel_bins),
        encoder=_encoder(encoder, size),
        decoder=DecoderConfig(
            width=size.width,
            layers=decoder,
            heads=size.heads,
            feed_forward=4 * size.width,
            max_positions=1024,
        ),
    )
    return _drawn(config, size, device, dtype)


def build_streaming(
    shape: str, size: Size, chunk: int, device: torch.device, dtype: torch.dtype
) -> ASRModel:
    """Return a model of random weights that decodes streams by CTC, in chunks of so many frames.

    Raises:
        ValueError: The shape is not two numbers of layers; its decoder is left out.
    """
    context = Context(SEEN_FRAMES, 0, chunk)
    config = ModelConfig(
        ctc=True,
        features=FeatureConfig(mel_bins=size.mel_bins, normalize=False),
        encoder=replace(
            _encoder(_layers(shape)[0], size),
            conv_norm="layer_norm",
            context=(context,),
            causal_convolution=True,
        ),
        decoder=None,
    )
    return _drawn(config, size, device, dtype)


def _layers(shape: str) -> tuple[int, int]:
    parts = shape.split("/")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(
            f"`shape` must be ENCODER_LAYERS/DECODER_LAYERS, such as 32/4, but is {shape!r}."
        )
    return int(parts[0]), int(parts[1])


def _encoder(layers: int, size: Size) -> FastConformerConfig:
    return FastConformerConfig(
        width=size.width,
        layers=layers,
        heads=size.heads,
        feed_forward=4 * size.width,
        subsampling_channels=size.channels,
    )


def _drawn(config: ModelConfig, size: Size, device: torch.device, dtype: torch.dtype) -> ASRModel:
    torch.manual_seed(0)
    # Weights are drawn where they are used: on a host, a billion of them takes a quarter minute.
    with torch.device("meta"):
        model = ASRModel(config, size.classes)
    model.to_empty(device=device)
    model.reset_parameters()
    return model.to(dtype).eval()


def utterances(count: int, device: torch.device, longest: float) -> Utterances:
    """Noise at durations of the list, up to ``longest`` seconds."""
    drawn = random.Random(0).choices(read_durations(LISTED), k=count)
    durations = [min(seconds, longest) for seconds in drawn]
    generator = torch.Generator().manual_seed(0)
    examples = [
        Example(
            str(index),
            (0.1 * torch.randn(round(seconds * 16_000), generator=generator)).numpy(),
            list(PROMPT),
            [],
            True,
        )
        for index, seconds in enumerate(durations)
    ]
    batch = collate(examples, eos_id=3, pad_id=2).to(device)
    limits = [max(1, round(TOKENS_PER_SECOND * seconds)) for seconds in durations]
    return Utterances(batch, batch.audio_seconds, limits)


class Clock:
    """Adds up the time of parts of a pass; on a GPU that of the device's work, by events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, Any, Any]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what is done, or on a GPU queued, within."""
        began = self._mark()
        yield
        self._marks.append((name, began, self._mark()))

    def now(self) -> float:
        """Return the time when the device has nothing left to do."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def take(self) -> dict[str, float]:
        """Return seconds of each part since the last call; after `now`."""
        seconds: dict[str, float] = {}
        for name, began, ended in self._marks:
            on_gpu = self._device.type == "cuda"
            passed = began.elapsed_time(ended) / 1e3 if on_gpu else ended - began
            seconds[name] = seconds.get(name, 0.0) + passed
        self._marks.clear()
        return seconds

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


_PARTS = {"encode": "encoder_s", "decode.admit": "prefill_s", "decode.step": "decode_s"}


class Ours:
    """Greedy search of a model, in as many slots as there are utterances."""

    def __init__(self, model: ASRModel, spoken: Utterances, clock: Clock) -> None:
        self._model, self._spoken, self._clock = model, spoken, clock
        self._packed = OneDNNWeights(model)
        # The last token ends a transcript, and is never chosen: all reach their limits.
        end = model.vocab_size - 1
        self._engine = Engine(
            model,
            end,
            classes=end,
            slots=len(spoken.limits),
            max_frames=max(spoken.batch.frames.lengths),
            within=clock.part,
        )

    @torch.no_grad()
    def transcribe(self) -> list[list[int]]:
        """Return the tokens of every utterance."""
        with self._packed.active():
            with self._clock.part("encode"):
                encoded = self._model.encode(self._spoken.batch)
            limits = enumerate(self._spoken.limits)
            self._engine.submit(encoded, [Utterance(name, PROMPT, limit) for name, limit in limits])
            found = dict(self._engine.results())
        return [list(found[name].tokens) for name in range(len(found))]


def split(whole: float, seconds: dict[str, float]) -> dict[str, float]:
    """Return the columns of a pass: its parts, and what is left of it for the host."""
    parts = {column: seconds.get(name, 0.0) for name, column in _PARTS.items()}
    return parts | {"host_s": whole - sum(parts.values())}


class Peer:
    """transformers' Canary with the weights of a model of ours."""

    def __init__(self, model: ASRModel, spoken: Utterances) -> None:
        from transformers import CanaryForConditionalGeneration

        from effasr.interop.huggingface.checkpoint import export_model

        device = next(model.parameters()).device
        with tempfile.TemporaryDirectory() as folder:
            export_model(model, folder)
            loaded: Any = CanaryForConditionalGeneration.from_pretrained(folder)
        self._model = loaded.to(device).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.max_length = None
        self._config = model.config.features
        audio = spoken.batch.audio
        parts = audio.values[: audio.layout.total].cpu().split(list(audio.layout.lengths))
        self._audio = [part.numpy() for part in parts]
        self._end = model.vocab_size - 1
        self._spoken = spoken
        self._ends = len(PROMPT) + torch.tensor(spoken.limits, device=device)

    @torch.no_grad()
    def transcribe(self) -> list[list[int]]:
        """Return the tokens of every utterance, by `generate`."""
        features = parakeet_features(self._config, self._audio, self._ends.device)
        prompts = torch.tensor([PROMPT] * len(self._audio), device=self._ends.device)
        found = self._model.generate(
            **features,
            decoder_input_ids=prompts,
            max_new_tokens=max(self._spoken.limits),
            do_sample=False,
            suppress_tokens=[self._end],
            stopping_criteria=[lambda ids, scores, **_: ids.shape[1] >= self._ends],
        )
        said = found[:, len(PROMPT) :].tolist()
        return [row[:limit] for row, limit in zip(said, self._spoken.limits, strict=True)]


def time_calls(
    call: Callable[[], object], clock: Clock, repeats: int
) -> list[tuple[float, dict[str, float]]]:
    """Return the seconds of each call and its parts, after one warm-up; shortest first."""
    call()
    clock.now()
    clock.take()
    times = []
    for _ in range(repeats):
        began = clock.now()
        call()
        times.append((clock.now() - began, clock.take()))
    return sorted(times, key=lambda one: one[0])


def row(times: Sequence[float], spoken: Utterances, **fields: Any) -> dict[str, Any]:
    """Return a row of the table; its RTFx is that of the median."""
    p50 = statistics.median(times)
    low, high = p50, p50
    if len(times) > 1:
        low, *_, high = statistics.quantiles(times, n=5, method="inclusive")
    return dict.fromkeys(COLUMNS, "") | {
        "audio_s": round(spoken.seconds, 2),
        "tokens": sum(spoken.limits),
        "rtfx": round(spoken.seconds / p50, 2),
        "p20_s": round(low, 5),
        "p50_s": round(p50, 5),
        "p80_s": round(high, 5),
        **{
            name: round(value, 5) if isinstance(value, float) else value
            for name, value in fields.items()
        },
    }


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Return the share of tokens that agree, up to the first of each utterance that does not.

    After it the two have read different texts.
    """
    same = 0
    for one, other in zip(ours, theirs, strict=True):
        same += next(
            (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one)
        )
    return same / sum(map(len, ours))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    options = _parser().parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = options.size or ("full" if device.type == "cuda" else "small")
    dtype = torch.bfloat16 if device.type == "cuda" and not options.peer else torch.float32
    if options.streams:
        _serve_streams(options, name, device)
        return 0
    spoken = utterances(options.batch, device, options.longest)
    table = _Table(options.output)
    for shape in options.shapes or SHAPES:
        model = build(shape, SIZES[name], device, dtype)
        fields = {"shape": shape, "size": name, "batch": options.batch} | provenance(device)
        fields["dtype"] = str(dtype).removeprefix("torch.")
        clock = Clock(device)
        ours = Ours(model, spoken, clock)
        if options.peer:
            peer = Peer(model, spoken)
            # Convolutions would be rounded to TF32 by default, and texts part sooner.
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                share = agreement(ours.transcribe(), peer.transcribe())
            if share < options.agreement:
                sys.stderr.write(
                    f"bench_inference: {shape}: only {share:.4f} of the tokens agree with "
                    "transformers': nothing is timed.\n"
                )
                return 1
            fields["agreement"] = share
            times = [seconds for seconds, _ in time_calls(peer.transcribe, clock, options.repeats)]
            table.add(row(times, spoken, system="transformers", **fields))
        found = time_calls(ours.transcribe, clock, options.repeats)
        parts = split(*found[len(found) // 2])
        times = [seconds for seconds, _ in found]
        table.add(row(times, spoken, system="effasr", **fields, **parts))
    return 0


class Numbers:
    """Spells each token as its number; all that decoding a stream asks of a tokenizer."""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the numbers."""
        return " ".join(map(str, ids))


def _serve_streams(options: argparse.Namespace, name: str, device: torch.device) -> None:
    """Time each shape with each chunk and each number of streams, and write the rows."""
    # The recognizer needs packages that read audio, which the other benchmarks do without.
    from bench import streams

    from effasr.transcription.online import OnlineRecognizer

    size, rate = SIZES[name], FeatureConfig().sample_rate
    noise = 0.1 * np.random.default_rng(0).standard_normal(10 * rate).astype(np.float32)
    audio = streams.Repeated(noise, round(options.longest * rate))
    for shape in options.shapes or SHAPES[2:3]:
        for chunk in options.chunks:
            model = build_streaming(shape, size, chunk, device, torch.float32)
            for count in options.streams:
                recognizer = OnlineRecognizer(
                    model, cast(Tokenizer, Numbers()), streams=count, beam=options.beam
                )
                warm_up = [streams.Repeated(noise, rate)] * count
                streams.serve(recognizer, warm_up, count)
                served = streams.serve(recognizer, [audio] * count, count, options.tick)
                measured = streams.row(recognizer, served, count, options.beam)
                one = (
                    dict.fromkeys(streams.COLUMNS, "")
                    | measured
                    | provenance(device)
                    | {
                        "model": f"{name}, {shape.split('/')[0]} encoder layers",
                        "tick_s": options.tick,
                        "dtype": "float32",
                    }
                )
                sys.stdout.write(streams.described(one) + "\n")
                sys.stdout.flush()
                if options.output is not None:
                    rows.append(options.output, streams.COLUMNS, one)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", help=f"default: {' '.join(SHAPES)}")
    parser.add_argument("--size", choices=list(SIZES), help="small on a CPU, full on a GPU")
    parser.add_argument("--batch", type=int, default=16, help="utterances")
    parser.add_argument("--longest", type=float, default=30.0, help="seconds of an utterance")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peer", action="store_true", help="also transformers' Canary, float32")
    parser.add_argument(
        "--agreement", type=float, default=0.9, help="share of tokens that must agree with it"
    )
    parser.add_argument("--streams", nargs="+", type=int, help="numbers of streams at a time")
    parser.add_argument("--beam", type=int, default=1, help="hypotheses of a stream; 1 is greedy")
    parser.add_argument("--chunks", nargs="+", type=int, default=[13, 7, 3], help="frames")
    parser.add_argument(
        "--tick", type=float, default=0.0, help="least seconds between two steps of the streams"
    )
    parser.add_argument("--output", type=Path, help="CSV to append to")
    return parser


class _Table:
    """Rows as they come, to the screen and to a file."""

    def __init__(self, output: Path | None) -> None:
        self._output = output

    def add(self, one: dict[str, Any]) -> None:
        parts = " ".join(
            f"{name.removesuffix('_s')} {one[name]:.3f}"
            for name in ("encoder_s", "prefill_s", "decode_s", "host_s")
            if one[name] != ""
        )
        if one["agreement"] != "":
            parts += f"  {100 * one['agreement']:.1f} % of tokens agree"
        sys.stdout.write(
            f"{one['shape']:>6} {one['system']:12} RTFx {one['rtfx']:8.1f}  "
            f"{one['p50_s']:.3f} s  {parts}\n"
        )
        sys.stdout.flush()
        if self._output is not None:
            rows.append(self._output, COLUMNS, one)


if __name__ == "__main__":
    sys.exit(main())
