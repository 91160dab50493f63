"""Benchmarks of batch normalization against that of torch, eager and compiled, on packed rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import effasr_kernels as kernels
from bench.contender import Case, Contender, leaf
from bench.workload import Workload


def cases(workload: Workload) -> list[Case]:
    """Return cases of the norm of a Conformer's convolution, and of its running statistics."""
    return [normalization(workload), running(workload)]


def normalization(workload: Workload) -> Case:
    """Return normalization by the statistics of the batch, and SiLU; parameters are float32.

    Ours is given the statistics, which the convolution before it computes; torch computes them.
    """
    layout, width = workload.frame_layout, workload.width
    x, total = workload.rows_of(layout, width), layout.total
    weight, bias = (leaf(workload.draw(width).float().roll(i)) for i in (1, 2))
    mean, variance = _statistics(x, total)
    upstream = workload.rows_of(layout, width).detach().roll(1, 1)
    leaves = {"x": x, "weight": weight, "bias": bias}

    def ours(backend: str) -> Contender:
        return Contender(
            leaves,
            lambda: kernels.batch_norm(
                *leaves.values(), mean, variance, layout, silu=True, backend=backend
            ),
            [upstream],
        )

    def torch_norm(wrap: Callable[[Any], Any]) -> Contender:
        rows = leaf(x[:total])

        def normalized(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return F.silu(F.batch_norm(rows, None, None, weight, bias, training=True))

        def packed(name: str, found: Tensor) -> Tensor:
            is_packed = name in ("x", "result 0")
            return F.pad(found, (0, 0, 0, layout.rows - total)) if is_packed else found

        call = wrap(normalized)
        return Contender(
            {**leaves, "x": rows}, lambda: call(rows, weight, bias), [upstream[:total]], packed
        )

    on_gpu = workload.device.type == "cuda"
    compiled = lambda call: torch.compile(call, dynamic=False) if on_gpu else call
    peers = {
        "torch eager": lambda: torch_norm(lambda call: call),
        "torch.compile": lambda: torch_norm(compiled),
    }
    shape = f"{workload.describe()} C={width}"
    return Case("batch_norm", "silu", shape, ours, peers)


def running(workload: Workload) -> Case:
    """Return the update of running statistics; with momentum 1 repetitions change nothing."""
    layout, width = workload.frame_layout, workload.width
    mean, variance = _statistics(workload.rows_of(layout, width), layout.total)
    leaves = {"mean": mean, "variance": variance}
    moved = 6 * mean.numel() * mean.element_size()

    def contender(update: Callable[[Tensor, Tensor, Tensor], None]) -> Contender:
        state = torch.zeros_like(mean), torch.ones_like(mean)
        batches = torch.zeros((), dtype=torch.int64, device=mean.device)

        def call() -> tuple[Tensor, Tensor]:
            update(*state, batches)
            return state

        return Contender(leaves, call, [], moved=moved)

    def ours(backend: str) -> Contender:
        return contender(
            lambda *state: kernels.update_running_statistics(
                *state, mean, variance, layout, momentum=1.0, backend=backend
            )
        )

    def eager() -> Contender:
        def update(old_mean: Tensor, old_variance: Tensor, batches: Tensor) -> None:
            count = layout.cu_seqlens[-1].float()
            share = 1.0 * (count > 0)
            old_mean.lerp_(mean, share)
            old_variance.lerp_(variance * (count / (count - 1).clamp(min=1)), share)
            batches.add_(1)

        return contender(update)

    shape = f"N={len(layout.lengths)} C={width}"
    return Case("update_running_statistics", "", shape, ours, {"torch eager": eager})


def _statistics(x: Tensor, total: int) -> tuple[Tensor, Tensor]:
    real = x.detach()[:total].float()
    return real.mean(0), real.var(0, correction=0)
