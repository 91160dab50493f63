"""Word error rate and delay of one model that is trained for several latencies.

    effasr demo-data data/demo
    effasr tokenizer data/demo/train.jsonl data/demo/tokenizer --vocab-size 160
    torchrun --nproc-per-node 2 effasr/train.py demo_streaming
    python profiling/studies/streaming_demo.py runs/demo_streaming
        [--manifest data/demo/test.jsonl] [--streams 8] [--latencies full 1.04 0.56 0.24]
        [--beam 1] [--utterances N] [--output profiling/results/streaming.csv]

Each latency decodes the whole set, as so many streams at a time that arrive in real time (see
`bench.streams`), with the trained context of the longest chunk that the latency allows. ``full``
waits for the end of each recording and attends to all of it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import rows, streams
from bench.provenance import provenance

from effasr.checkpoint import LoadedModel, load_model, resolve
from effasr.data.audio.waveform import load_audio
from effasr.decoding.config import DecodingConfig
from effasr.evaluation.evaluate import openable_cuts
from effasr.evaluation.normalizer import get_normalizer
from effasr.evaluation.wer import ErrorCounts, count_errors, total
from effasr.model.encoder import FastConformerEncoder
from effasr.transcription.online import OnlineRecognizer, context_for
from effasr.transcription.results import Transcription
from effasr.transcription.transcribe import Waveform, transcribe
from effasr_kernels import Context

FULL = "full"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study; returns the exit code."""
    options = _parser().parse_args(arguments)
    loaded = load_model(resolve(options.run))
    recordings, references = _read(options, loaded)
    for latency in options.latencies:
        if latency == FULL:
            one, texts = _full(loaded, recordings, options.beam)
        else:
            how = float(latency), options.streams, options.beam
            one, texts = _streamed(loaded, recordings, *how)
        one |= provenance(torch.device("cpu")) | {
            "model": options.run.resolve().name,
            "wer": round(_errors(references, texts).wer, 5),
            "dtype": "float32",
        }
        sys.stdout.write(streams.described(one) + "\n")
        sys.stdout.flush()
        if options.output is not None:
            rows.append(options.output, streams.COLUMNS, one)
    return 0


def _streamed(
    loaded: LoadedModel,
    recordings: Sequence[np.ndarray],
    latency: float,
    count: int,
    beam: int,
) -> tuple[dict[str, Any], list[str]]:
    """Decode the recordings as streams."""
    context = context_for(loaded.model, latency)
    recognizer = OnlineRecognizer(
        loaded.model, loaded.tokenizer, context=context, streams=count, beam=beam
    )
    served = streams.serve(recognizer, recordings, count)
    return _row() | streams.row(recognizer, served, count, beam) | {"tick_s": 0.0}, served.texts


def _full(
    loaded: LoadedModel, recordings: Sequence[np.ndarray], beam: int
) -> tuple[dict[str, Any], list[str]]:
    """Decode each recording as a whole, when it has ended."""
    model, framing = loaded.model, loaded.model.config.features.framing
    rate, served = loaded.model.config.features.sample_rate, streams.Served()
    method = "transducer" if model.transducer is not None else "ctc"
    cast(FastConformerEncoder, model.encoder).evaluate_with(Context(None, None))
    config = DecodingConfig(method=method, beam=beam)
    for number, audio in enumerate(recordings):
        started = time.perf_counter()
        waveform = Waveform(str(number), audio, rate)
        (result,) = transcribe(model, loaded.tokenizer, [waveform], config=config)
        passed = time.perf_counter() - started
        if not isinstance(result, Transcription):
            raise ValueError(f"recording {number} must be transcribed, but failed: {result.reason}")
        served.texts.append(result.text)
        served.busy_s += passed
        served.audio_s += len(audio) / rate
        served.delays_s.append(passed)
        served.algorithmic_s.update(
            max(0, len(audio) - (frame + 1) * framing.samples) / rate
            for frame in range(framing.frames(len(audio)))
        )
    fields = {"method": method, "beam": beam, "context": FULL, "streams": 1}
    threads = {"threads": torch.get_num_threads()}
    return _row() | fields | threads | streams.measured(served), served.texts


def _row() -> dict[str, Any]:
    return dict.fromkeys(streams.COLUMNS, "")


def _read(options: argparse.Namespace, loaded: LoadedModel) -> tuple[list[np.ndarray], list[str]]:
    """Return the audio and the texts of a set."""
    cuts, failures = openable_cuts(options.manifest, language=loaded.prompt.source)
    if failures:
        raise ValueError(f"{options.manifest} must be readable: {failures[0].reason}")
    cuts = cuts[: options.utterances]
    rate = loaded.model.config.features.sample_rate
    texts = [cut.supervisions[0].text or "" for cut in cuts]
    return [load_audio(cut, rate) for cut in cuts], texts


def _errors(references: Sequence[str], texts: Sequence[str]) -> ErrorCounts:
    normalize = get_normalizer("basic")
    pairs = zip(references, texts, strict=True)
    return total(count_errors(normalize(one), normalize(other)) for one, other in pairs)


def _latency(text: str) -> str:
    if text != FULL:
        try:
            if float(text) > 0:
                return text
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"must be seconds above 0 or {FULL}, but is {text!r}")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run or a model directory")
    parser.add_argument("--manifest", type=Path, default=Path("data/demo/test.jsonl"))
    parser.add_argument("--streams", type=int, default=8, help="streams at a time")
    parser.add_argument("--beam", type=int, default=1, help="hypotheses; 1 is greedy")
    parser.add_argument(
        "--latencies", nargs="+", type=_latency, default=[FULL, "1.04", "0.56", "0.24"]
    )
    parser.add_argument("--utterances", type=int, help="only the first so many")
    parser.add_argument("--output", type=Path, help="CSV to append to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
