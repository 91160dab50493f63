"""Combination of the ranks' gradients in a step, one interface for every kind of parallelism."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from effasr import ranges
from effasr.distributed.ddp_comm_hook import RecoverableAllReduceHook
from effasr.distributed.flat_grad_all_reduce import FlatGradAllReduce
from effasr.distributed.fsdp import no_sync as fsdp_no_sync
from effasr.distributed.process_group import DistributedContext


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
        """Return a context in which gradients accumulate locally."""
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
        """See `GradientSync.module`."""
        return self._ddp.module

    def begin(self, on_first_bucket: Callable[[], object]) -> None:
        """See `GradientSync.begin`."""
        self._hook.begin(on_first_bucket)

    def no_sync(self) -> AbstractContextManager:
        """See `GradientSync.no_sync`."""
        return self._ddp.no_sync()

    def discard(self) -> None:
        """See `GradientSync.discard`."""
        if not self._hook.begun:
            super().discard()

    def replace(self, gradients: Sequence[Tensor | None], *, exchanging: bool) -> None:
        """See `GradientSync.replace`."""
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
        """See `GradientSync.no_sync`."""
        assert isinstance(self._model, FSDPModule)
        return fsdp_no_sync(self._model)


class FlatGradientSync(GradientSync):
    """All gradients are averaged after the last backward: for one that a CUDA graph replays."""

    def __init__(self, model: nn.Module, context: DistributedContext) -> None:
        super().__init__(model)
        self._all_reduce = FlatGradAllReduce(model, context)

    def all_reduce(self) -> None:
        """See `GradientSync.all_reduce`."""
        with ranges.range("exchange"):
            self._all_reduce()


def gradient_sync(model: nn.Module) -> GradientSync:
    """Return the gradient synchronization for a model's wrapper."""
    if isinstance(model, DistributedDataParallel):
        return DDPGradientSync(model)
    return FSDPGradientSync(model) if isinstance(model, FSDPModule) else GradientSync(model)
