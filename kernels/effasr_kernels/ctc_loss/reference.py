import torch
import torch.nn.functional as F
from torch import Tensor

from effasr_kernels.ctc_loss import CtcArguments
from effasr_kernels.runtime.checks import check_labels
from effasr_kernels.shared.cpu.linear import linear
from effasr_kernels.shared.ragged import split_rows, widen, zeroed

_NOTHING = -1e30
"""The logarithm of no probability."""


def run(a: CtcArguments) -> Tensor:
    labels = a.targets[: a.layout_targets.total]
    exception = f" other than the blank {a.blank_id}"
    check_labels("ctc_loss", labels, a.weight.shape[0], exception, a.blank_id)
    hidden = widen(a.hidden)[: a.layout_frames.total]
    bias = None if a.bias is None else widen(a.bias)
    log_probs = linear(hidden, widen(a.weight), bias).log_softmax(-1)
    # In float32 the error of the occupancies grows with the frames and exceeds 1 % at a thousand.
    # The gradient of a class without probability would be the difference of two infinities.
    frames = log_probs.double().clamp(min=_NOTHING).split([t for t in a.layout_frames.lengths if t])
    transcripts = split_rows(a.targets.long(), a.layout_targets)
    pairs = list(zip(a.layout_frames.lengths, transcripts, strict=True))
    of_none = [torch.inf if len(labels) else 0.0 for _, labels in pairs]
    losses = torch.tensor(of_none, dtype=hidden.dtype, device=hidden.device)
    if not frames:
        return losses + zeroed(hidden).sum()
    filled = [n for n, (t, _) in enumerate(pairs) if t]
    losses_of_filled = [
        _loss(x, pairs[n][1], a.blank_id) for x, n in zip(frames, filled, strict=True)
    ]
    index = torch.tensor(filled, device=hidden.device)
    losses = losses.index_copy(0, index, torch.stack(losses_of_filled).to(hidden.dtype))
    return losses + zeroed(hidden).sum()


def _loss(log_probs: Tensor, labels: Tensor, blank_id: int) -> Tensor:
    """Return the loss of one sequence: (T_n, V), (U_n,) -> ()."""
    repeats = (labels[1:] == labels[:-1]).sum()
    infeasible = log_probs.shape[0] < labels.shape[0] + repeats
    loss = F.ctc_loss(
        log_probs[:, None],
        labels[None],
        torch.tensor([log_probs.shape[0]]),
        torch.tensor([labels.shape[0]]),
        blank_id,
        reduction="sum",
        zero_infinity=True,
    )
    if infeasible or loss > -0.5 * _NOTHING:
        return loss.new_full((), torch.inf)
    return loss
