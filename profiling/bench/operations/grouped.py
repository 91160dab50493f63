"""Benchmarks of a linear layer per group of rows, against PyTorch's loop and grouped product."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import effasr_kernels as kernels
from bench.contender import Case, Contender, leaf
from bench.workload import Workload
from effasr_kernels import PackedLayout

_GROUPS, _EXPANSION = 4, 4


def cases(workload: Workload) -> list[Case]:
    """Return the case of an expert's first layer: groups of unequal size, one of them empty."""
    frames, width = workload.frame_layout, workload.width
    sizes = (frames.total // 2, 0, frames.total // 8)
    layout = PackedLayout.from_lengths(
        (*sizes, frames.total - sum(sizes)), workload.device, rows=frames.rows
    )
    x = workload.rows_of(layout, width)
    weight = workload.draw(_GROUPS, _EXPANSION * width, width, scale=width**-0.5)
    upstream = workload.rows_of(layout, _EXPANSION * width).detach()
    upstream[layout.total :] = 0

    def ours(backend: str) -> Contender:
        return Contender(
            {"x": x, "weight": weight},
            lambda: kernels.grouped_linear(x, weight, layout, backend=backend),
            [upstream],
        )

    def loop() -> Contender:
        """The host knows the sizes, which it does not where a router chooses."""
        leaves = {"x": leaf(x), "weight": leaf(weight)}
        bounds = [*layout.lengths, layout.rows - layout.total]

        def call() -> torch.Tensor:
            *groups, tail = leaves["x"].split(bounds)
            pairs = zip(groups, leaves["weight"], strict=True)
            rows = [F.linear(rows, own) for rows, own in pairs]
            return torch.cat([*rows, tail.new_zeros(len(tail), _EXPANSION * width)])

        return Contender(leaves, call, [upstream])

    def grouped_mm() -> Contender:
        """Return torch's own, for bfloat16 on a GPU; what it leaves in the tail is overwritten."""
        leaves = {"x": leaf(x), "weight": leaf(weight)}
        ends, inside = layout.cu_seqlens[1:], layout.mask()[:, None]

        def call() -> torch.Tensor:
            product = F.grouped_mm(leaves["x"], leaves["weight"].transpose(1, 2), offs=ends)
            return torch.where(inside, product, 0)

        return Contender(leaves, call, [upstream])

    shape = f"{workload.describe()} G={_GROUPS} C={width} F={_EXPANSION * width}"
    peers = {"torch loop": loop, "torch grouped_mm": grouped_mm}
    return [Case("grouped_linear", "", shape, ours, peers)]
