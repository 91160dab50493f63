import torch
import torch.nn.functional as F
from torch import Tensor

from effasr_kernels.attention import AttentionArguments
from effasr_kernels.attention.position import RelativeBias, angles, rotate
from effasr_kernels.shared.dropout import Dropout
from effasr_kernels.shared.ragged import join_rows, split_attention, split_rows, widen, zeroed


def run(a: AttentionArguments) -> Tensor:
    drop = Dropout(a.dropout, a.seed, a.q.device)
    q, k, v = widen(a.q), widen(a.k), widen(a.v)
    if a.relative is not None:
        out = _relative(a, q, k, v, a.relative, drop)
        return join_rows(out, a.layout_q, a.q)
    if a.rotary is not None:
        angle_pair = angles(a.layout_q.positions(), a.rotary, q)
        q = rotate(q, *angle_pair)
        if a.layout_k is not a.layout_q:
            angle_pair = angles(a.layout_k.positions(), a.rotary, k)
        k = rotate(k, *angle_pair)
    if a.group > 1:
        k, v = (x.repeat_interleave(a.group, dim=1) for x in (k, v))
    out = []
    for q_n, k_n, v_n in split_attention(q, k, v, a.layout_q, a.layout_k):
        if a.dropout:
            scores = q_n @ k_n.mT * a.scale
            out.append(_attend(scores, v_n, _hidden_keys(a, scores), drop))
        elif k_n.shape[1] == 0:
            out.append(zeroed(q_n.transpose(0, 1)))
        else:
            # The fused CPU kernel requires four dimensions.
            visible = None if a.context is None else ~a.context.hidden(len(k_n[0]), q.device)
            y = F.scaled_dot_product_attention(
                *(q_n[None], k_n[None], v_n[None], visible), is_causal=a.causal, scale=a.scale
            )
            out.append(y[0].transpose(0, 1))
    return join_rows(out, a.layout_q, a.q)


def _hidden_keys(a: AttentionArguments, scores: Tensor) -> Tensor | None:
    """The keys that the queries of a sequence do not see, bool (T_q, T_k); None if there are none.

    Scores are (H, T_q, T_k).
    """
    if a.context is not None:
        return a.context.hidden(scores.shape[1], scores.device)
    if a.causal:
        return torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
    return None


def _attend(scores: Tensor, v: Tensor, hidden: Tensor | None, drop: Dropout) -> Tensor:
    """Apply softmax, dropout and weighted sum: (H, T_q, T_k), (H, T_k, D) -> (T_q, H, D)."""
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    return (drop(scores.softmax(-1)) @ v).transpose(0, 1)


def _relative(
    a: AttentionArguments, q: Tensor, k: Tensor, v: Tensor, position: RelativeBias, drop: Dropout
) -> list[Tensor]:
    """Compute attention with Transformer-XL scores: (T_q, H, D) per sequence with queries."""
    reach = position.reach(a.layout_q, a.layout_k, context=a.context)
    # A context hides the distances that a table leaves out.
    beyond = max(0, a.layout_q.max_seqlen_bound - reach)
    reach += beyond
    # Descending distance, (H, D, 2L-1), so that the scores of a query are in the order of its keys.
    table = F.pad(widen(position.table).flip(0).permute(1, 2, 0) * a.scale, (beyond, beyond))
    by_content = (q + widen(position.content_bias)) * a.scale
    by_position = q + widen(position.position_bias)
    sequences = split_attention(by_content, k, v, a.layout_q, a.layout_k)
    positions = (p_n for p_n in split_rows(by_position, a.layout_q) if p_n.shape[0])
    out = []
    for (q_n, k_n, v_n), p_n in zip(sequences, positions, strict=True):
        t_q, t_k = q_n.shape[1], k_n.shape[1]
        if t_k == 0:
            out.append(zeroed(p_n))
            continue
        # Columns of distances t_q - 1 down to -(t_k - 1).
        window = table[..., reach - t_q : reach - 1 + t_k]
        distances = _skew(p_n.transpose(0, 1) @ window, t_k)
        scores = torch.baddbmm(distances, q_n, k_n.mT)
        out.append(_attend(scores, v_n, _hidden_keys(a, scores), drop))
    return out


def _skew(by_distance: Tensor, t_k: int) -> Tensor:
    """Return scores by key as a view of scores by descending distance."""
    # The score of query i and key j is in column ``j - i + t_q - 1``; each row is shifted by one.
    heads, t_q, width = by_distance.shape
    return by_distance.contiguous().as_strided(
        (heads, t_q, t_k), (t_q * width, width - 1, 1), t_q - 1
    )
