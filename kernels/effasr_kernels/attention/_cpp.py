"""`attention` on a CPU by the kernels of ``csrc/``, which compute in float32.

With rotary positions, torch rotates queries and keys before, and rotates their gradients back.
Tensors of float16 and bfloat16 are converted to float32; results and gradients are rounded once.
"""

import torch
from torch import Tensor

from effasr_kernels.attention import AttentionArguments
from effasr_kernels.attention.position import angles, rotate
from effasr_kernels.runtime.dispatch import Gradients, Tensors
from effasr_kernels.shared.cpu import attention as cpu_attention
from effasr_kernels.shared.ragged import widen


def unsupported_reason(a: AttentionArguments) -> str | None:
    if a.context is not None:
        return "does not support a context"
    return None


def forward(a: AttentionArguments) -> tuple[tuple[Tensor], tuple[Tensor, ...]]:
    q, k = widen(a.q), widen(a.k)
    rotary: tuple[Tensor, ...] = ()
    if a.rotary is not None:
        angles_q = angles_k = angles(a.layout_q.positions(), a.rotary, q)
        if a.layout_k is not a.layout_q:
            angles_k = angles(a.layout_k.positions(), a.rotary, k)
        q, k = rotate(q, *angles_q), rotate(k, *angles_k)
        rotary = q, k, torch.stack(angles_q), torch.stack(angles_k)
    out, softmax, _ = _call(a, q, k).forward()
    exact = () if out.dtype == a.q.dtype else (out,)
    return (out.to(a.q.dtype),), (softmax, *exact, *rotary)


def saved_like(a: AttentionArguments) -> tuple[Tensor, ...]:
    empty = lambda *shape: a.q.new_empty(shape, dtype=torch.float32)
    saved = [cpu_attention.saved_like(a.q)]
    if a.q.dtype != torch.float32:
        saved.append(empty(*a.q.shape))
    if a.rotary is not None:
        half = a.rotary.rotated(a.q.shape[-1]) // 2
        saved += [empty(*x.shape) for x in (a.q, a.k)]
        saved += [empty(2, x.shape[0], 1, half) for x in (a.q, a.k)]
    return tuple(saved)


def backward(a: AttentionArguments, grads: Tensors, results: Tensors, saved: Tensors) -> Gradients:
    softmax, *rotary_saved = saved
    out, dtype = results[0], a.q.dtype
    if dtype != torch.float32:
        out, *rotary_saved = rotary_saved
    q, k = rotary_saved[:2] or (widen(a.q), widen(a.k))
    d_q, d_k, d_v, *shared = _call(a, q, k).backward(widen(grads[0]), None, out, softmax, None)
    if rotary_saved:
        # The gradient of a rotation is the inverse rotation.
        (cos_q, sin_q), (cos_k, sin_k) = rotary_saved[2:]
        d_q, d_k = rotate(d_q, cos_q, -sin_q), rotate(d_k, cos_k, -sin_k)
    names = "q", "k", "v", "content_bias", "position_bias", "position_table"
    return {name: dx.to(dtype) for name, dx in zip(names, (d_q, d_k, d_v, *shared), strict=False)}


def _call(a: AttentionArguments, q: Tensor, k: Tensor) -> cpu_attention.Call:
    arguments = q, k, widen(a.v), a.layout_q, a.layout_k, a.scale, a.dropout, a.seed
    position = None
    if a.relative is not None:
        relative = a.relative
        bias = relative.content_bias, relative.position_bias
        position = widen(bias[0]), widen(bias[1]), widen(relative.table)
    return cpu_attention.Call("attention", *arguments, causal=a.causal, position=position)
