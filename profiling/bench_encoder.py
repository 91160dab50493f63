"""Forward and backward of a FastConformer L encoder, from mel frames, beside transformers'.

    python profiling/bench_encoder.py [--output ROWS.csv] [--budget-s S] [--tiny]

Utterances of one length, so that nobody computes padding: 103 of 10.2 s and 37 of 20.5 s, those of
NeMo's published steps (NVIDIA/NeMo 16052). bfloat16 on a GPU, by autocast.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench import rows
from bench.peer_features import parakeet_features
from bench.provenance import provenance
from torch import Tensor

from effasr.data.collate import Example, collate
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.encoder import FastConformerConfig
from effasr.nn.stack import compile_layers
from effasr.training.flops import peak_flops

COLUMNS = (
    *("system", "mode", "utterances", "seconds", "step_ms", "audio_s_per_s", "peak_bytes"),
    *("peak_tflops", "device", "torch", "triton", "git", "date"),
)
SIZES = ((103, 10.2), (37, 20.5))
MODES = ("eager", "graph", "compile", "graph_compile")
RATE = 16_000
Encoder = tuple[torch.nn.Module, Callable[[], Tensor]]
Audio = list[np.ndarray]
Step = Callable[[], None]
L = FastConformerConfig()
SMALL = FastConformerConfig(width=16, layers=1, heads=2, feed_forward=32, subsampling_channels=4)


def ours(config: FastConformerConfig, audio: Audio, device: torch.device, mode: str) -> Encoder:
    model = ASRModel(ModelConfig(encoder=config, decoder=None, ctc=True), 8).to(device).train()
    if "compile" in mode:
        compile_layers(model)
    examples = [Example(str(n), samples, [2], [3]) for n, samples in enumerate(audio)]
    batch = collate(examples, eos_id=1, pad_id=0).to(device)
    mel = model.features(batch.audio, batch.frames.with_tile_tables())
    return model.encoder, lambda: model.encoder(mel).values


def transformers(config: FastConformerConfig, audio: Audio, device: torch.device) -> Encoder:
    from transformers import ParakeetEncoder, ParakeetEncoderConfig

    off = ("dropout", "attention_dropout", "activation_dropout", "layerdrop")
    encoder = ParakeetEncoder(
        ParakeetEncoderConfig(
            hidden_size=config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            intermediate_size=config.feed_forward,
            subsampling_conv_channels=config.subsampling_channels,
            num_mel_bins=ModelConfig().features.mel_bins,
            **dict.fromkeys(off, 0.0),
        )
    )
    inputs = parakeet_features(ModelConfig().features, audio, device)
    encoder = encoder.to(device).train()
    return encoder, lambda: encoder(**inputs).last_hidden_state


def step_of(
    module: torch.nn.Module, forward: Callable[[], Tensor], device: torch.device
) -> Callable[[], None]:
    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            values = forward()
        values.float().square().mean().backward()
        module.zero_grad(set_to_none=False)

    return step


def recorded(step: Step) -> Step:
    """Return a replay of a step as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def timed(step: Step, device: torch.device, repeats: int) -> tuple[float, int | str]:
    """Return the median in milliseconds, and the peak of the memory."""
    gpu = device.type == "cuda"
    times = []
    for number in range(repeats + 3):
        began = time.perf_counter()
        step()
        if gpu:
            torch.cuda.synchronize(device)
        if number >= 3:
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times), torch.cuda.max_memory_allocated(device) if gpu else ""


def measured(
    config: FastConformerConfig,
    device: torch.device,
    sizes: Sequence[tuple[int, float]],
    repeats: int,
    end: float,
) -> Iterator[dict[str, Any]]:
    gpu = device.type == "cuda"
    peak = peak_flops(device)
    where = provenance(device) | {"peak_tflops": "" if peak is None else peak / 1e12}
    systems = [("effasr", mode) for mode in (MODES if gpu else MODES[:1])]
    for count, seconds in sizes:
        noise = np.random.default_rng(0).standard_normal((count, round(seconds * RATE)))
        audio = list(0.1 * noise.astype(np.float32))
        for system, mode in [*systems, ("transformers", "eager")]:
            if time.monotonic() > end:
                return
            if gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
            try:
                make = ours(config, audio, device, mode) if system == "effasr" else None
                step = step_of(*(make or transformers(config, audio, device)), device)
                step_ms, held = timed(recorded(step) if "graph" in mode else step, device, repeats)
            except (ImportError, RuntimeError, ValueError) as reason:
                sys.stderr.write(f"{system}, {mode}: {' '.join(str(reason).split())[:200]}\n")
                continue
            row = {"system": system, "mode": mode, "utterances": count, "seconds": seconds}
            speed = round(count * seconds / step_ms * 1e3, 1)
            row |= {"step_ms": round(step_ms, 3), "audio_s_per_s": speed, "peak_bytes": held}
            yield row | where


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, help="CSV to append to")
    parser.add_argument("--budget-s", type=float, default=120.0)
    parser.add_argument("--tiny", action="store_true", help="two short utterances, on a CPU")
    options = parser.parse_args(arguments)
    gpu = torch.cuda.is_available() and not options.tiny
    device = torch.device("cuda" if gpu else "cpu")
    sizes = ((2, 1.0),) if options.tiny else SIZES
    end, found = time.monotonic() + options.budget_s, 0
    config = SMALL if options.tiny else L
    for row in measured(config, device, sizes, 20 if gpu else 2, end):
        found += 1
        sys.stdout.write(
            f"{row['system']:13} {row['mode']:14} {row['utterances']} x {row['seconds']} s "
            f"{row['step_ms']:10.2f} ms {row['audio_s_per_s']:10.0f} audio s / s\n"
        )
        sys.stdout.flush()
        if options.output is not None:
            rows.append(options.output, COLUMNS, row)
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
