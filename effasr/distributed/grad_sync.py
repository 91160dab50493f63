"""An all-reduce of all gradients after the backward instead of during it."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from effasr import ranges
from effasr.distributed.ddp import RecoverableAllReduceHook
from effasr.distributed.fsdp import no_sync as fsdp_no_sync
from effasr.distributed.process_group import DistributedContext

_PIECE_BYTES = 1 << 28
"""Size of one all-reduce: large enough for the network's speed, and several overlap."""


class FlatGradAllReduce:
    """Keeps the gradients of a model in one tensor per dtype, and averages these over the ranks.

    This is for a backward that a CUDA graph replays: it accumulates gradients in place and runs no
    hook of `DistributedDataParallel`. The communication therefore does not overlap with the
    backward: for n bytes of gradients and W ranks it moves 2 n (W - 1) / W bytes once a step.
    """

    def __init__(self, model: nn.Module, context: DistributedContext) -> None:
        self._context = context
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), group=context.group, group_src=0)
        trained = [p for p in model.parameters() if p.requires_grad]
        self._flat = [_flatten(group) for group in _by_dtype(trained)]
        self._views = [(parameter, parameter.grad) for parameter in trained]

    def __call__(self) -> None:
        """Replace each gradient by its mean over the ranks; on a GPU the host does not wait."""
        if any(parameter.grad is not view for parameter, view in self._views):
            raise RuntimeError("a gradient was replaced, so that the ranks cannot average it")
        works = []
        for flat in self._flat:
            for piece in flat.split(_PIECE_BYTES // flat.element_size()):
                piece.div_(self._context.size)
                works.append(dist.all_reduce(piece, group=self._context.group, async_op=True))
        for work in works:
            work.wait()


def _by_dtype(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    groups: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.dtype, []).append(parameter)
    return list(groups.values())


def _flatten(parameters: list[nn.Parameter]) -> Tensor:
    """Return a flat tensor of zeros whose views are the gradients of the parameters."""
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
    for parameter, piece in zip(parameters, flat.split(sizes), strict=True):
        parameter.grad = piece.view_as(parameter)
    return flat


# Combination of the ranks' gradients in a step, one interface for every kind of parallelism.


class GradientSync:
    """Leaves gradients as they are: for a single rank."""

    # Why a micro-batch cannot be recomputed in pieces after an out-of-memory error, and the remedy;
    # None if it can
    unsplittable_reason: str | None = None

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._trained = [p for p in model.parameters() if p.requires_grad]

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The trained parameters, in the order of `replace`."""
        return self._trained

    @property
    def module(self) -> nn.Module:
        """The model without its wrapper."""
        return self._model

    def begin(self, on_first_bucket: Callable[[], object]) -> None:
        """Begin a step; ``on_first_bucket`` is called before its first gradients are sent."""

    def no_sync(self) -> AbstractContextManager:
        return nullcontext()

    def all_reduce(self) -> None:
        """Combine the gradients that the last backward of the step has not combined."""

    def discard(self) -> None:
        """Discard the gradients of a failed backward, except those already sent."""
        for parameter in self._trained:
            parameter.grad = None

    def replace(self, gradients: Sequence[Tensor | None], *, exchanging: bool) -> None:
        """Set the gradients of the step so far after a failed backward."""
        del exchanging
        for parameter, gradient in zip(self._trained, gradients, strict=True):
            parameter.grad = gradient


class DDPGradientSync(GradientSync):
    """`DistributedDataParallel`: gradients are averaged in buckets during the last backward."""

    def __init__(self, model: DistributedDataParallel) -> None:
        super().__init__(model)
        self._ddp = model
        self._hook = RecoverableAllReduceHook(model)

    @property
    def module(self) -> nn.Module:
        return self._ddp.module

    def begin(self, on_first_bucket: Callable[[], object]) -> None:
        self._hook.begin(on_first_bucket)

    def no_sync(self) -> AbstractContextManager:
        return self._ddp.no_sync()

    def discard(self) -> None:
        if not self._hook.begun:
            super().discard()

    def replace(self, gradients: Sequence[Tensor | None], *, exchanging: bool) -> None:
        if exchanging:
            self._hook.complete(gradients)
        else:
            super().replace(gradients, exchanging=exchanging)


class FSDPGradientSync(GradientSync):
    """FSDP2: gradients are reduced and scattered, layer by layer, during the last backward."""

    unsplittable_reason = (
        "with training.strategy fsdp2 it cannot be split, because ranks gather layers together and "
        "none can start again alone: lower data.frame_budget, or set "
        "training.activation_checkpointing=true"
    )

    def no_sync(self) -> AbstractContextManager:
        assert isinstance(self._model, FSDPModule)
        return fsdp_no_sync(self._model)


class FlatGradientSync(GradientSync):
    """All gradients are averaged after the last backward: for one that a CUDA graph replays."""

    def __init__(self, model: nn.Module, context: DistributedContext) -> None:
        super().__init__(model)
        self._all_reduce = FlatGradAllReduce(model, context)

    def all_reduce(self) -> None:
        with ranges.range("exchange"):
            self._all_reduce()


def gradient_sync(model: nn.Module) -> GradientSync:
    if isinstance(model, DistributedDataParallel):
        return DDPGradientSync(model)
    return FSDPGradientSync(model) if isinstance(model, FSDPModule) else GradientSync(model)
