"""Averages over ranks: of weights, of optimizer moments, and of batch-norm statistics."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from effasr.checks import check
from effasr.distributed.process_group import DistributedContext

_MOST_ELEMENTS = 2**22
"""Of tensors that are averaged together, for which there is memory twice."""


class Averager:
    """Averages the weights of ranks that make updates of their own.

    This base class averages nothing: gradients are exchanged in every step, so the weights of all
    ranks are equal.
    """

    def is_local(self, step: int) -> bool:
        """Return whether the gradients of a step, counted from 0, are not exchanged."""
        return False

    def before(self, step: int) -> None:
        """Prepare a step; called before its first forward."""

    def after(self, step: int) -> None:
        """Finish a step; called after its update."""

    def synchronize(self, others: Iterable[Tensor] = ()) -> None:
        """Replace weights, moments and ``others`` by their mean over the ranks, in place."""


@dataclass(eq=False)
class LocalUpdates(Averager):
    """Lets ranks make updates of their own after a warm-up, in which gradients are exchanged."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    statistics: Sequence[Tensor]
    context: DistributedContext
    warmup_steps: int

    def __post_init__(self) -> None:
        self._tensors = [*(p.detach() for p in _trained(self.model)), *self.statistics]

    def is_local(self, step: int) -> bool:
        return step >= self.warmup_steps

    def synchronize(self, others: Iterable[Tensor] = ()) -> None:
        average_training_state(self.model, self.optimizer, others, self.context)


@torch.no_grad()
def average_flat(tensors: Sequence[Tensor], context: DistributedContext) -> None:
    """Replace tensors of one dtype by their mean over the ranks in one all-reduce, in place."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    mean = context.all_reduce(flat).div_(context.size)
    pieces = mean.split([tensor.numel() for tensor in tensors])
    for tensor, piece in zip(tensors, pieces, strict=True):
        tensor.copy_(piece.view_as(tensor))


@torch.no_grad()
def average_each(tensors: Iterable[Tensor], context: DistributedContext) -> None:
    """Replace each tensor by its mean over the ranks, in place.

    Small ones share an all-reduce: with 20 ms between eight hosts one for each takes minutes.
    """
    together: list[Tensor] = []
    for tensor in tensors:
        count = sum(x.numel() for x in (*together, tensor))
        if together and (count > _MOST_ELEMENTS or tensor.dtype != together[0].dtype):
            average_flat(together, context)
            together = []
        together.append(tensor.detach())
    if together:
        average_flat(together, context)


@torch.no_grad()
def add_flat(tensors: Sequence[Tensor], delta: Tensor) -> None:
    """Add a flat tensor to the tensors whose elements it concatenates; the host does not wait."""
    sizes = [tensor.numel() for tensor in tensors]
    if delta.shape != (sum(sizes),):
        raise ValueError(
            f"`delta` must have shape ({sum(sizes)},), the elements of all tensors, but has "
            f"{tuple(delta.shape)}."
        )
    for tensor, piece in zip(tensors, delta.split(sizes), strict=True):
        tensor.add_(piece.to(tensor.device, non_blocking=True).view(tensor.shape))


def average_training_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    others: Iterable[Tensor],
    context: DistributedContext,
) -> None:
    """Average trained parameters, their floating-point moments, and ``others`` over the ranks."""
    trained = _trained(model)
    moments = [
        value
        for parameter in trained
        for value in optimizer.state.get(parameter, {}).values()
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
    average_each([*trained, *moments, *others], context)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters; the others are equal on all ranks, and averaging rounds."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def check_warmup(steps: int) -> None:
    check(steps >= 0, "warmup_steps", "be at least 0", steps)


# Local SGD: every rank makes its own updates, and groups of ranks average at intervals.


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalSGDConfig:
    """Schedule of averages.

    Attributes:
        period: Steps from one mean of the weights to the next.
        warmup_steps: Steps before the first mean, in which gradients are exchanged as with ddp
            (post-local SGD, Lin et al. 2020), because weights change most in the beginning.
    """

    period: int = 8
    warmup_steps: int = 1000

    def __post_init__(self) -> None:
        check(self.period >= 1, "period", "be at least 1", self.period)
        check_warmup(self.warmup_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class HierarchicalConfig:
    """Schedule and groups of averages (hierarchical SGD, Lin et al. 2020).

    Attributes:
        periods: Maps the number of steps between two averages to the number of neighbouring ranks
            that take part; null stands for all. If several are due, the largest group averages.
            ``{2: 8, 16: null}`` averages the 8 ranks of a node every 2 steps and all every 16.
        warmup_steps: Warm-up steps, see `LocalSGDConfig`.
    """

    periods: dict[int, int | None] = field(default_factory=lambda: {2: 8, 16: None})
    warmup_steps: int = 1000

    def __post_init__(self) -> None:
        if not self.periods or min(self.periods) < 1:
            raise ValueError(f"`periods` must be steps, at least 1 each, but is {self.periods}.")
        rule = "have null, all ranks, at its longest"
        remedy = "otherwise the weights of the groups diverge"
        check(self.periods[max(self.periods)] is None, "periods", rule, self.periods, remedy)
        sizes = [self.periods[period] for period in sorted(self.periods)][:-1]
        existing = [size for size in sizes if size is not None]
        if (
            len(existing) < len(sizes)
            or existing != sorted(set(existing))
            or min(existing, default=2) < 2
        ):
            raise ValueError(
                "`periods` must have groups of at least 2 ranks that grow with the period, but is "
                f"{self.periods}."
            )
        check_warmup(self.warmup_steps)


@dataclass(eq=False)
class LocalSGD(LocalUpdates):
    """Averages weights in groups of ranks that grow with the period.

    PyTorch's `PeriodicModelAverager` and `HierarchicalModelAverager` leave out each parameter
    without a gradient, also if only one rank has none, which then deadlocks, and count steps from
    the start of the process.
    """

    periods: Mapping[int, int | None]

    def __post_init__(self) -> None:
        super().__post_init__()
        periods = sorted(self.periods.items(), reverse=True)
        self._groups = {period: _group(size, self.context) for period, size in periods}

    def after(self, step: int) -> None:
        done = step + 1 - self.warmup_steps
        for period, ranks in self._groups.items():
            if done > 0 and done % period == 0:
                average_flat(self._tensors, ranks)
                return


def _group(size: int | None, context: DistributedContext) -> DistributedContext:
    """Return the context of the ``size`` neighbouring ranks that include this one."""
    if size is None or size >= context.size:
        return context
    if context.size % size:
        raise ValueError(
            "`training.hierarchical.periods` must have groups that divide the "
            f"{context.size} ranks, but one is of {size}."
        )
    groups = [
        context.new_group(list(range(first, first + size)))
        for first in range(0, context.size, size)
    ]
    group = groups[context.rank // size]
    return DistributedContext(
        context.rank % size, size, context.device, group, timeout=context.timeout
    )


# Delayed averaging: the mean of the weights is computed during the next step.


@dataclass(frozen=True, kw_only=True, slots=True)
class DelayedConfig:
    """Start of the averages.

    Attributes:
        warmup_steps: Steps before the first average, in which gradients are exchanged as with ddp.
    """

    warmup_steps: int = 1000

    def __post_init__(self) -> None:
        check_warmup(self.warmup_steps)


@dataclass(eq=False)
class DelayedAveraging(LocalUpdates):
    """Each rank adds its own update of a step to the mean of the weights before that step.

    ``x_r(k+1) = mean(x(k)) + update_r(x_r(k))``, "delay-by-one" of Zhang et al. (2020, arXiv
    2002.01119): the all-reduce runs during forward and backward, so ranks wait only for one that
    is more than a step late. It needs a copy of the weights.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        # A separate group, because others are used during the all-reduce.
        self._group = self.context.new_group()
        self._pending: tuple[Tensor, Tensor, dist.Work] | None = None

    @torch.no_grad()
    def before(self, step: int) -> None:
        # Weights are equal until the first local step.
        if step <= self.warmup_steps:
            return
        sent = torch.cat([tensor.reshape(-1) for tensor in self._tensors])
        mean = sent / self.context.size
        work = dist.all_reduce(mean, group=self._group, async_op=True)
        assert work is not None
        self._pending = sent, mean, work

    def after(self, step: int) -> None:
        """Add the mean of the weights before the step, less this rank's weights before it."""
        if self._pending is None:
            return
        (sent, mean, work), self._pending = self._pending, None
        work.wait()
        add_flat(self._tensors, mean.sub_(sent))
