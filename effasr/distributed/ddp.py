"""Data parallelism: every rank has all weights, and gradients are averaged in the backward."""

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

# PyTorch compares the annotation of a hook with the class: it must not be a string.
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from effasr.distributed.process_group import DistributedContext

# torch 2.13 renamed the option, and warns of the old name.
_OPTIONS = inspect.signature(DistributedDataParallel).parameters
SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"


def replicate(model: nn.Module, context: DistributedContext) -> nn.Module:
    """Wrap a model in `DistributedDataParallel`, where there are several ranks.

    Every rank starts with rank 0's weights. Running statistics of batch norms stay local; see
    `effasr.distributed.batch_norm`. Every parameter must take part in every forward.
    """
    if context.size == 1:
        return model
    return DistributedDataParallel(
        model,
        process_group=context.group,
        device_ids=[context.device] if context.device.type == "cuda" else None,
        **{SYNC_BUFFERS: False},  # type: ignore[reportArgumentType]
        gradient_as_bucket_view=True,
    )


# A DDP communication hook whose all-reduce can be completed after a backward that failed.

# No postponed annotations: torch compares those of a hook with its own classes.


class RecoverableAllReduceHook:
    """Records the buckets that `DistributedDataParallel` sends, and can send the rest itself.

    A failed rank must not leave the others waiting. Each of them waits for as many buckets, of
    the same sizes and in the same order, as in any other step: so the failed rank computes its
    gradient in another way and sends the remaining buckets.

    It costs one call of a Python function per bucket, and a read of each gradient, per step.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._sent: list[Tensor] = []
        self._begun = False
        self._on_send: Callable[[], object] = lambda: None
        self._places: list[int | None] = []
        model.register_comm_hook(None, self._send)
        model.register_forward_hook(self._note)

    def begin(self, on_send: Callable[[], object]) -> None:
        """Begin a step; ``on_send`` is called before its first gradients are sent."""
        self._on_send = on_send
        self._sent.clear()
        self._begun = False

    @property
    def begun(self) -> bool:
        return self._begun

    def complete(self, gradients: Sequence[Tensor | None]) -> None:
        """Average the gradients over the ranks, as the failed backward would have.

        A bucket that was sent holds the whole gradient of its parameters, as the backward computed
        it before it failed; for these the argument is ignored.
        """
        if not self._begun:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            # Run a forward and backward that add nothing, to all-reduce the gradients present.
            model, inner = self._model, self._model.module
            model.module = _Touch(self._parameters)
            try:
                model().backward()
            finally:
                model.module = inner
            return
        sent = set(map(id, self._sent))
        missing = []
        rows = zip(self._parameters, gradients, self._places, strict=True)
        for parameter, gradient, position in rows:
            # Gradients that the backward has finished are in their buckets now.
            ready = parameter.grad is not None and parameter.grad.data_ptr() != position
            if id(parameter) not in sent:
                gradient = torch.zeros_like(parameter) if gradient is None else gradient
                if ready and parameter.grad is not None:
                    parameter.grad.copy_(gradient)
                else:
                    parameter.grad = gradient
            if not ready:
                missing.append(parameter)
        if not missing:
            raise RuntimeError(
                "the all-reduce of gradients failed after the last was computed, and cannot be "
                "repeated: started again, the run continues from its newest checkpoint."
            )
        _touch(missing).backward()

    def _send(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        del state
        if not self._sent:
            self._on_send()
        self._sent += bucket.parameters()
        return allreduce_hook(self._model.process_group, bucket)  # type: ignore[arg-type]

    def _note(self, model: nn.Module, inputs: object, output: object) -> None:
        del inputs, output
        self._begun = bool(model.require_backward_grad_sync)
        if self._begun:
            grads = (parameter.grad for parameter in self._parameters)
            self._places = [None if grad is None else grad.data_ptr() for grad in grads]


class _Touch(nn.Module):
    """A module whose forward reaches parameters of another module."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        # In a tuple, so that they are not registered a second time.
        self._reached = tuple(parameters)

    def forward(self) -> Tensor:
        return _touch(self._reached)


def _touch(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return a zero whose gradient, zero as well, reaches every parameter."""
    return torch.stack([parameter.sum() * 0.0 for parameter in parameters]).sum()
