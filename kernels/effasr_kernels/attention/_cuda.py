"""`attention` with relative positions, whose forward is the CUDA C++ kernel of ``csrc/``.

It computes the scores by distance where they are used, so that none is stored. The backward is that
of Triton, which is faster than one in CUDA C++ was: `docs/design-log.md` has the times.
"""

import ctypes

import torch
from torch import Tensor

from effasr_kernels.attention import AttentionArguments
from effasr_kernels.attention.context import Context
from effasr_kernels.runtime.cuda import CudaLaunch, launch
from effasr_kernels.runtime.dispatch import Gradients, Tensors
from effasr_kernels.runtime.tiles import tile_programs, tile_table
from effasr_kernels.shared.dropout import seed_tensor

_BLOCK, _WIDTHS = 64, (64, 128)
_RING_BYTES = 64 * 136 * 4
"""Bytes of shared memory beside four tiles: scores by distance (csrc/cuda/group.cuh)."""
_MATRICES = "q", "k", "v", "table"
_BIASES = "content_bias", "position_bias"
_POINTERS = *_MATRICES, *_BIASES, "cu_seqlens_q", "cu_seqlens_k", "tiles", "seed", "out", "lse"
_INTEGERS = "heads", "rows_q", "sequences", "reach", "left", "right", "chunk", "dropped"


class _Structure(ctypes.Structure):
    """`effasr::AttentionCall` of csrc/attention_cuda.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((f"{name}_row", ctypes.c_int32) for name in _MATRICES),
        *((f"{name}_head", ctypes.c_int32) for name in _MATRICES),
        *((name, ctypes.c_int32) for name in _INTEGERS),
        ("scale", ctypes.c_float),
    )


def unsupported_reason(a: AttentionArguments) -> str | None:
    dtype, width = a.q.dtype, a.q.shape[2]
    if a.relative is None:
        return "computes relative positions only"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
    if width not in _WIDTHS:
        return f"needs a head width of 64 or 128, not {width}"
    if not a.scale > 0:
        return f"needs a positive scale, not {a.scale}"
    return None


def forward(a: AttentionArguments) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Compute the output; save each row's log-sum-exp to base 2, float32 (H, T_q)."""
    position = a.relative
    assert position is not None
    (rows, heads, width), (lse,), out = a.q.shape, saved_like(a), a.q.new_empty(a.q.shape)
    matrices = dict(zip(_MATRICES, map(_aligned, (a.q, a.k, a.v, position.table)), strict=True))
    tensors = {
        **matrices,
        "content_bias": _aligned(position.content_bias.contiguous()),
        "position_bias": _aligned(position.position_bias.contiguous()),
        "cu_seqlens_q": a.layout_q.cu_seqlens,
        "cu_seqlens_k": a.layout_k.cu_seqlens,
        "tiles": tile_table(a.layout_q, _BLOCK),
        **({"seed": seed_tensor(a.seed, a.q.device)} if a.dropout else {}),
        **{"out": out, "lse": lse},
    }
    context = a.context or Context(None, 0 if a.causal else None, 1)
    bounds = context.bounds(max(a.layout_q.rows, a.layout_k.rows))
    call = _Structure(
        **{name: x.data_ptr() for name, x in tensors.items()},
        **{f"{name}_row": x.stride(0) for name, x in matrices.items()},
        **{f"{name}_head": x.stride(1) for name, x in matrices.items()},
        **dict(zip(("left", "right", "chunk"), bounds, strict=True)),
        heads=heads,
        rows_q=rows,
        sequences=a.layout_q.num_sequences,
        reach=(position.table.shape[0] + 1) // 2,
        dropped=round(a.dropout * 256),
        scale=a.scale,
    )
    grid, shared = (tile_programs(a.layout_q, _BLOCK), heads), 4 * _BLOCK * width * 2 + _RING_BYTES
    name = "attention_forward"
    launch(CudaLaunch(name, name, a.q.dtype, width, grid, call, tensors, shared))
    return (out,), (lse,)


def saved_like(a: AttentionArguments) -> tuple[Tensor, ...]:
    return (a.q.new_empty(a.q.shape[1], a.q.shape[0], dtype=torch.float32),)


def backward(a: AttentionArguments, grads: Tensors, results: Tensors, saved: Tensors) -> Gradients:
    from effasr_kernels.attention.triton import backend

    return backend.backward(a, grads, results, saved)


def _aligned(x: Tensor) -> Tensor:
    """The tensor, or a copy, with rows that are contiguous and begin at multiples of 16 bytes."""
    *strides, unit = x.stride()
    fits = not any(n % 8 or n >= 2**25 for n in strides)
    whole = unit == 1 and fits and x.data_ptr() % 16 == 0
    return x if whole else x.clone(memory_format=torch.contiguous_format)
