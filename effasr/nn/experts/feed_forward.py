"""A feed-forward network with experts."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effasr.nn.experts.config import ExpertsConfig
from effasr.nn.experts.grouping import Groups
from effasr.nn.experts.router import Router
from effasr.nn.feed_forward import ACTIVATIONS, FeedForward
from effasr.nn.residual import Residual, is_fused
from effasr.nn.stack import is_recomputing
from effasr_kernels import PackedLayout, bias_activation_dropout, grouped_linear


class GroupedLinear(nn.Module):
    """A linear layer for each expert, over rows that are sorted by expert."""

    def __init__(self, count: int, width: int, outputs: int, *, bias: bool = True):
        """Build ``count`` layers from ``width`` to ``outputs`` channels."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, outputs, width))
        self.bias = nn.Parameter(torch.empty(count, outputs)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize each expert as a linear layer: Xavier-uniform, with a bias of zero."""
        for weight in self.weight:
            nn.init.xavier_uniform_(weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, layout: PackedLayout) -> Tensor:
        """Map (T, width) to (T, outputs); ``layout`` has a sequence for each expert."""
        return grouped_linear(x, self.weight, layout, bias=self.bias)


class ExpertFeedForward(nn.Module):
    """Feed-forward networks of which each row uses ``top_k``: (T, width) to (T, width).

    Rows are sorted by expert, so that a layer of all experts is one grouped product over as many
    rows as an expert network without the others would have; see `effasr_kernels.grouped_linear`.
    No row is dropped and none waits: a row's result does not depend on the rest of the batch.
    """

    # int64 (count,), how many rows each expert has had in training on this rank, since
    # `reset_parameters`
    rows: Tensor
    # float32 (2,), the sum of the router's balance losses since then, and their number
    balance: Tensor

    def __init__(
        self,
        width: int,
        hidden: int,
        config: ExpertsConfig,
        *,
        activation: Literal["silu", "relu", "gelu"],
        bias: bool = True,
        dropout: float = 0.0,
    ):
        """Build experts with ``hidden`` channels between their two layers."""
        super().__init__()
        self.config, self.dropout = config, dropout
        self.activation: Literal["silu", "relu", "gelu"] = activation
        self.linear1 = GroupedLinear(config.count, width, hidden, bias=bias)
        self.linear2 = GroupedLinear(config.count, hidden, width, bias=bias)
        self.router = Router(width, config.count, config.top_k) if config.is_learned else None
        # Part of no checkpoint: they are for the log.
        self.register_buffer("rows", torch.empty(config.count, dtype=torch.int64), persistent=False)
        self.register_buffer("balance", torch.empty(2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the statistics to zero; those of a meta module come to the host."""
        for name in ("rows", "balance"):
            statistics = getattr(self, name)
            if statistics.is_meta:
                setattr(self, name, torch.zeros_like(statistics, device="cpu"))
            else:
                # In place: a CUDA graph adds to these addresses.
                statistics.zero_()

    def forward(
        self,
        x: Tensor,
        residual: Residual | None = None,
        *,
        offset: int = 0,
        groups: Groups | None = None,
    ) -> Tensor:
        """Transform each row; as `route`, without the losses of a router."""
        return self.route(x, residual, offset=offset, groups=groups)[0]

    def route(
        self,
        x: Tensor,
        residual: Residual | None = None,
        *,
        offset: int = 0,
        groups: Groups | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Transform each row, and return the losses of the router, too."""
        # x: (..., width)
        shape, x = x.shape, x.flatten(0, -2)
        top_k, gate, losses = self.config.top_k, None, None
        if self.router is not None:
            inside = None
            if residual is not None and residual.layout.has_tail:
                inside = residual.layout.mask()
            routed = self.router(x, inside)
            gate, losses = routed.gate, routed.losses
            groups = Groups.of(routed.expert.flatten(), self.config.count)
        elif groups is None:
            raise ValueError(
                f"`groups` must be given where the {self.config.route} of an utterance chooses its "
                "expert, but is None: use experts with the route learned here."
            )
        # In its own recomputation the compiler omits the update.
        if self.training and (torch.compiler.is_compiling() or not is_recomputing()):
            self.rows += groups.sizes()
            if losses is not None:
                self.balance += torch.stack([losses[0].detach(), losses.new_ones(())])
        rows = x if top_k == 1 else x[:, None].expand(-1, top_k, -1).flatten(0, 1)
        y = groups.restore(self._transformed(groups.sort(rows), groups, residual, offset))
        if gate is not None:
            y = (y.unflatten(0, (-1, top_k)) * gate[..., None].to(y.dtype)).sum(1)
        return y.view(shape), losses

    def _transformed(
        self, rows: Tensor, groups: Groups, residual: Residual | None, offset: int
    ) -> Tensor:
        """Apply the experts to sorted rows."""
        y = self.linear1(rows, groups.layout)
        if residual is None or not is_fused(rows):
            y = F.dropout(ACTIVATIONS[self.activation](y), self.dropout, self.training)
        else:
            y = bias_activation_dropout(
                y,
                None,
                groups.layout,
                activation=self.activation,
                dropout=self.dropout if self.training else 0.0,
                seed=residual.seed,
                offset=offset,
            )
        return self.linear2(y, groups.layout)


def build_feed_forward(
    width: int,
    hidden: int,
    experts: ExpertsConfig | None,
    *,
    activation: Literal["silu", "relu", "gelu"],
    bias: bool = True,
    dropout: float = 0.0,
) -> FeedForward | ExpertFeedForward:
    """Return a feed-forward network, with experts if they are configured."""
    if experts is None:
        return FeedForward(width, hidden, activation=activation, bias=bias, dropout=dropout)
    return ExpertFeedForward(
        width, hidden, experts, activation=activation, bias=bias, dropout=dropout
    )


def run_feed_forward(
    module: FeedForward | ExpertFeedForward,
    x: Tensor,
    residual: Residual,
    *,
    offset: int,
    groups: Groups | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the output of a network, and its router's losses; None without a router.

    The arguments are those of `ExpertFeedForward.route`.
    """
    if isinstance(module, ExpertFeedForward):
        return module.route(x, residual, offset=offset, groups=groups)
    return module(x, residual, offset=offset), None


def add_losses(*losses: Tensor | None) -> Tensor | None:
    """Return the sum of the losses of several routers; None if there is none."""
    found = [x for x in losses if x is not None]
    return torch.stack(found).sum(0) if found else None
