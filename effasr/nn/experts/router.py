"""The router of a feed-forward network with experts, and its losses.

References:
    Fedus et al., Switch Transformers, 2021, https://arxiv.org/abs/2101.03961 (balance loss);
    Zoph et al., ST-MoE, 2022, https://arxiv.org/abs/2202.08906 (z-loss).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from effasr.nn.experts.config import experts_of
from effasr_kernels.shared.cpu.linear import linear


@dataclass(frozen=True, slots=True)
class Routed:
    """What a router has decided for rows."""

    # int64 (T, k), the experts of each row, the most probable first; E, the number of experts, for
    # a row of the tail
    expert: Tensor
    gate: Tensor  # (T, k), float32: factors of their outputs; 0 in the tail
    # float32 (2,): the balance loss and the z-loss, each a mean over the rows; 0 without rows
    losses: Tensor


class Router(nn.Module):
    r"""Chooses k of E experts for each row, by a softmax in float32.

    With f the share of choices that expert e gets and P the mean of its probabilities, the balance
    loss is

    .. math:: E \sum_e f_e P_e

    which is 1 if all experts get equally many rows, and at most E.

    It is no `torch.nn.Linear`, of which copies in a narrow dtype are made: narrow logits change
    choices.
    """

    def __init__(self, width: int, count: int, top_k: int):
        """Build a router of rows of ``width`` channels."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width))
        self.top_k = top_k
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the logits as those of a linear layer."""
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor, inside: Tensor | None = None) -> Routed:
        """Choose experts for (T, width)."""
        # inside: bool (T,), False for rows of a tail; None if there is none
        count = self.weight.shape[0]
        with torch.autocast(x.device.type, enabled=False):
            wide = x if x.dtype == torch.float64 else x.float()
            logits = linear(wide, self.weight.to(wide.dtype))
            if inside is not None:
                logits = torch.where(inside[:, None], logits, 0)
            probabilities = logits.softmax(-1)
            gate, expert = probabilities.topk(self.top_k, -1)
            if self.top_k > 1:
                gate = gate / gate.sum(-1, keepdim=True)
            chosen = expert[..., None] == torch.arange(count, device=x.device)
            shares = chosen.sum(1).to(wide.dtype) / self.top_k
            normalizer = logits.logsumexp(-1).square()
            if inside is None:
                rows = max(len(x), 1)
            else:
                rows = inside.sum().clamp(min=1)
                probabilities = torch.where(inside[:, None], probabilities, 0)
                shares, normalizer = shares * inside[:, None], normalizer * inside
                expert = torch.where(inside[:, None], expert, count)
                gate = torch.where(inside[:, None], gate, 0)
            balance = count * (shares.sum(0) * probabilities.sum(0)).sum() / rows**2
            losses = torch.stack([balance, normalizer.sum() / rows]).float()
        return Routed(expert, gate, losses)


def take_losses(stack: nn.Module) -> Tensor | None:
    """Return the weighted losses of a stack's routers in its last forward; None without a router.

    The losses, each a mean over rows, are added over the layers. The stack's list is emptied, as it
    holds the graph.
    """
    experts = experts_of(getattr(stack, "config", None))
    losses: list[Tensor] = getattr(stack, "router_losses", [])
    if experts is None or not losses:
        return None
    balance, z_loss = torch.stack(losses).sum(0)
    losses.clear()
    return experts.balance * balance + experts.z_loss * z_loss
