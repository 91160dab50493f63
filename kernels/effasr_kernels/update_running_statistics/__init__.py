"""Moving averages of the statistics of batch normalization."""

from __future__ import annotations

import torch
from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime import checks
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.update_running_statistics.definition import OPERATION, UpdateArguments
from effasr_kernels.update_running_statistics.together import wait

_NAME = OPERATION.name


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

    Inside `effasr_kernels.update_running_statistics.together.updates_together` a call of eager code
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
    for name, value in (
        ("running_mean", running_mean),
        ("running_variance", running_variance),
    ):
        if not value.is_contiguous():
            raise checks.wrong(_NAME, name, "be contiguous", f"strides {value.stride()}")
    if not 0 <= momentum <= 1:
        raise checks.wrong(_NAME, "momentum", "be in [0, 1]", momentum)
    arguments = UpdateArguments(
        running_mean, running_variance, num_batches, mean, variance, layout, momentum
    )
    if not wait(arguments, backend):
        OPERATION(arguments, backend)
