"""`attention` on a CPU, in float32, with the kernels of ``csrc/``.

With rotary positions, torch rotates queries and keys before, and rotates their gradients back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from effasr_kernels.attention.definition import AttentionArguments
from effasr_kernels.attention.position import angles, rotate
from effasr_kernels.shared import cpu_attention


def unsupported_reason(a: AttentionArguments) -> str | None:
    """The reason why this backend does not support these arguments, or None."""
    return cpu_attention.refusal(a.q)


def forward(a: AttentionArguments) -> tuple[tuple[Tensor], tuple[Tensor, ...]]:
    """See `effasr_kernels.attention.attention`.

    It saves the softmax statistics and, with rotary positions, the rotated queries and keys and
    the angles of both.
    """
    if a.rotary is None:
        out, softmax, _ = _call(a, a.q, a.k).forward()
        return (out,), (softmax,)
    angles_q = angles(a.layout_q, a.rotary, a.q)
    angles_k = angles(a.layout_k, a.rotary, a.k) if a.layout_k is not a.layout_q else angles_q
    q, k = rotate(a.q, *angles_q), rotate(a.k, *angles_k)
    out, softmax, _ = _call(a, q, k).forward()
    return (out,), (softmax, q, k, torch.stack(angles_q), torch.stack(angles_k))


def saved_like(a: AttentionArguments) -> tuple[Tensor, ...]:
    """Empty tensors with the shapes and dtypes of what `forward` saves."""
    softmax = cpu_attention.saved_like(a.q)
    if a.rotary is None:
        return (softmax,)
    half = a.rotary.rotated(a.q.shape[-1]) // 2
    rotated = (x.new_empty(x.shape) for x in (a.q, a.k))
    both_angles = (x.new_empty((2, x.shape[0], 1, half)) for x in (a.q, a.k))
    return softmax, *rotated, *both_angles


def backward(
    a: AttentionArguments,
    grads: tuple[Tensor],
    results: tuple[Tensor],
    saved: tuple[Tensor, ...],
) -> dict[str, Tensor | None]:
    """Compute the gradients of all tensors, zero in the tail."""
    softmax, *rotary = saved
    q, k = rotary[:2] or (a.q, a.k)
    d_q, d_k, d_v, *shared = _call(a, q, k).backward(grads[0], None, results[0], softmax, None)
    if rotary:
        # The gradient of a rotation is the inverse rotation.
        (cos_q, sin_q), (cos_k, sin_k) = rotary[2:]
        d_q, d_k = rotate(d_q, cos_q, -sin_q), rotate(d_k, cos_k, -sin_k)
    gradients: dict[str, Tensor | None] = {"q": d_q, "k": d_k, "v": d_v}
    names = "content_bias", "position_bias", "position_table"
    return gradients | (dict(zip(names, shared, strict=True)) if shared else {})


def _call(a: AttentionArguments, q: Tensor, k: Tensor) -> cpu_attention.Call:
    arguments = q, k, a.v, a.layout_q, a.layout_k, a.scale, a.dropout, a.seed
    position = None
    if a.relative is not None:
        position = a.relative.content_bias, a.relative.position_bias, a.relative.table
    return cpu_attention.Call("attention", *arguments, causal=a.causal, position=position)
