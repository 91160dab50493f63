"""Counts the work of kernels without a GPU: instructions, memory sectors, bank conflicts.

    python profiling/kernels/kernel_counts.py [--op attention ...] [--kind relative ...]
        [--worst 10]

Each operation runs forward and backward at the published widths on a short batch, in bfloat16, in
PTX (`emulator`). Printed for each kernel, and for the lines of its source that lose most:

    instructions  of a warp, in all launches
    sectors       32-byte sectors of global memory that were touched, and how many of them the bytes
                  that were wanted would fill: 1.00 is coalesced
    wavefronts    of shared memory, and by how much bank conflicts multiply them: 1.00 is none
    products      multiplications of tensor cores for each instruction

Counts are exact and need no GPU; what they cost in time only a GPU tells. A line without sectors or
wavefronts computes.
"""

from __future__ import annotations

import argparse
import sys
from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench.contender import Case
from bench.workload import Widths, Workload, drawn_durations
from bench_ops import GROUPS
from emulator.emulate import binaries, emulated
from emulator.machine import COUNTS, Binary

from effasr_kernels import BackendUnavailable


@dataclass(slots=True)
class Sum:
    """`COUNTS`, added up."""

    issued: int = 0
    sectors: int = 0
    needed: int = 0
    wavefronts: int = 0
    fewest: int = 0
    products: int = 0

    def add(self, counts: list[int]) -> None:
        """Add others, such as those of one instruction."""
        for name, count in zip(COUNTS, counts, strict=True):
            setattr(self, name, getattr(self, name) + count)

    @property
    def lost(self) -> int:
        """Sectors and wavefronts that better patterns would save."""
        return self.sectors - self.needed + self.wavefronts - self.fewest

    def cells(self) -> list[str]:
        """Return the printed cells."""
        ratio = lambda a, b: f"{a / b:.2f}" if b else ""
        products = f"{self.products / self.issued:,.0f}" if self.products else ""
        return [
            f"{self.issued:,}",
            f"{self.sectors:,}" if self.sectors else "",
            ratio(self.sectors, self.needed),
            f"{self.wavefronts:,}" if self.wavefronts else "",
            ratio(self.wavefronts, self.fewest),
            products,
        ]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", nargs="*", default=[], help="only these, such as attention")
    parser.add_argument("--kind", nargs="*", default=[], help="only these, such as relative")
    parser.add_argument("--frames", type=int, default=400, help="frame rows of the batch")
    parser.add_argument("--head-width", type=int, default=64, help="D")
    parser.add_argument("--vocabulary", type=int, default=1024, help="V")
    parser.add_argument("--architecture", type=int, choices=(80, 90), default=90)
    parser.add_argument("--worst", type=int, default=3, help="lines for each kernel")
    return parser.parse_args(arguments)


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Return the cases of `bench_ops` on a short batch."""
    workload = Workload(
        rows=options.frames,
        head_width=options.head_width,
        durations=drawn_durations(),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        widths=Widths(vocabulary=options.vocabulary),
        sequences=None,
    )
    for group in GROUPS:
        for case in group(workload):
            if case.op in (options.op or [case.op]) and case.kind in (options.kind or [case.kind]):
                yield case


def count(case: Case, architecture: int) -> None:
    """Run a case forward and backward; kernels have the counts of this case alone."""
    for binary in binaries():
        binary.counts[:] = array("Q", bytes(8 * len(binary.counts)))
    contender = case.ours("triton")
    with emulated(architecture, counted=True):
        if contender.differentiable:
            contender.gradients()
        else:
            contender.results()


def lines_of(binary: Binary) -> dict[str, Sum]:
    """Return counts by source line."""
    found: dict[str, Sum] = defaultdict(Sum)
    width = len(COUNTS)
    for number, (*_, line) in enumerate(binary.program.code):
        place = ":".join(binary.program.lines[line].split(":")[:2])
        found[place].add(list(binary.counts[number * width : (number + 1) * width]))
    return found


def main(arguments: list[str] | None = None) -> None:
    """Count, and print."""
    options = parse(arguments)
    head = ["instructions", "sectors", "x needed", "wavefronts", "x conflicts", "products"]
    for case in cases(options):
        try:
            count(case, options.architecture)
        except (BackendUnavailable, NotImplementedError) as reason:
            sys.stderr.write(f"kernel_counts: {case.name}: {reason}\n")
            continue
        _say(f"\n{case.name}, {case.shape}")
        _say(f"  {'':48}" + "".join(f"{name:>14}" for name in head))
        for binary in binaries():
            if not any(binary.counts):
                continue
            lines = lines_of(binary)
            total = Sum()
            for counts in lines.values():
                total.add([getattr(counts, name) for name in COUNTS])
            _print(binary.program.name, total)
            worst = sorted(lines.items(), key=lambda item: -item[1].lost)[: options.worst]
            for place, counts in worst:
                if counts.lost:
                    _print(f"  {place}", counts)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _print(name: str, counts: Sum) -> None:
    _say(f"  {name:48}" + "".join(f"{cell:>14}" for cell in counts.cells()))


if __name__ == "__main__":
    main()
