"""Inference by decoder depth, and against Hugging Face's generate: RTFx.

    python profiling/bench.py inference [--size small|full] [--shapes 24/24 32/4 17/4 18/8]
        [--batch 16] [--peer] [--output ROWS.csv]

Models of random weights, encoder layers / decoder layers, transcribe utterances as long as real
ones, each by as many tokens as English of that length has, whatever they are: so depth alone
decides. Each pass that is timed is split, without waiting for the device: encoder (features
included), prefill (keys and values of the encoded speech, and reading the prompts), decoder steps,
and the rest, the host's own bookkeeping; the split of the median pass is given. With --peer,
transformers' Canary generates from the same weights and audio, padded, as many tokens of each
utterance; how far transcripts agree is checked before anything is timed. With random weights two
tokens are now and then equally likely up to rounding; from there on an utterance goes its own way.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from benchmarks import harness
from benchmarks.speech import agreement, padded_features, random_model, transformers_model
from benchmarks.workload import LISTED, PROMPT, TOKENS_PER_SECOND, read_durations
from effasr.data.batch import Batch
from effasr.data.collate import Example, collate
from effasr.data.features.config import FeatureConfig
from effasr.decoding.continuous_batching.engine import Engine, Utterance
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.transcription.cpu_weights import OneDNNWeights

SHAPES = ("24/24", "32/4", "17/4", "18/8")
COLUMNS = (
    *("system", "shape", "size", "batch", "audio_s", "tokens", "rtfx", "p20_s", "p50_s", "p80_s"),
    *("encoder_s", "prefill_s", "decode_s", "host_s", "agreement", "dtype", *harness.VERSIONS),
)


class Size(NamedTuple):
    width: int  # of encoder and decoder
    heads: int
    mel_bins: int
    channels: int  # of the subsampling
    classes: int


SIZES = {
    "tiny": Size(16, 2, 16, 4, 40),
    "small": Size(128, 4, 80, 32, 1024),
    "full": Size(1024, 8, 128, 256, 16384),
}


def build(shape: str, size: Size, device: torch.device, dtype: torch.dtype) -> ASRModel:
    parts = shape.split("/")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise ValueError(
            f"`shape` must be ENCODER_LAYERS/DECODER_LAYERS, such as 32/4, but is {shape!r}."
        )
    shared = {"width": size.width, "heads": size.heads, "feed_forward": 4 * size.width}
    encoder = FastConformerConfig(
        layers=int(parts[0]), subsampling_channels=size.channels, **shared
    )
    features = FeatureConfig(mel_bins=size.mel_bins)
    decoder = DecoderConfig(layers=int(parts[1]), max_positions=1024, **shared)
    config = ModelConfig(ctc=False, features=features, encoder=encoder, decoder=decoder)
    return random_model(config, size.classes, device, dtype).eval()


@dataclass(frozen=True)
class Utterances:
    batch: Batch
    seconds: float
    limits: list[int]  # tokens to generate for each


def utterances(count: int, device: torch.device, longest: float) -> Utterances:
    drawn = random.Random(0).choices(read_durations(LISTED), k=count)
    durations = [min(seconds, longest) for seconds in drawn]
    generator = torch.Generator().manual_seed(0)
    audio = [torch.randn(round(x * 16_000), generator=generator) * 0.1 for x in durations]
    prompt = list(PROMPT)
    examples = [Example(str(n), x.numpy(), prompt, [], True) for n, x in enumerate(audio)]
    batch = collate(examples, eos_id=3, pad_id=2).to(device)
    limits = [max(1, round(TOKENS_PER_SECOND * seconds)) for seconds in durations]
    return Utterances(batch, batch.audio_seconds, limits)


_PARTS = {"encode": "encoder_s", "decode.admit": "prefill_s", "decode.step": "decode_s"}


class Ours:
    """Greedy search of a model, in as many slots as there are utterances."""

    def __init__(self, model: ASRModel, speech: Utterances, clock: harness.PartClock) -> None:
        self._model, self._speech, self._clock = model, speech, clock
        self._packed = OneDNNWeights(model)
        # The last token ends a transcript, and is never chosen: all reach their limits.
        end = model.vocab_size - 1
        longest = max(speech.batch.frames.lengths)
        sizes = {"classes": end, "slots": len(speech.limits), "max_frames": longest}
        self._engine = Engine(model, end, within=clock.part, **sizes)

    @torch.no_grad()
    def transcribe(self) -> list[list[int]]:
        with self._packed.active():
            with self._clock.part("encode"):
                encoded = self._model.encode(self._speech.batch)
            limits = enumerate(self._speech.limits)
            self._engine.submit(encoded, [Utterance(name, PROMPT, limit) for name, limit in limits])
            results = dict(self._engine.results())
        return [list(results[name].tokens) for name in range(len(results))]


class Peer:
    def __init__(self, model: ASRModel, speech: Utterances) -> None:
        self._device = next(model.parameters()).device
        self._model = transformers_model(model, self._device).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.max_length = None
        self._config, self._end = model.config.features, model.vocab_size - 1
        audio = speech.batch.audio
        parts = audio.values[: audio.layout.total].cpu().split(list(audio.layout.lengths))
        self._audio = [part.numpy() for part in parts]
        self._limits = speech.limits
        self._ends = len(PROMPT) + torch.tensor(speech.limits, device=self._device)

    @torch.no_grad()
    def transcribe(self) -> list[list[int]]:
        written = self._model.generate(
            **padded_features(self._config, self._audio, self._device),
            decoder_input_ids=torch.tensor([PROMPT] * len(self._audio), device=self._device),
            max_new_tokens=max(self._limits),
            do_sample=False,
            suppress_tokens=[self._end],
            stopping_criteria=[lambda ids, scores, **_: ids.shape[1] >= self._ends],
        )
        rows = written[:, len(PROMPT) :].tolist()
        return [row[:limit] for row, limit in zip(rows, self._limits, strict=True)]


def row_of(
    passes: Sequence[tuple[float, dict[str, float]]], speech: Utterances, *, has_parts: bool
) -> dict[str, Any]:
    """Return the measured columns of passes and their parts; RTFx is that of the median."""
    p20, p50, p80 = harness.percentiles([seconds for seconds, _ in passes])
    row: dict[str, Any] = {"p20_s": p20, "p50_s": p50, "p80_s": p80}
    if has_parts:
        seconds, parts = sorted(passes, key=lambda timed: timed[0])[len(passes) // 2]
        row |= {column: parts.get(name, 0.0) for name, column in _PARTS.items()}
        row["host_s"] = seconds - sum(row[column] for column in _PARTS.values())
    row = {name: round(value, 5) for name, value in row.items()}
    row |= {"audio_s": round(speech.seconds, 2), "rtfx": round(speech.seconds / p50, 2)}
    return row | {"tokens": sum(speech.limits)}


def _described(row: dict[str, Any]) -> str:
    parts = " ".join(
        f"{name.removesuffix('_s')} {row[name]:.3f}"
        for name in ("encoder_s", "prefill_s", "decode_s", "host_s")
        if name in row
    )
    if "agreement" in row:
        parts += f"  {100 * row['agreement']:.1f} % of tokens agree"
    return (
        f"{row['shape']:>6} {row['system']:12} RTFx {row['rtfx']:8.1f}  {row['p50_s']:.3f} s  "
        f"{parts}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("inference", __doc__)
    add = parser.add_argument
    add("--shapes", nargs="+", help=f"default: {' '.join(SHAPES)}")
    add("--size", choices=list(SIZES), help="small on a CPU, full on a GPU")
    add("--batch", type=int, default=16, help="utterances")
    add("--longest", type=float, default=30.0, help="seconds of an utterance")
    add("--repeats", type=int, default=3)
    add("--peer", action="store_true", help="also transformers' Canary, float32")
    add("--agreement", type=float, default=0.9, help="share of tokens that must agree with it")
    options = parser.parse_args(arguments)
    device = harness.default_device()
    name = options.size or ("full" if device.type == "cuda" else "small")
    dtype = torch.bfloat16 if device.type == "cuda" and not options.peer else torch.float32
    speech = utterances(options.batch, device, options.longest)
    table = harness.Table(COLUMNS, options.output, device)
    for shape in options.shapes or SHAPES:
        model = build(shape, SIZES[name], device, dtype)
        fields: dict[str, Any] = {"shape": shape, "size": name, "batch": options.batch}
        fields["dtype"] = harness.dtype_name(dtype)
        clock = harness.PartClock(device)
        systems: dict[str, Ours | Peer] = {"effasr": Ours(model, speech, clock)}
        if options.peer:
            systems = {"transformers": Peer(model, speech), **systems}
        # Convolutions would be rounded to TF32 by default, and texts part sooner.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=not options.peer):
            # Also the warm-up.
            texts = {system: systems[system].transcribe() for system in systems}
        if options.peer:
            fields["agreement"] = agreement(texts["effasr"], texts["transformers"])
            if fields["agreement"] < options.agreement:
                harness.complain(
                    f"bench inference: {shape}: only {fields['agreement']:.4f} of the tokens agree "
                    "with transformers': nothing is timed."
                )
                return 1
            fields["agreement"] = round(fields["agreement"], 5)
        harness.now(device)
        clock.take()
        calls = [lambda number, system=system: system.transcribe() for system in systems.values()]
        passes: list[list[tuple[float, dict[str, float]]]] = [[] for _ in calls]
        for turn in harness.in_turns(calls, options.repeats, device):
            passes[turn.system].append((turn.seconds, clock.take()))
        for system, times in zip(systems, passes, strict=True):
            row = fields | {"system": system}
            row |= row_of(times, speech, has_parts=system == "effasr")
            table.add(row, _described(row))
    return 0
