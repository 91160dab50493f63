"""`strided_depthwise` in Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.launch import launch, refusal
from effasr_kernels.runtime.tiles import count_tiles
from effasr_kernels.strided_depthwise._kernels import strided_backward, strided_forward
from effasr_kernels.strided_depthwise.torch_op import call

_PROGRAMS = 528
"""Rows of the backward's partial sums: four programs for each of an H200's 132 processors."""

_INT32_MAX = torch.iinfo(torch.int32).max


@dataclass(frozen=True, slots=True)
class Config:
    """How one kernel is cut: places and channels of a tile, places of a program."""

    block_p: int
    block_c: int
    span: int


def configs(channels: int) -> tuple[Config, Config]:
    """How to cut the forward and the backward: each thread has 8 and 4 channels of one place.

    Args:
        channels: C.
    """
    block_c = min(256, max(16, 1 << (channels - 1).bit_length()))
    return Config(1024 // block_c, block_c, 128), Config(512 // block_c, block_c, 128)


def why_not(
    x: Tensor, weight: Tensor, bias: Tensor, layout: PackedLayout, lengths: Tensor
) -> str | None:
    """The reason for which these arguments cannot be served, or None."""
    if layout.rows * (x.shape[1] // 2) > _INT32_MAX:
        return "counts places of the result in int32"
    return refusal(x, weight, bias)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor, layout: PackedLayout, lengths: Tensor
) -> tuple[tuple[Tensor], tuple[()]]:
    """See `effasr_kernels.strided_depthwise.strided_depthwise`; saves nothing."""
    _, bins, channels = x.shape
    sequences, width = layout.num_sequences, bins // 2
    cut, _ = configs(channels)
    y = x.new_empty(layout.rows, width, channels)
    launch(
        strided_forward,
        (count_tiles(layout.rows * width, sequences, cut.span), -(-channels // cut.block_c)),
        *(t.contiguous() for t in (x, weight, bias)),
        *(layout.cu_seqlens * width, lengths.contiguous(), y, sequences, layout.rows * width),
        BINS=bins,
        CHANNELS=channels,
        BLOCK_P=cut.block_p,
        BLOCK_C=cut.block_c,
        SPAN=cut.span,
    )
    return (y,), ()


def saved_like(*_: object, **__: object) -> tuple[()]:
    """Nothing is saved."""
    return ()


def backward(
    grads: Sequence[Tensor],
    results: Sequence[Tensor],
    saved: Sequence[Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    layout: PackedLayout,
    lengths: Tensor,
) -> dict[str, Tensor | None]:
    """The gradients of the input, the weight and the bias."""
    _, bins, channels = x.shape
    sequences, width = layout.num_sequences, bins // 2
    _, cut = configs(channels)
    spans = count_tiles(layout.rows * width, sequences, cut.span)
    grad_x = x.new_empty(x.shape)
    partials = x.new_empty(min(spans, _PROGRAMS), 10, channels, dtype=torch.float32)
    launch(
        strided_backward,
        (partials.shape[0], -(-channels // cut.block_c)),
        *(t.contiguous() for t in (x, weight)),
        *(layout.cu_seqlens * width, lengths.contiguous(), grads[0], grad_x, partials),
        *(sequences, layout.rows * width, spans),
        BINS=bins,
        CHANNELS=channels,
        BLOCK_P=cut.block_p,
        BLOCK_C=cut.block_c,
        SPAN=cut.span,
    )
    sums = partials.sum(0).to(x.dtype)
    return {"x": grad_x, "weight": sums[:9].T.contiguous(), "bias": sums[9].contiguous()}


run = call.kernel(__name__, forward, backward)
