"""Zero mean and unit variance of each channel over each sequence."""

from dataclasses import dataclass

import torch
from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime import checks
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import BANDS, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.torch_op import ForwardOnlyOp
from effasr_kernels.shared.slots import check_slots


@dataclass(frozen=True, slots=True)
class NormalizeArguments:
    x: Tensor
    lengths: Tensor
    layout: PackedLayout
    rows_per_slot: int
    eps: float
    log_guard: float


def _example(inputs: ExampleInputs) -> Keywords:
    layout = inputs.frames()
    return {
        "x": inputs.floating(8 * layout.rows, BANDS),
        "lengths": inputs.integers(190, 0, 121, dtype=torch.int64),
        "layout": layout,
        "rows_per_slot": 8,
    }


OPERATION = ForwardOnlyOp(
    "normalize_features",
    NormalizeArguments,
    outputs=lambda a: a.x.new_empty(a.x.shape),
    flops=lambda _: 0,
    examples=[Example("normalize_features", _example, 0)],
)

_NAME = OPERATION.name


def normalize_features(
    x: Tensor,
    lengths: Tensor,
    layout: PackedLayout,
    *,
    rows_per_slot: int,
    eps: float = 1e-5,
    log_guard: float = 0.0,
    backend: Backend | str | None = None,
) -> Tensor:
    r"""Give each channel zero mean and unit variance over the real rows of each sequence.

    .. math::
        y_{rc} = \frac{x_{rc} - \mu_{nc}}{\sigma_{nc} + \epsilon}

    where the mean and the unbiased variance of sequence n are over its first ``lengths[n]`` rows;
    of one row the variance is 0. The variance is the mean of squared differences from the mean, in
    a second pass. Sums are float32 (float64 for float64) in a fixed order. The host does not wait
    for the device, and there is no gradient.

    Args:
        x: (s T, C), floating point; sequence n begins at row ``s * cu_seqlens[n]``.
        lengths: (N,), int32 or int64, real rows of each sequence, at most those of its slots.
        layout: Layout of the slots, T rows.
        rows_per_slot: s, rows of a slot: 1, 2, 4 or 8.
        eps: Added to the standard deviation; positive.
        log_guard: If positive, ``log(x + log_guard)`` is normalized in place of ``x``, without a
            pass of its own.
        backend: Implementation to use; by default the fastest that supports the call.

    Returns:
        (s T, C), the dtype of ``x``; zero in rows that are not real and in the tail.

    Raises:
        ValueError: An argument is invalid.
        RuntimeError: A tensor requires a gradient and grad mode is enabled.
        BackendUnavailable: See `effasr_kernels.runtime.dispatch.Dispatcher.select`.
    """
    check_slots(_NAME, x, lengths, layout, rows_per_slot)
    if not eps > 0:
        raise checks.wrong(_NAME, "eps", "be positive", eps)
    if not log_guard >= 0:
        raise checks.wrong(_NAME, "log_guard", "be at least 0", log_guard)
    arguments = NormalizeArguments(x, lengths, layout, rows_per_slot, eps, log_guard)
    return OPERATION(arguments, backend)
