"""The definition of `ctc_loss`: what every other implementation must match."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.checks import check_labels
from effasr_kernels.shared.ragged import split_rows, widen, zeroed


def why_not(*args: object, **kwargs: object) -> None:
    """The reference serves every call."""


def run(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    layout_frames: PackedLayout,
    layout_targets: PackedLayout,
    *,
    bias: Tensor | None,
    blank_id: int,
) -> Tensor:
    """See `effasr_kernels.ctc_loss.ctc_loss`."""
    labels = targets[: layout_targets.total]
    exception = f" other than the blank {blank_id}"
    check_labels("ctc_loss", labels, weight.shape[0], exception, blank_id)
    weight, bias = widen(weight), None if bias is None else widen(bias)
    frames = split_rows(widen(hidden), layout_frames)
    labels = split_rows(targets.long(), layout_targets)
    losses = [_loss(h, y, weight, bias, blank_id) for h, y in zip(frames, labels, strict=True)]
    return torch.stack(losses) if losses else weight.new_zeros(0)


def _loss(
    hidden: Tensor, labels: Tensor, weight: Tensor, bias: Tensor | None, blank_id: int
) -> Tensor:
    """The loss of one sequence: (T_n, C), (U_n,) -> ()."""
    repeats = (labels[1:] == labels[:-1]).sum()
    infeasible = hidden.shape[0] < labels.shape[0] + repeats
    if hidden.shape[0] == 0:
        loss = zeroed(hidden).sum()
    else:
        log_probs = F.linear(hidden, weight, bias).log_softmax(-1)
        loss = F.ctc_loss(
            # In float32 the error of an occupancy grows with the frames, past 1 % at a thousand.
            log_probs[:, None].double(),
            labels[None],
            torch.tensor([hidden.shape[0]]),
            torch.tensor([labels.shape[0]]),
            blank_id,
            reduction="sum",
            zero_infinity=True,
        )
    return loss.masked_fill(infeasible, torch.inf).to(weight.dtype)
