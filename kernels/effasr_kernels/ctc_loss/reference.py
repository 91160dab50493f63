"""The definition of `ctc_loss`: what every other implementation must match."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from effasr_kernels.ctc_loss.definition import CtcArguments
from effasr_kernels.runtime.checks import check_labels
from effasr_kernels.shared.ragged import split_rows, widen, zeroed


def run(a: CtcArguments) -> Tensor:
    """See `effasr_kernels.ctc_loss.ctc_loss`."""
    labels = a.targets[: a.layout_targets.total]
    exception = f" other than the blank {a.blank_id}"
    check_labels("ctc_loss", labels, a.weight.shape[0], exception, a.blank_id)
    weight, bias = widen(a.weight), None if a.bias is None else widen(a.bias)
    frames = split_rows(widen(a.hidden), a.layout_frames)
    labels = split_rows(a.targets.long(), a.layout_targets)
    losses = [_loss(h, y, weight, bias, a.blank_id) for h, y in zip(frames, labels, strict=True)]
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
