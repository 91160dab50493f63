"""`attention` on a CPU, in float32, by the kernels of ``csrc/``.

With rotary positions, queries and keys are rotated before, and their gradients back again after.
"""

from __future__ import annotations

import torch
from torch import Tensor

from effasr_kernels.attention.definition import AttentionArguments
from effasr_kernels.attention.position import angles, rotate
from effasr_kernels.shared import cpu_attention


def unsupported_reason(a: AttentionArguments) -> str | None:
    """The reason for which these arguments cannot be served, or None."""
    return cpu_attention.refusal(a.q)


def forward(a: AttentionArguments) -> tuple[tuple[Tensor], tuple[Tensor, ...]]:
    """See `effasr_kernels.attention.attention`.

    Saves what is left of the softmax and, with rotary positions, the rotated queries and keys, and
    the angles of either.
    """
    if a.rotary is None:
        out, softmax, _ = _call(a, a.q, a.k).forward()
        return (out,), (softmax,)
    of_q = angles(a.layout_q, a.rotary, a.q)
    of_k = angles(a.layout_k, a.rotary, a.k) if a.layout_k is not a.layout_q else of_q
    q, k = rotate(a.q, *of_q), rotate(a.k, *of_k)
    out, softmax, _ = _call(a, q, k).forward()
    return (out,), (softmax, q, k, torch.stack(of_q), torch.stack(of_k))


def saved_like(a: AttentionArguments) -> tuple[Tensor, ...]:
    """As `forward` saves."""
    softmax = cpu_attention.saved_like(a.q)
    if a.rotary is None:
        return (softmax,)
    half = a.rotary.rotated(a.q.shape[-1]) // 2
    rotated = (x.new_empty(x.shape) for x in (a.q, a.k))
    turned = (x.new_empty((2, x.shape[0], 1, half)) for x in (a.q, a.k))
    return softmax, *rotated, *turned


def backward(
    a: AttentionArguments,
    grads: tuple[Tensor],
    results: tuple[Tensor],
    saved: tuple[Tensor, ...],
) -> dict[str, Tensor | None]:
    """The gradients of all tensors, zero in the tail."""
    softmax, *rotary = saved
    q, k = rotary[:2] or (a.q, a.k)
    d_q, d_k, d_v, *shared = _call(a, q, k).backward(grads[0], None, results[0], softmax, None)
    if rotary:
        # A rotation's gradient is the rotation back.
        (cos_q, sin_q), (cos_k, sin_k) = rotary[2:]
        d_q, d_k = rotate(d_q, cos_q, -sin_q), rotate(d_k, cos_k, -sin_k)
    found: dict[str, Tensor | None] = {"q": d_q, "k": d_k, "v": d_v}
    names = "content_bias", "position_bias", "position_table"
    return found | (dict(zip(names, shared, strict=True)) if shared else {})


def _call(a: AttentionArguments, q: Tensor, k: Tensor) -> cpu_attention.Call:
    given = q, k, a.v, a.layout_q, a.layout_k, a.scale, a.dropout, a.seed
    position = None
    if a.relative is not None:
        position = a.relative.content_bias, a.relative.position_bias, a.relative.table
    return cpu_attention.Call("attention", *given, causal=a.causal, position=position)
