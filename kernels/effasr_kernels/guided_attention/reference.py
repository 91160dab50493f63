import torch
from torch import Tensor

from effasr_kernels.guided_attention import GuidedArguments
from effasr_kernels.shared.dropout import Dropout
from effasr_kernels.shared.ragged import join_rows, split_attention, widen, zeroed


def run(a: GuidedArguments) -> tuple[Tensor, Tensor]:
    drop = Dropout(a.dropout, a.seed, a.q.device)
    q = widen(a.q) * a.scale
    outputs, penalties = [], []
    for q_n, k_n, v_n in split_attention(q, widen(a.k), widen(a.v), a.layout_q, a.layout_k):
        if k_n.shape[1] == 0:
            outputs.append(zeroed(q_n).transpose(0, 1))
            penalties.append(zeroed(q_n[..., 0]).T)
            continue
        weights = (q_n @ k_n.mT).softmax(-1)
        outputs.append((drop(weights) @ v_n).transpose(0, 1))
        distance = _distance(q_n.shape[1], k_n.shape[1], a.sigma, q)
        penalties.append((weights * distance).sum(-1).T)
    return join_rows(outputs, a.layout_q, a.q), join_rows(penalties, a.layout_q, q[..., 0])


def _distance(tokens: int, frames: int, sigma: float, like: Tensor) -> Tensor:
    """Return the penalty by distance from the diagonal, (tokens, frames), in [0, 1)."""
    i = torch.arange(tokens, dtype=like.dtype, device=like.device) / tokens
    j = torch.arange(frames, dtype=like.dtype, device=like.device) / frames
    return -torch.expm1((i[:, None] - j).square() / (-2 * sigma**2))
