"""`dropout_add_layer_norm` in Triton.

For each element of a float32 residual stream and a bfloat16 branch, the forward moves 12 bytes
(reads 4 + 2, writes 4 + 2), the backward 16 (reads 4 + 2 of gradients and 4 of the sum, writes
4 + 2): 50 us for 8,448 rows of 1,024 channels at the 4.8 TB/s of an H200. The arithmetic, Philox
included, is less than 20 instructions an element, a third of that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from effasr_kernels.dropout_add_layer_norm._kernels import add_norm, add_norm_backward
from effasr_kernels.dropout_add_layer_norm.definition import NormArguments
from effasr_kernels.runtime.launch import launch, refusal
from effasr_kernels.shared.dropout import seed_tensor
from effasr_kernels.shared.partial_sums import summed, summed_parts

_ROWS, _ROWS_WIDE = 4, 2
_WIDE = 2_048
"""From this number of channels on, fewer rows fit in registers."""
_MOST_CHANNELS = 4_096
_MOST_WARPS = 16
_PROGRAMS = 264 * 1_024
"""Programs of the backward, times channels: two programs of eight warps on each of the 132
multiprocessors of an H200 for 1,024 channels. Each writes a partial sum, 16 bytes a channel."""


def unsupported_reason(a: NormArguments) -> str | None:
    """Return why this backend does not support these arguments, or None if it does."""
    if a.residual.shape[1] > _MOST_CHANNELS:
        return f"more than {_MOST_CHANNELS:,} channels do not fit in registers"
    return refusal(a.residual) or (None if a.x is None else refusal(a.x))


def forward(a: NormArguments) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """See `effasr_kernels.dropout_add_layer_norm.dropout_add_layer_norm`.

    Saves means and inverse standard deviations of the rows.
    """
    residual, x, (rows, channels) = _with_unit_stride(a.residual), a.x, a.residual.shape
    x = None if x is None else _with_unit_stride(x)
    none = residual.new_empty(0)
    summed = normed = None
    if a.prenorm and x is not None:
        summed = residual.new_empty(rows, channels)
    if a.weight is not None:
        normed = residual.new_empty(rows, channels, dtype=a.normed_dtype)
    means, rstds = saved_like(a)
    options = _configuration(channels, residual, x, normed)
    launch(
        add_norm,
        (-(-rows // options["ROWS"]),),
        *(residual, x, *map(_contiguous, (a.x_bias, a.weight, a.bias)), *_seed_and_layout(a)),
        *(summed, normed, *((None, None) if normed is None else (means, rstds))),
        *(a.layout.num_sequences, rows, a.offset, channels, residual.stride(0)),
        *(channels if x is None else x.stride(0), *_scale(a), a.eps),
        **options,
        DROPS=a.dropout > 0,
    )
    if a.prenorm and x is None:
        summed = a.residual
    return (none if normed is None else normed, none if summed is None else summed), (means, rstds)


def saved_like(a: NormArguments) -> tuple[Tensor, Tensor]:
    """Return empty tensors with the shapes and dtypes of what `forward` saves."""
    rows = 0 if a.weight is None else a.residual.shape[0]
    means, rstds = (a.residual.new_empty(rows, dtype=torch.float32) for _ in range(2))
    return means, rstds


def backward(
    a: NormArguments, grads: Sequence[Tensor], results: Sequence[Tensor], saved: Sequence[Tensor]
) -> dict[str, Tensor | None]:
    """Return the gradients of the branch, its bias, the residual and the parameters."""
    dsummed = grads[1] if a.prenorm else None
    dnormed = None if a.weight is None else grads[0]
    given = results[1] if a.prenorm else a.residual
    summed = None if dnormed is None else _with_unit_stride(given)
    x = None if a.prenorm or a.x is None else _with_unit_stride(a.x)
    rows, channels = given.shape
    dresidual = given.new_empty(rows, channels)
    dx = given.new_empty(rows, channels, dtype=a.narrow_dtype) if a.has_branch else None
    options = _configuration(channels, given, dnormed, dx)
    programs = max(1, min(-(-rows // options["ROWS"]), _PROGRAMS // options["BLOCK_C"]))
    partials = None
    if sums := 2 * (dnormed is not None) + (a.x_bias is not None):
        partials = given.new_empty(programs, sums, channels, dtype=torch.float32)
    launch(
        add_norm_backward,
        (programs,),
        *(dnormed, dsummed, summed, x, *map(_contiguous, (a.x_bias, a.weight))),
        *((None, None) if dnormed is None else saved),
        *(*_seed_and_layout(a), dresidual, dx, partials),
        *(a.layout.num_sequences, rows, a.offset, channels),
        channels if summed is None else summed.stride(0),
        channels if x is None else x.stride(0),
        *_scale(a),
        **options,
        DROPS=a.dropout > 0,
    )
    gradients: dict[str, Tensor | None] = {"x": dx, "residual": dresidual}
    return gradients | _of_parameters(a, partials)


def _of_parameters(a: NormArguments, partials: Tensor | None) -> dict[str, Tensor | None]:
    """Return the gradients of the norm's parameters and of the branch's bias, from one launch."""
    none: dict[str, Tensor | None] = {"weight": None, "bias": None, "x_bias": None}
    if partials is None:
        return none
    if a.weight is None:
        assert a.x_bias is not None
        return none | {"x_bias": summed(partials, a.x_bias.dtype)[0]}
    if a.x_bias is None:
        of_norm = summed(partials, a.weight.dtype)
        return none | {"weight": of_norm[0], "bias": of_norm[1]}
    of_norm, of_branch = summed_parts(partials, a.weight.dtype, a.x_bias.dtype)
    return {"weight": of_norm[0], "bias": of_norm[1], "x_bias": of_branch}


def _scale(a: NormArguments) -> tuple[float, float]:
    return a.scale / (1 - a.dropout), a.dropout


def _seed_and_layout(a: NormArguments) -> tuple[Tensor | None, Tensor]:
    seed = seed_tensor(a.seed, a.layout.device) if a.dropout else None
    return seed, a.layout.cu_seqlens


def _configuration(channels: int, *tensors: Tensor | None) -> dict[str, Any]:
    """Return constants and options with which a warp loads 16 bytes a thread of the widest tensor.

    The warps lie side by side in a row, so that a thread has the same columns in all rows: it adds
    the gradients of the parameters, and decides which elements to drop, without exchange.
    """
    widest = max(x.element_size() for x in tensors if x is not None)
    vector = 16 // widest
    block = max(32 * vector, 1 << (channels - 1).bit_length())
    warps = min(_MOST_WARPS, max(1, block // (32 * vector)))
    rows = _ROWS if block < _WIDE else _ROWS_WIDE
    return {"ROWS": rows, "BLOCK_C": block, "VEC": vector, "num_warps": warps}


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
