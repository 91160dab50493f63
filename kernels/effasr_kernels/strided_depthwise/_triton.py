"""`strided_depthwise` in Triton."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from effasr_kernels.runtime.launch import launch, refusal
from effasr_kernels.runtime.tiles import count_tiles
from effasr_kernels.shared.partial_sums import summed
from effasr_kernels.strided_depthwise._kernels import strided_backward, strided_forward
from effasr_kernels.strided_depthwise.definition import StridedArguments

_PROGRAMS = 528
"""Rows of the backward's partial sums: four programs per multiprocessor of an H200 (132)."""

_INT32_MAX = torch.iinfo(torch.int32).max


@dataclass(frozen=True, slots=True)
class Config:
    """Places and channels of a tile and places of a program of one kernel."""

    block_p: int
    block_c: int
    span: int


def configs(channels: int) -> tuple[Config, Config]:
    """Return the configurations of the forward and backward (8 and 4 channels per thread).

    Args:
        channels: C.
    """
    block_c = min(256, max(16, 1 << (channels - 1).bit_length()))
    return Config(1024 // block_c, block_c, 128), Config(512 // block_c, block_c, 128)


def unsupported_reason(a: StridedArguments) -> str | None:
    """Return why this backend does not support these arguments, or None if it does."""
    if a.layout.rows * (a.x.shape[1] // 2) > _INT32_MAX:
        return "counts places of the result in int32"
    return refusal(a.x)


def forward(a: StridedArguments) -> tuple[tuple[Tensor], tuple[()]]:
    """See `effasr_kernels.strided_depthwise.strided_depthwise`; saves nothing."""
    layout, (_, bins, channels) = a.layout, a.x.shape
    sequences, width = layout.num_sequences, bins // 2
    cut, _ = configs(channels)
    y = a.x.new_empty(layout.rows, width, channels)
    launch(
        strided_forward,
        (count_tiles(layout.rows * width, sequences, cut.span), -(-channels // cut.block_c)),
        *(t.contiguous() for t in (a.x, a.weight, a.bias)),
        *(layout.cu_seqlens * width, a.lengths.contiguous(), y, sequences, layout.rows * width),
        RELU=a.relu,
        BINS=bins,
        CHANNELS=channels,
        BLOCK_P=cut.block_p,
        BLOCK_C=cut.block_c,
        SPAN=cut.span,
    )
    return (y,), ()


def saved_like(a: StridedArguments) -> tuple[()]:
    """Return no tensors, because the backward only uses the arguments."""
    return ()


def backward(
    a: StridedArguments,
    grads: Sequence[Tensor],
    results: Sequence[Tensor],
    saved: Sequence[Tensor],
) -> dict[str, Tensor | None]:
    """Return the gradients of the input, the weight and the bias."""
    x, layout, (_, bins, channels) = a.x, a.layout, a.x.shape
    sequences, width = layout.num_sequences, bins // 2
    _, cut = configs(channels)
    spans = count_tiles(layout.rows * width, sequences, cut.span)
    grad_x = x.new_empty(x.shape)
    partials = x.new_empty(min(spans, _PROGRAMS), 10 * channels, dtype=torch.float32)
    launch(
        strided_backward,
        (partials.shape[0], -(-channels // cut.block_c)),
        *(t.contiguous() for t in (x, a.weight)),
        *(layout.cu_seqlens * width, a.lengths.contiguous(), grads[0], grad_x, partials),
        *(sequences, layout.rows * width, spans),
        RELU=a.relu,
        BINS=bins,
        CHANNELS=channels,
        BLOCK_P=cut.block_p,
        BLOCK_C=cut.block_c,
        SPAN=cut.span,
    )
    sums = summed(partials, x.dtype)
    weight, bias = sums.split([9 * channels, channels])
    return {"x": grad_x, "weight": weight.view(channels, 9), "bias": bias}
