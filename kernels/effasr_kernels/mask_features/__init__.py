"""SpecAugment: bands and stretches of time that are hidden by zeros."""

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
class MaskArguments:
    x: Tensor
    lengths: Tensor
    layout: PackedLayout
    rows_per_slot: int
    freq_shares: Tensor | None
    freq_width: int
    time_shares: Tensor | None
    time_width: float


def _shares(masks: int, device: torch.device) -> Tensor:
    return torch.linspace(0, 0.9, 6 * masks, device=device).view(2, 3, masks)


def _example(inputs: ExampleInputs) -> Keywords:
    layout = inputs.frames()
    return {
        "x": inputs.floating(8 * layout.rows, BANDS),
        "lengths": inputs.integers(190, 0, 121, dtype=torch.int64),
        "layout": layout,
        "rows_per_slot": 8,
        "freq_shares": _shares(2, inputs.device),
        "freq_width": 5,
        "time_shares": _shares(4, inputs.device),
        "time_width": 0.1,
    }


OPERATION = ForwardOnlyOp(
    "mask_features",
    MaskArguments,
    outputs=lambda a: a.x.new_empty(a.x.shape),
    flops=lambda _: 0,
    examples=[Example("mask_features", _example, 0)],
)

_NAME = OPERATION.name


def mask_features(
    x: Tensor,
    lengths: Tensor,
    layout: PackedLayout,
    *,
    rows_per_slot: int,
    freq_shares: Tensor | None = None,
    freq_width: int = 0,
    time_shares: Tensor | None = None,
    time_width: float = 0.0,
    backend: Backend | str | None = None,
) -> Tensor:
    r"""Set bands of channels and stretches of rows of each sequence to zero, as SpecAugment does.

    The caller draws the random numbers, two for each mask. From those, u and v in [0, 1), and from
    the widest mask w of a range of L channels or rows, a mask is

    .. math::
        [b, b + m) \quad \text{with} \quad
        m = \lfloor u \, (w + 1) \rfloor, \qquad b = \lfloor v \, (L - m + 1) \rfloor.

    A band of channels has L = C and w = min(``freq_width``, C), and covers all rows of its
    sequence. A stretch of time has L = ``lengths[n]`` and w = floor(L ``time_width``), and covers
    all channels. Products are rounded to float32. The host does not wait for the device, and there
    is no gradient.

    Args:
        x: (s T, C), floating point; sequence n begins at row ``s * cu_seqlens[n]``.
        lengths: (N,), int32 or int64, the rows of each sequence that stretches of time may cover,
            at most those of its slots.
        layout: Layout of the slots, T rows.
        rows_per_slot: s, rows of a slot: 1, 2, 4 or 8.
        freq_shares: float32 (2, N, F), u and v of F bands of each sequence; None for none.
        freq_width: Channels of the widest band.
        time_shares: float32 (2, N, M), u and v of M stretches of each sequence; None for none.
        time_width: Rows of the longest stretch as a share of ``lengths``, in [0, 1].
        backend: Implementation to use; by default the fastest that supports the call.

    Returns:
        (s T, C), the dtype of ``x``; zero in the tail.

    Raises:
        ValueError: An argument is invalid.
        RuntimeError: A tensor requires a gradient and grad mode is enabled.
        BackendUnavailable: See `effasr_kernels.runtime.dispatch.Dispatcher.select`.

    References:
        Park et al., 2019, https://arxiv.org/abs/1904.08779; stretches in proportion to the
        sequence: https://arxiv.org/abs/1912.05533.
    """
    check_slots(_NAME, x, lengths, layout, rows_per_slot)
    for name, shares in (("freq_shares", freq_shares), ("time_shares", time_shares)):
        if shares is None:
            continue
        checks.check_shape(_NAME, name, shares, "(2, N, M)", 2, layout.num_sequences, None)
        if shares.dtype != torch.float32:
            raise checks.wrong(_NAME, name, "be float32", shares.dtype)
        if shares.device != x.device:
            raise checks.wrong(_NAME, name, f"be on {x.device}, as `x` is", shares.device)
    if freq_width < 0:
        raise checks.wrong(_NAME, "freq_width", "be at least 0", freq_width)
    if not 0 <= time_width <= 1:
        raise checks.wrong(_NAME, "time_width", "be in [0, 1]", time_width)
    arguments = MaskArguments(
        x, lengths, layout, rows_per_slot, freq_shares, freq_width, time_shares, time_width
    )
    return OPERATION(arguments, backend)
