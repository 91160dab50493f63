"""`batch_norm` in Triton: one pass forward; one for the sums and one for the gradient backward.

Threads load 16 bytes at a time. Sums are over spans of rows in a fixed order, so that results
repeat to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from effasr_kernels.batch_norm._kernels import normalize, normalize_backward, sum_gradients
from effasr_kernels.batch_norm.definition import BatchNormArguments
from effasr_kernels.runtime.counters import program_counters
from effasr_kernels.runtime.launch import launch, refusal

_ELEMENTS, _ELEMENTS_BACKWARD = 4_096, 2_048
"""Elements of a tile: 32 and 16 per thread. The backward has two inputs and six numbers per
channel; with more elements their registers would leave too few threads to hide the loads."""

_SPAN, _SPAN_C = 256, 64
"""Rows and channels of a partial sum: programs enough for every multiprocessor, and few sums for
the last program of a block of channels, which adds them when the others have ended."""


def unsupported_reason(a: BatchNormArguments) -> str | None:
    """Return why this backend does not support these arguments, or None if it does."""
    return refusal(a.x)


def forward(a: BatchNormArguments) -> tuple[tuple[Tensor], tuple[()]]:
    """See `effasr_kernels.batch_norm.batch_norm`; saves nothing."""
    x, layout = _with_unit_stride(a.x), a.layout
    channels = x.shape[1]
    y = x.new_empty(layout.rows, channels)
    block, block_c = _tile(channels, _ELEMENTS)
    launch(
        normalize,
        (_cover(layout.rows, block), _cover(channels, block_c)),
        *(x, *_parameters(a), layout.cu_seqlens, y),
        *(layout.num_sequences, layout.rows, x.stride(0), channels, a.eps),
        SILU=a.silu,
        BLOCK=block,
        BLOCK_C=block_c,
    )
    return (y,), ()


def saved_like(a: BatchNormArguments) -> tuple[()]:
    """Return no tensors, because the backward normalizes again."""
    return ()


def backward(
    a: BatchNormArguments,
    grads: Sequence[Tensor],
    results: Sequence[Tensor],
    saved: Sequence[Tensor],
) -> dict[str, Tensor | None]:
    """Return the gradients of x, weight and bias; the statistics have none."""
    x, layout = _with_unit_stride(a.x), a.layout
    channels, sequences = x.shape[1], layout.num_sequences
    parameters = _parameters(a)
    spans, blocks_c = _cover(layout.rows, _SPAN), _cover(channels, _SPAN_C)
    partials = x.new_empty(2, spans, channels, dtype=torch.float32)
    # Without a row nothing is launched.
    sums = (torch.empty if spans else torch.zeros)(
        2, channels, dtype=torch.float32, device=x.device
    )
    launch(
        sum_gradients,
        (spans, blocks_c),
        *(grads[0], x, *parameters, layout.cu_seqlens, partials, sums),
        program_counters(x, blocks_c),
        *(sequences, x.stride(0), channels, a.eps),
        SILU=a.silu,
        BLOCK=_ELEMENTS_BACKWARD // _SPAN_C,
        BLOCK_C=_SPAN_C,
        SPAN=_SPAN,
    )
    block, block_c = _tile(channels, _ELEMENTS_BACKWARD)
    dx = x.new_empty(layout.rows, channels)
    launch(
        normalize_backward,
        (_cover(layout.rows, block), _cover(channels, block_c)),
        *(grads[0], x, *parameters, layout.cu_seqlens, sums, dx),
        *(sequences, layout.rows, x.stride(0), channels, a.eps),
        SILU=a.silu,
        FIXED=a.fixed,
        BLOCK=block,
        BLOCK_C=block_c,
    )
    dweight, dbias = sums.unbind(0)
    return {
        "x": dx,
        "weight": dweight.to(a.weight.dtype),
        "bias": dbias.to(a.bias.dtype),
        "mean": None,
        "variance": None,
    }


def _parameters(a: BatchNormArguments) -> tuple[Tensor, ...]:
    return tuple(x.contiguous() for x in (a.weight, a.bias, a.mean, a.variance))


def _tile(channels: int, elements: int) -> tuple[int, int]:
    """Return the rows and channels of a tile, with the fewest surplus channels."""
    block_c = min((256, 128, 64), key=lambda size: _cover(channels, size) * size)
    return elements // block_c, block_c


def _cover(count: int, block: int) -> int:
    return -(-count // block)


def _with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
