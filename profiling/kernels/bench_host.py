"""The host time of a call of each operation: everything from the public function to the launches.

Launches are replaced by a function that does nothing, so no GPU is needed and none is timed. What a
call allocates and copies on the way counts, on the CPU. The calls are the operations' examples, so
their tensors are tiny.

    python profiling/kernels/bench_host.py [--repeats 400] [--op attention ...]

Columns: the median of a call without autograd; with autograd; and of a call and its backward, in
microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import effasr_kernels
from effasr_kernels import OPERATIONS, TorchOp
from effasr_kernels.runtime.example import Example, ExampleInputs
from effasr_kernels.runtime.launch import diverted
from effasr_kernels.runtime.torch_op import DifferentiableOp

_WARM_UP = 50


class _Leaves(ExampleInputs):
    """Inputs that require gradients, and a list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.leaves: list[Tensor] = []

    def floating(self, *shape: int, differentiable: bool = True) -> Tensor:
        x = super().floating(*shape)
        if differentiable:
            self.leaves.append(x.requires_grad_())
        return x


def median(call: Callable[[], object], repeats: int) -> float:
    """Return the microseconds of a call."""
    for _ in range(_WARM_UP):
        call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1000


def measure(op: TorchOp, example: Example, repeats: int) -> list[float]:
    """Return medians of the forward without and with autograd, and of both passes."""
    run: Callable[..., Any] = getattr(effasr_kernels, op.name)
    plain = example.arguments(ExampleInputs())
    with torch.no_grad():
        found = [median(lambda: run(**plain, backend="triton"), repeats)]
    if not isinstance(op, DifferentiableOp):
        return found
    inputs = _Leaves()
    given = example.arguments(inputs)

    def forward() -> list[Tensor]:
        results = run(**given, backend="triton")
        return [results] if isinstance(results, Tensor) else list(results)

    upstream = [torch.ones_like(result) for result in forward()]
    both = lambda: torch.autograd.grad(forward(), inputs.leaves, upstream)
    return [*found, median(forward, repeats), median(both, repeats)]


def main(arguments: list[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--op", nargs="+", default=list(OPERATIONS), choices=list(OPERATIONS))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sys.stdout.write(f"{'us':28}{'no grad':>10}{'forward':>10}{'both':>10}\n")
    with diverted(lambda launch: None):
        for name in options.op:
            for example in OPERATIONS[name].examples:
                figures = measure(OPERATIONS[name], example, options.repeats)
                columns = "".join(f"{figure:10.1f}" for figure in figures)
                sys.stdout.write(f"{example.label:28}{columns}\n")


if __name__ == "__main__":
    main()
