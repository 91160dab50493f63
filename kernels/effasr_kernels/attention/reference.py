"""The definition of `attention`: what every other implementation must match."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from effasr_kernels.attention.position import RelativeBias, Rotary
from effasr_kernels.packed import PackedLayout
from effasr_kernels.shared.dropout import Dropout
from effasr_kernels.shared.ragged import join_rows, split_attention, split_rows, widen, zeroed


def why_not(*args: object, **kwargs: object) -> None:
    """The reference serves every call."""


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_q: PackedLayout,
    layout_k: PackedLayout,
    *,
    causal: bool,
    scale: float,
    position: Rotary | RelativeBias | None,
    dropout: float,
    seed: int | Tensor | None,
) -> Tensor:
    """See `effasr_kernels.attention.attention`."""
    drop = Dropout(dropout, seed, q.device)
    q_wide, k_wide, v_wide = widen(q), widen(k), widen(v)
    if isinstance(position, RelativeBias):
        out = _relative(q_wide, k_wide, v_wide, layout_q, layout_k, causal, scale, position, drop)
        return join_rows(out, layout_q, q)
    if isinstance(position, Rotary):
        turns = _turns(layout_q, position, q_wide)
        q_wide = _rotate(q_wide, *turns)
        turns = turns if layout_k is layout_q else _turns(layout_k, position, k_wide)
        k_wide = _rotate(k_wide, *turns)
    out = []
    for q_n, k_n, v_n in split_attention(q_wide, k_wide, v_wide, layout_q, layout_k):
        if dropout:
            scores = q_n @ k_n.mT * scale
            out.append(_attend(scores, v_n, causal, drop))
        elif k_n.shape[1] == 0:
            out.append(zeroed(q_n.transpose(0, 1)))
        else:
            # The fused CPU kernel takes four dimensions.
            y = F.scaled_dot_product_attention(
                q_n[None], k_n[None], v_n[None], is_causal=causal, scale=scale
            )
            out.append(y[0].transpose(0, 1))
    return join_rows(out, layout_q, q)


def _attend(scores: Tensor, v: Tensor, causal: bool, drop: Dropout) -> Tensor:
    """Softmax, dropout and the weighted sum: (H, T_q, T_k), (H, T_k, D) -> (T_q, H, D)."""
    if causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return (drop(scores.softmax(-1)) @ v).transpose(0, 1)


def _relative(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_q: PackedLayout,
    layout_k: PackedLayout,
    causal: bool,
    scale: float,
    position: RelativeBias,
    drop: Dropout,
) -> list[Tensor]:
    """Attention with Transformer-XL's scores, one (T_q, H, D) per sequence."""
    reach = position.reach(layout_q, layout_k)
    # Descending distance, (H, D, 2L-1): the scores of a query then run with its keys.
    table = widen(position.table).flip(0).permute(1, 2, 0) * scale
    by_content = (q + widen(position.content_bias)) * scale
    by_position = q + widen(position.position_bias)
    sequences = split_attention(by_content, k, v, layout_q, layout_k)
    out = []
    for (q_n, k_n, v_n), p_n in zip(sequences, split_rows(by_position, layout_q), strict=True):
        t_q, t_k = q_n.shape[1], k_n.shape[1]
        if t_q == 0 or t_k == 0:
            out.append(zeroed(p_n))
            continue
        # Distances t_q - 1 down to -(t_k - 1).
        window = table[..., reach - t_q : reach - 1 + t_k]
        distances = _skew(p_n.transpose(0, 1) @ window, t_k)
        out.append(_attend(torch.baddbmm(distances, q_n, k_n.mT), v_n, causal, drop))
    return out


def _skew(by_distance: Tensor, t_k: int) -> Tensor:
    """Turn columns of descending distance into columns of keys, without a copy.

    Row i, key j is column ``j - i + t_q - 1``, so a step of one row is one column back.

    Args:
        by_distance: (H, t_q, t_q + t_k - 1), contiguous.
        t_k: Keys.

    Returns:
        (H, t_q, t_k), a view.
    """
    heads, t_q, width = by_distance.shape
    return by_distance.contiguous().as_strided(
        (heads, t_q, t_k), (t_q * width, width - 1, 1), t_q - 1
    )


def _turns(layout: PackedLayout, rotary: Rotary, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every row's angles, (T, 1, R / 2), by its place in its sequence."""
    width = rotary.rotated(like.shape[-1])
    exponents = torch.arange(0, width, 2, device=like.device, dtype=torch.float64) / width
    angles = layout.positions()[:, None, None] * rotary.base**-exponents
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first channels of (T, H, D)."""
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
