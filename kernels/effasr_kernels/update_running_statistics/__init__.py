"""Moving averages of the statistics of batch normalization."""

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime import checks
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import CHANNELS, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.torch_op import ForwardOnlyOp, is_dispatched


@dataclass(frozen=True, slots=True)
class UpdateArguments:
    running_mean: Tensor
    running_variance: Tensor
    num_batches: Tensor
    mean: Tensor
    variance: Tensor
    layout: PackedLayout
    momentum: float


def _example(inputs: ExampleInputs) -> Keywords:
    running_mean, running_variance, mean, variance = (inputs.floating(CHANNELS) for _ in range(4))
    return {
        "running_mean": running_mean,
        "running_variance": running_variance,
        "num_batches": torch.tensor(3, device=inputs.device),
        "mean": mean,
        "variance": variance,
        "layout": inputs.frames(),
    }


OPERATION = ForwardOnlyOp(
    "update_running_statistics",
    UpdateArguments,
    outputs=lambda _: None,
    flops=lambda _: 0,
    results=0,
    written=("running_mean", "running_variance", "num_batches"),
    examples=[Example("update_running_statistics", _example, 0)],
)

_NAME = OPERATION.name
_MOST = 64
"""Updates of one launch: with five addresses each, 2,560 of the 4,096 bytes of its arguments."""

_here = threading.local()


def update_running_statistics(
    running_mean: Tensor,
    running_variance: Tensor,
    num_batches: Tensor,
    mean: Tensor,
    variance: Tensor,
    layout: PackedLayout,
    *,
    momentum: float = 0.1,
    backend: Backend | str | None = None,
) -> None:
    r"""Move running statistics toward those of a batch, in place, as `torch.nn.BatchNorm1d` does.

    .. math::
        m' \leftarrow m' + \alpha \, (m - m'), \qquad
        v' \leftarrow v' + \alpha \, \Big(\frac{R}{R - 1} \, v - v'\Big)

    with R the rows of the layout without the tail, and R - 1 at least 1. A batch without a row
    changes neither. The number of batches increases by one. The host does not wait for the device,
    and there is no gradient.

    Inside `effasr_kernels.update_running_statistics.updates_together` a call of eager code
    takes effect at the end of the context, in one launch for all layers.

    Args:
        running_mean: m', (C,), floating point; written in place.
        running_variance: v', (C,), the dtype of ``running_mean``; written in place.
        num_batches: int64 (), written in place.
        mean: m, (C,), floating point.
        variance: v, (C,), biased, the dtype of ``mean``.
        layout: Layout of the batch.
        momentum: alpha, in [0, 1].
        backend: Implementation to use; by default the fastest that supports the call.

    Raises:
        ValueError: An argument is invalid.
        RuntimeError: A tensor requires a gradient and grad mode is enabled.
        BackendUnavailable: See `effasr_kernels.runtime.dispatch.Dispatcher.select`.
    """
    checks.check_shape(_NAME, "mean", mean, "(C,)", None)
    channels = mean.shape[0]
    checks.check_shape(_NAME, "variance", variance, "(C,)", channels)
    checks.check_shape(_NAME, "running_mean", running_mean, "(C,)", channels)
    checks.check_shape(_NAME, "running_variance", running_variance, "(C,)", channels)
    checks.check_floating(_NAME, mean=mean, variance=variance)
    checks.check_floating(_NAME, running_mean=running_mean, running_variance=running_variance)
    checks.check_shape(_NAME, "num_batches", num_batches, "()")
    if num_batches.dtype != torch.int64:
        raise checks.wrong(_NAME, "num_batches", "be int64", num_batches.dtype)
    device = mean.device
    for name, value in (("running_mean", running_mean), ("num_batches", num_batches)):
        if value.device != device:
            raise checks.wrong(_NAME, name, f"be on {device}, as `mean` is", value.device)
    if layout.device != device:
        raise checks.wrong(_NAME, "layout", f"be on {device}, as `mean` is", layout.device)
    for name, value in (("running_mean", running_mean), ("running_variance", running_variance)):
        if not value.is_contiguous():
            raise checks.wrong(_NAME, name, "be contiguous", f"strides {value.stride()}")
    if not 0 <= momentum <= 1:
        raise checks.wrong(_NAME, "momentum", "be in [0, 1]", momentum)
    arguments = UpdateArguments(
        running_mean, running_variance, num_batches, mean, variance, layout, momentum
    )
    if not _wait(arguments, backend):
        OPERATION(arguments, backend)


@contextmanager
def updates_together() -> Iterator[None]:
    """Let the updates of this thread wait inside the context, and run updates of a kind together.

    No other layer reads the running statistics of one, so they may change after the last has run.

    Until its end, nothing may read the running statistics or change the tensors that were given. If
    the context raises, none is updated: a batch that is repeated then counts once. What compiled
    code calls does not wait, because compiled code uses the memory of its tensors again.
    """
    previous = getattr(_here, "waiting", None)
    waiting: list[tuple[UpdateArguments, Backend | str | None]] = []
    _here.waiting = waiting
    try:
        yield
    finally:
        _here.waiting = previous
    groups: dict[tuple[Backend | str | None, Hashable], list[UpdateArguments]] = {}
    for a, backend in waiting:
        groups.setdefault((backend, _kind(a)), []).append(a)
    for (backend, _), updates in groups.items():
        for start in range(0, len(updates), _MOST):
            first, *more = updates[start : start + _MOST]
            OPERATION.select(first, backend).run(first, *more)


def _wait(arguments: UpdateArguments, backend: Backend | str | None) -> bool:
    """Let an update wait if this is an eager call inside the context; return whether it does."""
    waiting = None if is_dispatched() else getattr(_here, "waiting", None)
    if waiting is None:
        return False
    OPERATION.refuse_gradients(arguments)
    waiting.append((arguments, backend))
    return True


def _kind(a: UpdateArguments) -> Hashable:
    """What updates of one launch have in common."""
    return id(a.layout), a.momentum, a.mean.shape, a.mean.dtype, a.running_mean.dtype
