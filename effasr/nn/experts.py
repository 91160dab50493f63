"""Feed-forward networks with experts, of which a row uses some.

The host never knows how many rows an expert has: rows are sorted by expert on the device.

References:
    Fedus et al., Switch Transformers, 2021, https://arxiv.org/abs/2101.03961 (balance loss);
    Zoph et al., ST-MoE, 2022, https://arxiv.org/abs/2202.08906 (z-loss).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from effasr.checks import check, check_choices, check_positive
from effasr.data.prompt import Prompt
from effasr.nn.feed_forward import ACTIVATIONS, Activation, FeedForward
from effasr.nn.residual import Residual, is_fused
from effasr.nn.stack import is_recomputing
from effasr_kernels import PackedLayout, PackedSequence, bias_activation_dropout, grouped_linear
from effasr_kernels.shared.cpu.linear import linear

Route = Literal["task", "language", "learned"]
_ROUTES = get_args(Route)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """Experts of every feed-forward network of a stack, each of the network's size.

    A row costs as much as in a model without experts, times ``top_k``; the memory of the weights
    grows with ``count``. Where ``init_from`` is a model without experts, each begins as a copy of
    the network, and the model writes the same as before (Komatsuzaki et al., Sparse Upcycling,
    2022, https://arxiv.org/abs/2212.05055).

    Attributes:
        count: Number of experts.
        route: How a row chooses. ``task``: all rows of an utterance use the expert that bears the
            name of its task, transcribe or translate; ``language``: that of its source language.
            ``learned``: a router of each network chooses for each row by its content.
        names: Unless ``learned``: the name of each expert, in order, such as ``de``.
        top_k: For ``learned``: experts of a row. With 1 the expert's output is multiplied by its
            probability (Switch Transformer); with more they are added with their probabilities,
            normalized to 1.
        balance: For ``learned``: weight of the loss that spreads rows evenly over the experts.
        z_loss: For ``learned``: weight of the mean squared logarithm of the router's normalizer,
            which keeps its logits small (ST-MoE).
    """

    count: int = 4
    route: Route = "learned"
    names: tuple[str, ...] = ()
    top_k: int = 1
    balance: float = 0.01
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        check_choices(self, route=_ROUTES)
        check_positive(self, "count")
        rule = f"be in 1 to count = {self.count}"
        check(1 <= self.top_k <= self.count, "top_k", rule, self.top_k)
        for name in ("balance", "z_loss"):
            value = getattr(self, name)
            check(value >= 0, name, "be at least 0", value)
        if self.is_learned:
            rule, remedy = "be empty where a router chooses", "leave it out, or set `route` to task"
            check(not self.names, "names", rule, self.names, f"{remedy} or language")
            return
        different = len(self.names) == len(set(self.names)) == self.count
        rule = f"be {self.count} different names, one for each expert"
        remedy = f"name the {self.route}s of the data, or change `count`"
        check(different, "names", rule, self.names, remedy)
        check(
            self.top_k == 1, "top_k", f"be 1 where the {self.route} chooses the expert", self.top_k
        )

    @property
    def is_learned(self) -> bool:
        return self.route == "learned"

    def number_of(self, prompt: Prompt) -> int:
        """The number of the expert that is named for an utterance or a text pair."""
        name = prompt.task if self.route == "task" else prompt.source
        if name in self.names:
            return self.names.index(name)
        raise ValueError(
            f"the {self.route} of an utterance must be one of {', '.join(self.names)}, which "
            f"`experts.names` lists, but is {name!r}: use one of these, or train an expert for it."
        )


def experts_of(stack: object) -> ExpertsConfig | None:
    return getattr(stack, "experts", None)


def named_experts_of(stack: object) -> ExpertsConfig | None:
    """The experts of a configuration where names choose them; else None."""
    experts = experts_of(stack)
    return None if experts is None or experts.is_learned else experts


@dataclass(frozen=True, slots=True)
class EncoderOutput(PackedSequence):
    """Encoder output of sequences, with the expert that names choose for each in the decoder."""

    # int64 (N,), see `effasr.data.batch.Batch.expert`; None where the batch names none
    expert: Tensor | None = None

    def with_values(self, values: Tensor) -> "EncoderOutput":
        return EncoderOutput(values, self.layout, self.expert)


def expert_of(encoded: PackedSequence) -> Tensor | None:
    return encoded.expert if isinstance(encoded, EncoderOutput) else None


@dataclass(frozen=True, slots=True)
class Groups:
    """A permutation of rows that sorts them by expert; rows without one come last."""

    order: Tensor  # int64 (T,), the row at each place of the sorted rows
    place: Tensor  # int64 (T,), its inverse: the place of each row
    layout: PackedLayout  # Layout of the sorted rows: a sequence for each expert

    @classmethod
    def of(cls, expert: Tensor, count: int) -> "Groups":
        # expert: int64 (T,), in [0, count); ``count`` for a row without an expert
        # Stable: the rows of an expert keep their order, in which gradients are added.
        ordered, order = torch.sort(expert, stable=True)
        rows = torch.arange(len(order), device=order.device)
        position = torch.empty_like(order).scatter_(0, order, rows)
        offsets = torch.searchsorted(ordered, torch.arange(count + 1, device=order.device))
        return cls(order, position, PackedLayout.from_offsets(offsets.int(), len(order)))

    @classmethod
    def of_sequences(cls, expert: Tensor, layout: PackedLayout, count: int) -> "Groups":
        """Sort the rows of sequences by the expert of the sequence."""
        # expert: int64 (N,), in [0, count)
        with_tail = torch.cat([expert, expert.new_full((1,), count)])
        return cls.of(with_tail[layout.sequence_ids()], count)

    def sort(self, x: Tensor) -> Tensor:
        return _Permute.apply(x, self.order, self.place)  # type: ignore[return-value]

    def restore(self, x: Tensor) -> Tensor:
        return _Permute.apply(x, self.place, self.order)  # type: ignore[return-value]

    def sizes(self) -> Tensor:
        return self.layout.cu_seqlens.diff()


def named_expert(config: ExpertsConfig | None, expert: Tensor | None) -> Tensor | None:
    """The expert of each sequence, int64 (N,), where names choose it; else None."""
    # expert: int64 (N,), the expert of each sequence; None if the batch names none
    if config is None or config.is_learned:
        return None
    if expert is None:
        raise ValueError(
            f"`expert` must be given for each utterance where its {config.route} chooses the "
            f"expert ({', '.join(config.names)}), but the batch names none: see `Batch.expert`."
        )
    return expert


def named_groups(
    config: ExpertsConfig | None, expert: Tensor | None, layout: PackedLayout
) -> Groups | None:
    """The groups of a stack's rows, which all of its layers share; None where no names choose."""
    named = named_expert(config, expert)
    if config is None or named is None:
        return None
    return Groups.of_sequences(named, layout, config.count)


class _Permute(Function):
    """Its backward permutes, too, where that of an index would add rows with atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (dx,) = grad_outputs
        (inverse,) = ctx.saved_tensors
        return dx.index_select(0, inverse), None, None


@dataclass(frozen=True, slots=True)
class Routed:
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
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width))
        self.top_k = top_k
        self.reset_parameters()

    def reset_parameters(self) -> None:
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
    """The weighted router losses of a stack's last forward, or None; they leave its list."""
    experts = experts_of(getattr(stack, "config", None))
    losses: list[Tensor] = getattr(stack, "router_losses", [])
    if experts is None or not losses:
        return None
    balance, z_loss = torch.stack(losses).sum(0)
    losses.clear()
    return experts.balance * balance + experts.z_loss * z_loss


class GroupedLinear(nn.Module):
    """A linear layer for each expert, whose rows are a sequence of the layout."""

    def __init__(self, count: int, width: int, outputs: int, *, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, outputs, width))
        self.bias = nn.Parameter(torch.empty(count, outputs)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in self.weight:
            nn.init.xavier_uniform_(weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, layout: PackedLayout) -> Tensor:
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
        """Set the statistics to zero; a meta module gets them on the host."""
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
        """As `route`, without the losses of a router."""
        return self.route(x, residual, offset=offset, groups=groups)[0]

    def route(
        self,
        x: Tensor,
        residual: Residual | None = None,
        *,
        offset: int = 0,
        groups: Groups | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Transform each row; also return the losses of the router, see `Routed`."""
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
    activation: Activation,
    bias: bool = True,
    dropout: float = 0.0,
) -> FeedForward | ExpertFeedForward:
    if experts is None:
        return FeedForward(width, hidden, activation=activation, bias=bias, dropout=dropout)
    assert activation != "swiglu"  # checked by the configuration
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
    """The output of a network, and its router's losses; None without a router."""
    if isinstance(module, ExpertFeedForward):
        return module.route(x, residual, offset=offset, groups=groups)
    return module(x, residual, offset=offset), None


def add_losses(*losses: Tensor | None) -> Tensor | None:
    present = [x for x in losses if x is not None]
    return torch.stack(present).sum(0) if present else None


class ExpertUse:
    """Rows of each expert and the losses of routers, of a rank, since the last line.

    Shares are those of all networks of a stack: an expert without rows learns nothing, and one with
    all of them is a dense network.
    """

    def __init__(self, model: nn.Module) -> None:
        self._networks: dict[str, list[ExpertFeedForward]] = {}
        for name, module in model.named_modules():
            if isinstance(module, ExpertFeedForward):
                self._networks.setdefault(name.split(".layers.")[0], []).append(module)

    def line(self) -> dict[str, Any]:
        """Fields of metrics.jsonl since the last line; waits for the device.

        ``encoder_expert_shares`` has the share of rows of each expert, in the order of the
        configuration, or null before the first row; ``encoder_expert_balance`` is the mean balance
        loss of its routers, 1 at best. Likewise for the other stacks.
        """
        fields: dict[str, Any] = {}
        for stack, networks in self._networks.items():
            rows = [sum(x) for x in zip(*(net.rows.tolist() for net in networks), strict=True)]
            shares = [x / sum(rows) for x in rows] if sum(rows) else None
            fields[f"{stack}_expert_shares"] = shares
            if networks[0].router is not None:
                total, count = torch.stack([net.balance for net in networks]).sum(0).tolist()
                fields[f"{stack}_expert_balance"] = total / count if count else None
            for network in networks:
                network.reset_parameters()
        return fields

    def state_dict(self) -> dict[str, Any]:
        return {"statistics": [value.clone() for value in self._buffers()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for buffer, value in zip(self._buffers(), state["statistics"], strict=True):
            buffer.copy_(value)

    def _buffers(self) -> Iterator[Tensor]:
        for networks in self._networks.values():
            for network in networks:
                yield from (network.rows, network.balance)
