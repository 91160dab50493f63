"""Packed attention on CPUs: csrc/attention_cpu.cpp beside PyTorch, forward and with the backward.

Sequences of a batch are equally long, so that a padded batch has no padding: what it wins in real
batches comes on top. Systems take turns; the time is the least of all turns, in milliseconds, as
other load on the machine only adds to it. Each result is compared with the reference's first.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.operations.relative import nemo
from rich.console import Console
from rich.table import Table
from torch import Tensor

from effasr_kernels import PackedLayout, RelativeBias, attention


@dataclass(frozen=True)
class Shape:
    """Heads of a model, and lengths of its sequences."""

    width: int
    heads: int
    lengths: tuple[int, ...]


SHAPES = {
    "demo": Shape(32, 4, (10, 20, 40, 80)),
    "small": Shape(24, 4, (10, 40, 80, 160)),
    "fastconformer": Shape(64, 8, (25, 100, 250, 500)),
    "whisper-tiny": Shape(64, 6, (150, 500, 1500)),
}
_RESULTS = 1e-4


@dataclass(frozen=True)
class _System:
    inputs: Sequence[Tensor]
    call: Callable[..., Tensor]
    upstream: Tensor
    packed: Callable[[Tensor], Tensor]

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.call(*self.inputs)

    def both(self) -> Sequence[Tensor]:
        return torch.autograd.grad(self.call(*self.inputs), list(self.inputs), self.upstream)

    def results(self) -> list[Tensor]:
        return [self.packed(x) if x.dim() == 4 else x for x in (self.forward(), *self.both())]


def _leaf(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()


def _systems(shape: Shape, length: int, count: int, relative: bool) -> dict[str, _System]:
    layout = PackedLayout.from_lengths([length] * count)
    heads = shape.heads, shape.width
    q, k, v, upstream = (torch.randn(layout.rows, *heads) for _ in range(4))
    biases = [torch.randn(*heads), torch.randn(*heads), torch.randn(2 * length - 1, *heads)]
    packed = [_leaf(x) for x in (q, k, v, *(biases if relative else ()))]

    def batch(x: Tensor) -> Tensor:
        return _leaf(x.view(count, length, *heads).transpose(1, 2))

    def flat(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(layout.rows, *heads)

    def by(backend: str) -> Callable[..., Tensor]:
        def call(q: Tensor, k: Tensor, v: Tensor, *biases: Tensor) -> Tensor:
            position = RelativeBias(*biases) if biases else None
            return attention(q, k, v, layout, position=position, backend=backend)

        return call

    same = lambda x: x
    found = {x: _System(packed, by(x), upstream, same) for x in ("cpp", "reference")}
    padded = [batch(x) for x in (q, k, v)]
    up = batch(upstream).detach()
    if not relative:
        found["sdpa"] = _System(padded, F.scaled_dot_product_attention, up, flat)
        return found
    mask = torch.ones(count, length, dtype=torch.bool)

    def by_nemo(q: Tensor, k: Tensor, v: Tensor, u: Tensor, p: Tensor, table: Tensor) -> Tensor:
        return nemo(q, k, v, mask, u, p, table.flip(0), shape.width**-0.5)

    found["NeMo (sdpa with bias)"] = _System([*padded, *map(_leaf, biases)], by_nemo, up, flat)
    return found


def _check(systems: dict[str, _System]) -> None:
    expected = systems["reference"].results()
    for name, system in systems.items():
        for x, y in zip(system.results(), expected, strict=True):
            error = float((x - y).norm() / y.norm().clamp_min(1e-30))
            if not error < _RESULTS:
                raise SystemExit(f"{name} differs from the reference by {error:.2g} of its norm.")


def _times(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Return the least milliseconds of each; they take turns."""
    least = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    deadline = time.perf_counter() + seconds
    turns = 0
    while turns < 3 or time.perf_counter() < deadline:
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            least[name] = min(least[name], 1e3 * (time.perf_counter() - begin))
        turns += 1
    return least


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--frames", type=int, default=1500, help="rows of a batch, about")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each row")
    return parser.parse_args()


def main() -> None:
    """Print a table."""
    options = _arguments()
    torch.manual_seed(0)
    table = Table("shape", "D", "H", "T", "N", "threads", "positions", "pass", "cpp ms")
    for column in ("reference ms", "peer ms", "reference / cpp", "peer / cpp"):
        table.add_column(column, justify="right")
    for name in options.shapes:
        shape = SHAPES[name]
        for length in shape.lengths:
            count = max(1, options.frames // length)
            for relative in (False, True):
                systems = _systems(shape, length, count, relative)
                torch.set_num_threads(1)
                _check(systems)
                for threads in options.threads:
                    torch.set_num_threads(threads)
                    for kind in ("forward", "both"):
                        calls = {key: getattr(x, kind) for key, x in systems.items()}
                        cpp, *others = _times(calls, options.seconds).values()
                        table.add_row(
                            *(name, *map(str, (shape.width, shape.heads, length, count, threads))),
                            *("relative" if relative else "none", kind),
                            *(f"{x:.3f}" for x in (cpp, *others)),
                            *(f"{x / cpp:.2f}" for x in others),
                        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
