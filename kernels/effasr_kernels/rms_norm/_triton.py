"""`rms_norm` in Triton.

For each bfloat16 element the forward moves 4 bytes and the backward 6: 12 and 18 us for 6,842 rows
of 2,048 channels at the 4.8 TB/s of an H200. Separate calls of PyTorch, as in transformers, move
36 forward alone: to float32, square, mean, product, back, and product with the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, float32

from effasr_kernels.rms_norm._kernels import normalize, normalize_backward
from effasr_kernels.rms_norm.definition import RMSNormArguments
from effasr_kernels.runtime.launch import launch, refusal
from effasr_kernels.shared.partial_sums import summed

_MOST_CHANNELS = 8_192
_TILE = 2_048
"""Elements of a tile of several rows: 16 for each thread of four warps."""
_PROGRAMS = 264 * 2_048
"""Programs of the backward, times channels: two on each of the 132 multiprocessors of an H200 for
2,048 channels. Each writes a partial sum, 4 bytes a channel: too many for the last program of the
launch to add alone (`effasr_kernels.shared.last_program`)."""
_MOST_PROGRAMS = 2_112


def unsupported_reason(a: RMSNormArguments) -> str | None:
    """Return why this backend does not support these arguments, or None if it does."""
    if a.x.shape[1] > _MOST_CHANNELS:
        return f"more than {_MOST_CHANNELS:,} channels do not fit in registers"
    return refusal(a.x)


def forward(a: RMSNormArguments) -> tuple[tuple[Tensor], tuple[Tensor]]:
    """See `effasr_kernels.rms_norm.rms_norm`; saves the inverse root mean square of each row."""
    x, (rows, width) = _with_unit_stride(a.x), a.x.shape
    y = x.new_empty(rows, width, dtype=a.result_dtype)
    (rstds,) = saved_like(a)
    options = _configuration(width, x, y)
    launch(
        normalize,
        (-(-rows // options["ROWS"]),),
        *(x, a.weight.contiguous(), y, rstds, rows, width, x.stride(0), a.eps),
        **options,
        OFFSET=a.offset,
    )
    return (y,), (rstds,)


def saved_like(a: RMSNormArguments) -> tuple[Tensor]:
    """Return an empty tensor with the shape and dtype of what `forward` saves."""
    return (a.x.new_empty(a.x.shape[0], dtype=float32),)


def backward(
    a: RMSNormArguments,
    grads: Sequence[Tensor],
    results: Sequence[Tensor],
    saved: Sequence[Tensor],
) -> dict[str, Tensor | None]:
    """Return the gradients of x and weight; if ``frozen``, of x alone."""
    x, (rows, width) = _with_unit_stride(a.x), a.x.shape
    dx = x.new_empty(rows, width)
    options = _configuration(width, x, grads[0])
    most = min(_MOST_PROGRAMS, _PROGRAMS // options["BLOCK_W"])
    programs = max(1, min(-(-rows // options["ROWS"]), most))
    partials = None if a.frozen else x.new_empty(programs, width, dtype=float32)
    launch(
        normalize_backward,
        (programs,),
        *(grads[0], x, a.weight.contiguous(), *saved, dx, partials, rows, width, x.stride(0)),
        **options,
        OFFSET=a.offset,
    )
    if partials is None:
        return {"x": dx}
    return {"x": dx, "weight": summed(partials, a.weight.dtype)}


def _configuration(width: int, *tensors: Tensor) -> dict[str, Any]:
    """Return constants and options with which a thread loads 16 bytes of the widest tensor."""
    vector = 16 // max(x.element_size() for x in tensors)
    block = max(16, 1 << (width - 1).bit_length())
    warps = min(16, max(4, 4 * block // _TILE))
    return {"ROWS": max(1, _TILE // block), "BLOCK_W": block, "VEC": vector, "num_warps": warps}


def _with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
