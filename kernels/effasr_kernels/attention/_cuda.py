"""`attention` with relative positions by the CUDA C++ kernels of ``csrc/``.

They compute the scores by distance where they are used, so that no tensor of size T_q x T_k is
stored, in either pass.
"""

import ctypes

import torch
from torch import Tensor

from effasr_kernels.attention import AttentionArguments
from effasr_kernels.attention.context import Context
from effasr_kernels.runtime.cuda import CudaLaunch, launch
from effasr_kernels.runtime.dispatch import Gradients, Tensors
from effasr_kernels.runtime.launch import capability, ceil_div
from effasr_kernels.runtime.tiles import empty_tile_table, tile_programs, tile_table
from effasr_kernels.shared.dropout import seed_tensor
from effasr_kernels.shared.joined import empty_gradients
from effasr_kernels.shared.partial_sums import summed

_BLOCK, _WIDTHS = 64, (64, 128)
_RINGS = {"forward": 64 * 136 * 4, "backward": 8 * 16 * 56 * 4 + 64 * 128 * 2 + 32 + 256 * 24}
"""Bytes of shared memory beside tiles: scores and their gradients by distance (`kGroupPitch` in
csrc/cuda/group.cuh, `kPitch` in scores.cuh, `kBandsBytes` in gradients.cuh), and 24 a thread."""
_CHUNK = 512
"""`kChunk` in csrc/attention_backward.cu."""
_PROGRAMS = 132
"""Target number of programs that go through tiles of keys: one for each multiprocessor of an H200,
whatever the GPU has, as sums depend on it. Each has a part of the table's gradient."""
_MATRICES = "q", "k", "v", "table"
_POINTERS = (
    *(*_MATRICES, "content_bias", "position_bias", "cu_seqlens_q", "cu_seqlens_k", "tiles", "seed"),
    *("out", "lse", "grad_out", "norms", "grad_q_parts", "grad_q", "grad_k", "grad_v"),
    *("grad_table", "grad_biases", "grad_distances", "extents"),
)
_BIASES = "content_bias", "position_bias"
_OFFSETS = "cu_seqlens_q", "cu_seqlens_k", "tiles", "seed"
_OF_KERNEL = {
    "forward": (*_MATRICES, *_BIASES, *_OFFSETS, "out", "lse"),
    "backward_pairs": (
        *(*_MATRICES, *_BIASES, *_OFFSETS, "out", "lse", "grad_out", "norms", "grad_q_parts"),
        *("grad_q", "grad_k", "grad_v", "grad_biases", "grad_distances", "extents"),
    ),
    "backward_queries": ("cu_seqlens_k", "tiles", "grad_q_parts", "grad_q", "grad_biases"),
    "backward_table": ("grad_distances", "extents", "grad_table"),
}
"""What each kernel reads and writes; other pointers are null."""
_ROWS = *_MATRICES, "grad_q", "grad_k"
"""What has a stride of rows; of `_MATRICES`, heads have one, too."""
_INTEGERS = (
    *("heads", "rows_q", "sequences", "reach", "left", "right", "chunk", "dropped"),
    *("splits", "blocks"),
)


class _Structure(ctypes.Structure):
    """`effasr::AttentionCall` of csrc/attention_cuda.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((f"{name}_row", ctypes.c_int32) for name in _ROWS),
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
    major, minor = capability(a.q.device)
    # A block has 99 kB of shared memory there, and the backward needs 109.
    if (major, minor) in ((8, 6), (8, 9)) or major >= 12:
        return f"its backward needs more shared memory than a GPU of capability {major}.{minor} has"
    return None


def forward(a: AttentionArguments) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Compute the output; save each row's log-sum-exp to base 2, float32 (H, T_q)."""
    lse, out = _empty_lse(a), a.q.new_empty(a.q.shape)
    call, tiles = _Call(a, {"out": out, "lse": lse}), tile_table(a.layout_q, _BLOCK)
    call.launch("forward", tile_programs(a.layout_q, _BLOCK), 4, tiles=tiles)
    return (out,), (lse, tiles)


def saved_like(a: AttentionArguments) -> tuple[Tensor, ...]:
    # A layout in compiled code keeps no table for the backward.
    return _empty_lse(a), empty_tile_table(a.layout_q, _BLOCK)


def _empty_lse(a: AttentionArguments) -> Tensor:
    return a.q.new_empty(a.q.shape[1], a.q.shape[0], dtype=torch.float32)


def backward(a: AttentionArguments, grads: Tensors, results: Tensors, saved: Tensors) -> Gradients:
    (rows, heads, width), (lse, by_query), table = a.q.shape, saved, a.position_table
    assert table is not None
    if a.q.shape == a.k.shape:
        grad_q, grad_k, grad_v = empty_gradients(a.q, a.k, a.v)
    else:
        grad_q, (grad_k, grad_v) = a.q.new_empty(a.q.shape), empty_gradients(a.k, a.v)
    tiles_q, tiles_k = (tile_programs(layout, _BLOCK) for layout in (a.layout_q, a.layout_k))
    bound = max(a.layout_q.max_seqlen_bound, a.layout_k.max_seqlen_bound)
    # Blocks of 64 distances: those of the table, and one more below 0.
    blocks = 2 * (ceil_div(min(bound, table.shape[0] // 2 + 1), _BLOCK) + 1)
    splits = min(max(_PROGRAMS // heads, 1), tiles_k)
    chunks = ceil_div(a.layout_k.max_seqlen_bound, _CHUNK)
    wide = lambda *shape: a.q.new_empty(shape, dtype=torch.float32)
    # Sequences of one chunk are finished where their pairs are.
    biases = wide(splits + (tiles_q if chunks > 1 else 0), 2, heads, width)
    tensors = {
        **{"out": results[0], "lse": lse, "grad_out": _aligned(grads[0])},
        **{"grad_q": grad_q, "grad_k": grad_k, "grad_v": grad_v, "grad_biases": biases},
        "grad_table": table.new_empty(table.shape),
        **{"norms": wide(chunks, heads, rows, 2), "grad_q_parts": wide(chunks, *a.q.shape)},
        "grad_distances": wide(splits, heads, blocks, _BLOCK, width),
        "extents": torch.empty(splits, 2, dtype=torch.int32, device=a.q.device),
    }
    call = _Call(a, tensors, splits=splits, blocks=blocks)
    is_same = a.layout_k.cu_seqlens is a.layout_q.cu_seqlens and a.k.shape[0] == rows
    by_key = by_query if is_same else tile_table(a.layout_k, _BLOCK)
    call.launch("backward_pairs", splits, 7, tiles=by_key)
    if not splits:
        grad_q.zero_()
    if chunks > 1:
        call.launch("backward_queries", tiles_q, tiles=by_query)
    call.launch("backward_table", 2 * ceil_div(table.shape[0] // 2 + 1, _BLOCK))
    by_content, by_position = summed(biases, a.q.dtype)
    return {
        **{"q": grad_q, "k": grad_k, "v": grad_v, "position_table": tensors["grad_table"]},
        **{"content_bias": by_content, "position_bias": by_position},
    }


class _Call:
    """The arguments of the kernels of one pass."""

    def __init__(self, a: AttentionArguments, tensors: dict[str, Tensor], **integers: int) -> None:
        position = a.relative
        assert position is not None
        self._arguments = a
        matrices = (_aligned(x) for x in (a.q, a.k, a.v, position.table))
        biases = position.content_bias.contiguous(), position.position_bias.contiguous()
        self._tensors = dict(zip(_MATRICES, matrices, strict=True)) | {
            **dict(zip(_BIASES, map(_aligned, biases), strict=True)),
            "cu_seqlens_q": a.layout_q.cu_seqlens,
            "cu_seqlens_k": a.layout_k.cu_seqlens,
            **({"seed": seed_tensor(a.seed, a.q.device)} if a.dropout else {}),
            **tensors,
        }
        self._numbers = integers | {
            **{f"{x}_row": self._tensors[x].stride(0) for x in _ROWS if x in self._tensors},
            **{f"{x}_head": self._tensors[x].stride(1) for x in _MATRICES},
            **{"heads": a.q.shape[1], "rows_q": a.layout_q.rows, "dropped": round(a.dropout * 256)},
            "sequences": a.layout_q.num_sequences,
            "reach": (position.table.shape[0] + 1) // 2,
        }
        context = a.context or Context(None, 0 if a.causal else None, 1)
        bounds = context.bounds(max(a.layout_q.rows, a.layout_k.rows))
        self._numbers |= dict(zip(("left", "right", "chunk"), bounds, strict=True))

    def launch(
        self,
        part: str,  # of ``attention_PART``, the kernel
        programs: int,
        blocks: int = 0,  # tiles of 64 rows in shared memory, beside the ring; 0 without both
        **tensors: Tensor,
    ) -> None:
        named, (_, heads, width) = self._tensors | tensors, self._arguments.q.shape
        named = {name: named[name] for name in _OF_KERNEL[part] if name in named}
        pointers = {name: x.data_ptr() for name, x in named.items()}
        call = _Structure(**pointers, **self._numbers, scale=self._arguments.scale)
        source = part.partition("_")[0]
        shared = blocks * _BLOCK * width * 2 + (_RINGS[source] if blocks else 0)
        dtype, grid = self._arguments.q.dtype, (programs, heads)
        source = f"attention_{source}"
        launch(CudaLaunch(source, f"attention_{part}", dtype, width, grid, call, named, shared))


def _aligned(x: Tensor) -> Tensor:
    """The tensor, or a copy, with rows that are contiguous and begin at multiples of 16 bytes."""
    *strides, unit = x.stride()
    fits = not any(n % 8 or n >= 2**25 for n in strides)
    whole = unit == 1 and fits and x.data_ptr() % 16 == 0
    return x if whole else x.clone(memory_format=torch.contiguous_format)
