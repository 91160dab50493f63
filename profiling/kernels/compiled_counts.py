"""Counts launches and bytes of our operations, and of torch.compile for the same, without a GPU.

    python profiling/kernels/compiled_counts.py [--frames 8448] [--width 512 1024] [--output ROWS]

Between the matrix products of a layer, torch.compile could compute three parts as well: the
residual stream with its norm, the inside of a feed-forward network, and batch normalization. Its
kernels are those that TorchInductor schedules for PyTorch's own functions, for an H200
(`census.inductor`). A launch has the bytes of the tensors that it reads and writes, each once; they
are printed for each element of the rows. An operation is counted alone: in a layer, the sums of all
gradients of parameters share one launch in eager code. torch.compile also computes the statistics
of batch normalization, which ours gets from the convolution.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import rows
from bench.contender import Case, Contender
from bench.operations import between, norms
from bench.workload import LISTED, Workload, read_durations
from census import operators

from effasr_kernels.runtime.launch import Launch, recording

RESULTS = Path(__file__).parents[1] / "results" / "compiled_counts.csv"
COLUMNS = [
    *("part", "frames", "channels", "by", "launches_forward", "launches_backward"),
    *("bytes_forward", "bytes_backward", "torch"),
]
_HEADS = 8
Passes = dict[str, "Count"]


@dataclass(frozen=True, slots=True)
class Count:
    """What a part of a layer costs in one pass.

    Attributes:
        launches: Number of launches.
        bytes: Bytes that they read and write.
    """

    launches: int
    bytes: int

    @classmethod
    def of(cls, sizes: Iterable[int]) -> Count:
        """Return the count of launches with so many bytes each."""
        sizes = list(sizes)
        return cls(len(sizes), sum(sizes))


def parts(workload: Workload) -> list[Case]:
    """Return the parts of a layer that torch.compile could compute."""
    return [*between.cases(workload), norms.normalization(workload)]


def ours(case: Case) -> Passes:
    """Count the launches of our operation, forward and backward."""
    contender = case.ours("triton")
    with recording() as launches:
        results = contender.results()
        forward = len(launches)
        torch.autograd.grad(results, list(contender.leaves.values()), contender.upstream)
    return {
        "forward": Count.of(map(_moved, launches[:forward])),
        "backward": Count.of(map(_moved, launches[forward:])),
    }


def compiled(case: Case) -> Passes:
    """Count the kernels of torch.compile for PyTorch's functions, forward and backward."""
    # Imported here, because TorchInductor takes seconds.
    from census.inductor import inductor_kernels

    contender = next(
        make() for name, make in case.peers.items() if name in ("torch", "torch eager")
    )

    def run(compile_: Callable[..., Any]) -> None:
        Contender(contender.leaves, compile_(contender.call), contender.upstream).gradients()

    found = inductor_kernels(run)
    return {
        name: Count.of(x.bytes for x in found if x.is_backward == (name == "backward"))
        for name in ("forward", "backward")
    }


def _moved(launch: Launch) -> int:
    return sum(map(operators.size, operators.unique(operators.tensors_of(launch.values))))


def counted(workload: Workload) -> Iterator[dict[str, object]]:
    """Yield a row for each part and implementation."""
    for case in parts(workload):
        x = case.ours("triton").leaves["x"]
        for by, passes in (("effasr_kernels", ours(case)), ("torch.compile", compiled(case))):
            both = passes["forward"], passes["backward"]
            yield dict(
                zip(
                    COLUMNS,
                    [
                        *(case.name, *x.shape, by, *(one.launches for one in both)),
                        *(round(one.bytes / x.numel(), 2) for one in both),
                        torch.__version__.split("+")[0],
                    ],
                    strict=True,
                )
            )


def workload_of(frames: int, width: int) -> Workload:
    """Return a packed batch of utterances as in LibriSpeech, in bfloat16."""
    return Workload(
        rows=frames,
        head_width=width // _HEADS,
        durations=read_durations(LISTED),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Count, print, and write the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frames", type=int, default=8_448, help="rows of the batch")
    parser.add_argument(
        "--width", type=int, nargs="+", default=[512, 1024], help="of a layer; 8 divides it"
    )
    parser.add_argument("--output", type=Path, help=f"CSV file to write, such as {RESULTS.name}")
    options = parser.parse_args(arguments)
    found = [row for width in options.width for row in counted(workload_of(options.frames, width))]
    if options.output is not None:
        rows.write(options.output, COLUMNS, found)
    sys.stdout.write("\t".join(COLUMNS) + "\n")
    for row in found:
        sys.stdout.write("\t".join(map(str, row.values())) + "\n")


if __name__ == "__main__":
    main()
