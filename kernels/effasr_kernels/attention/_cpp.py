"""`attention` on a CPU by the kernels of ``csrc/``, which compute in float32.

With rotary positions, queries and keys are rotated before, and their gradients back again after.
Tensors of float16 and bfloat16 are widened before; results and gradients are rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from effasr_kernels.attention.definition import AttentionArguments
from effasr_kernels.attention.position import angles, rotate
from effasr_kernels.shared import cpu_attention
from effasr_kernels.shared.ragged import widen


def unsupported_reason(a: AttentionArguments) -> str | None:
    """The reason for which these arguments cannot be served, or None."""
    return cpu_attention.refusal(a.q)


def forward(a: AttentionArguments) -> tuple[tuple[Tensor], tuple[Tensor, ...]]:
    """See `effasr_kernels.attention.attention`.

    Saves what is left of the softmax; of narrow tensors the result before it is rounded; and with
    rotary positions, the rotated queries and keys, and the angles of either.
    """
    q, k = widen(a.q), widen(a.k)
    rotary: tuple[Tensor, ...] = ()
    if a.rotary is not None:
        of_q = angles(a.layout_q, a.rotary, q)
        of_k = angles(a.layout_k, a.rotary, k) if a.layout_k is not a.layout_q else of_q
        q, k = rotate(q, *of_q), rotate(k, *of_k)
        rotary = q, k, torch.stack(of_q), torch.stack(of_k)
    out, softmax, _ = _call(a, q, k).forward()
    exact = () if out.dtype == a.q.dtype else (out,)
    return (out.to(a.q.dtype),), (softmax, *exact, *rotary)


def saved_like(a: AttentionArguments) -> tuple[Tensor, ...]:
    """As `forward` saves."""
    empty = lambda *shape: a.q.new_empty(shape, dtype=torch.float32)
    saved = [cpu_attention.saved_like(a.q)]
    if a.q.dtype != torch.float32:
        saved.append(empty(*a.q.shape))
    if a.rotary is not None:
        half = a.rotary.rotated(a.q.shape[-1]) // 2
        saved += [empty(*x.shape) for x in (a.q, a.k)]
        saved += [empty(2, x.shape[0], 1, half) for x in (a.q, a.k)]
    return tuple(saved)


def backward(
    a: AttentionArguments,
    grads: tuple[Tensor],
    results: tuple[Tensor],
    saved: tuple[Tensor, ...],
) -> dict[str, Tensor | None]:
    """The gradients of all tensors, zero in the tail."""
    softmax, *rest = saved
    out, dtype = results[0], a.q.dtype
    if dtype != torch.float32:
        out, *rest = rest
    q, k = rest[:2] or (widen(a.q), widen(a.k))
    d_q, d_k, d_v, *shared = _call(a, q, k).backward(widen(grads[0]), None, out, softmax, None)
    if rest:
        # A rotation's gradient is the rotation back.
        (cos_q, sin_q), (cos_k, sin_k) = rest[2:]
        d_q, d_k = rotate(d_q, cos_q, -sin_q), rotate(d_k, cos_k, -sin_k)
    names = "q", "k", "v", "content_bias", "position_bias", "position_table"
    return {name: dx.to(dtype) for name, dx in zip(names, (d_q, d_k, d_v, *shared), strict=False)}


def _call(a: AttentionArguments, q: Tensor, k: Tensor) -> cpu_attention.Call:
    given = q, k, widen(a.v), a.layout_q, a.layout_k, a.scale, a.dropout, a.seed
    position = None
    if a.relative is not None:
        found = a.relative
        position = widen(found.content_bias), widen(found.position_bias), widen(found.table)
    return cpu_attention.Call("attention", *given, causal=a.causal, position=position)
