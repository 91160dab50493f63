"""Time each operation, each backend, forward alone and with backward, at real speech lengths.

    python profiling/bench_ops.py [--op attention ...] [--output profiling/results/ops.csv]

Needs torch and effasr_kernels alone. One row per (op, backend, shape, dtype, mode): median and
the 20th and 80th percentile in milliseconds, peak memory on a GPU, and what it was measured on.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import effasr_kernels as kernels
from effasr_kernels import Backend, BackendUnavailable, PackedLayout

RESULTS = Path(__file__).parent / "results" / "ops.csv"
COLUMNS = [
    "op",
    "backend",
    "shape",
    "dtype",
    "mode",
    "p20_ms",
    "p50_ms",
    "p80_ms",
    "peak_bytes",
    "device",
    "torch",
    "triton",
    "git",
    "date",
]


@dataclass(frozen=True)
class Size:
    """How large a benchmark is: frames and tokens of one packed batch, and the model's widths."""

    frames: int
    tokens: int
    heads: int
    head_dim: int
    vocabulary: int
    warmup: int
    repeats: int


CPU = Size(1_000, 240, 4, 32, 512, 1, 5)
GPU = Size(24_000, 6_000, 8, 64, 8_192, 5, 30)


@dataclass(frozen=True)
class Case:
    """One operation with its inputs; ``call`` takes the backend."""

    name: str
    shape: str
    inputs: list[Tensor]
    call: Callable[[str], Tensor]


def layouts(size: Size, device: str) -> tuple[PackedLayout, PackedLayout]:
    """Log-normal utterances, median 6 s at 80 ms a frame, until the batch is full; 2 tokens/s."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < size.frames:
        drawn = torch.empty(1).log_normal_(1.8, 0.65, generator=generator).item()
        lengths.append(min(max(int(drawn * 12.5), 4), 500, size.frames - sum(lengths)))
    share = size.tokens / size.frames
    tokens = [int(length * share) for length in lengths]
    rows = PackedLayout.from_lengths(lengths, device, rows=size.frames)
    return rows, PackedLayout.from_lengths(tokens, device, rows=size.tokens)


def cases(size: Size, device: str, dtype: torch.dtype) -> list[Case]:
    """Every operation at this size."""
    frames, tokens = layouts(size, device)
    generator = torch.Generator(device).manual_seed(1)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(*shape, device=device, generator=generator)
        return values.to(dtype).requires_grad_()

    heads, depth, width = size.heads, size.head_dim, size.heads * size.head_dim
    q, k, v = (draw(size.frames, heads, depth) for _ in range(3))
    query = draw(size.tokens, heads, depth)
    bias = [draw(heads, depth), draw(heads, depth), draw(2 * frames.max_seqlen - 1, heads, depth)]
    hidden, encoded = draw(size.tokens, width), draw(size.frames, width)
    weight, taps = draw(size.vocabulary + 1, width), draw(width, 9)
    targets = torch.randint(size.vocabulary, (size.tokens,), device=device, generator=generator)
    shape = f"T={size.frames} N={frames.num_sequences} H={heads} D={depth}"
    text = f"U={size.tokens} C={width} V={size.vocabulary}"
    relative = kernels.RelativeBias(*bias)
    return [
        Case(
            "attention", shape, [q, k, v], lambda b: kernels.attention(q, k, v, frames, backend=b)
        ),
        Case(
            "attention_relative",
            shape,
            [q, k, v, *bias],
            lambda b: kernels.attention(q, k, v, frames, position=relative, backend=b),
        ),
        Case(
            "guided_attention",
            f"{shape} U={size.tokens}",
            [query, k, v],
            lambda b: kernels.guided_attention(query, k, v, tokens, frames, sigma=0.2, backend=b)[
                0
            ],
        ),
        Case(
            "linear_cross_entropy",
            text,
            [hidden, weight],
            lambda b: kernels.linear_cross_entropy(
                hidden, weight, targets, label_smoothing=0.1, backend=b
            ),
        ),
        Case(
            "ctc_loss",
            f"T={size.frames} {text}",
            [encoded, weight],
            lambda b: kernels.ctc_loss(
                encoded, weight, targets, frames, tokens, blank_id=size.vocabulary, backend=b
            ),
        ),
        Case(
            "depthwise_conv",
            f"T={size.frames} C={width} K=9",
            [encoded, taps],
            lambda b: kernels.depthwise_conv(encoded, taps, frames, backend=b),
        ),
    ]


def measure(case: Case, backend: str, size: Size, *, backward: bool) -> list[float]:
    """Milliseconds of each repeat, after the warm-up."""
    synchronize = torch.cuda.synchronize if case.inputs[0].is_cuda else lambda: None
    times = []
    for repeat in range(size.warmup + size.repeats):
        for tensor in case.inputs:
            tensor.grad = None
        synchronize()
        start = time.perf_counter()
        if backward:
            case.call(backend).sum().backward()
        else:
            with torch.no_grad():
                case.call(backend)
        synchronize()
        if repeat >= size.warmup:
            times.append(1e3 * (time.perf_counter() - start))
    return times


def rows(size: Size, device: str, dtype: torch.dtype, only: list[str]) -> list[dict[str, object]]:
    """One row for each measurement; a backend that cannot serve a case has none."""
    found = []
    for case in cases(size, device, dtype):
        if only and case.name not in only:
            continue
        for backend in Backend:
            for mode, backward in (("forward", False), ("forward+backward", True)):
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                try:
                    times = measure(case, backend.value, size, backward=backward)
                except BackendUnavailable:
                    continue
                p20, *_, p80 = statistics.quantiles(times, n=5)
                found.append(
                    {
                        "op": case.name,
                        "backend": backend.value,
                        "shape": case.shape,
                        "dtype": str(dtype).removeprefix("torch."),
                        "mode": mode,
                        "p20_ms": round(p20, 4),
                        "p50_ms": round(statistics.median(times), 4),
                        "p80_ms": round(p80, 4),
                        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else "",
                    }
                )
    return found


def provenance(device: str) -> dict[str, str]:
    """What a row was measured on."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = ""
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    name = torch.cuda.get_device_name() if device == "cuda" else f"cpu {platform.machine()}"
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": triton_version,
        "git": head.stdout.strip(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def main() -> None:
    """Measure, print the table and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--op", nargs="*", default=[], help="only these")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    gpu = options.device == "cuda"
    where = provenance(options.device)
    dtype = torch.bfloat16 if gpu else torch.float32
    table = [row | where for row in rows(GPU if gpu else CPU, options.device, dtype, options.op)]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    new = not options.output.exists()
    with options.output.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerows(table)
    for row in table:
        label = f"{row['op']:22} {row['backend']:10} {row['mode']:18}"
        sys.stdout.write(f"{label} {row['p50_ms']:10.3f} ms   {row['shape']}\n")
    sys.stdout.write(f"{len(table)} rows appended to {options.output}\n")


if __name__ == "__main__":
    main()
