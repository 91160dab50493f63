"""Sums of the losses of one micro-batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from effasr.data.batch import IGNORED, Batch
from effasr.data.features.segments import segment_sum


@dataclass(frozen=True, slots=True)
class Losses:
    """Sums over the batch, float32 (float64 for a float64 model), not divided by any count.

    The counts are ``batch.num_targets`` for ``cross_entropy``, and ``batch.num_monotonic_targets``
    for the others. A loss that the model or the call lacks is zero, without gradient. NaN and
    infinity are passed on, except in `ctc`.

    Attributes:
        cross_entropy: (), over the counted targets.
        ctc: (), over the monotonic utterances. One whose text does not fit in its frames adds
            nothing, and has no gradient.
        transducer: (), likewise; a text always fits, unless there is no frame.
        guided: (), penalty of guided attention over the counted targets of monotonic utterances,
            averaged over layers and heads. Where targets have times, the mean of an utterance,
            times the targets of CTC.
        consistency: (), distance of speech from the text encoder's rows under the best alignment,
            times the targets, over the monotonic utterances.
        per_utterance: (N,), the sum of the five for each utterance, without gradient.
        router: (), the weighted losses of the routers of experts, a mean over rows times the
            targets; None without a router.
    """

    cross_entropy: Tensor
    ctc: Tensor
    transducer: Tensor
    guided: Tensor
    consistency: Tensor
    per_utterance: Tensor
    router: Tensor | None = None


def gather_losses(
    batch: Batch,
    *,
    cross_entropy: Tensor | None = None,  # (U,), zero for ignored targets
    ctc: Tensor | None = None,  # (N,), infinite for an infeasible utterance
    transducer: Tensor | None = None,  # (N,), likewise
    penalty: Tensor | None = None,  # (U,), of guided attention
    distance: Tensor | None = None,  # (N,), of speech from text, infinite without text
) -> Losses:
    """Sum the losses of what counts; None stands for a part that the model lacks."""
    layout = batch.tokens.layout
    zero = torch.zeros((), device=layout.device)
    per_utterance = zero.expand(layout.num_sequences)
    names = ["cross_entropy", "ctc", "transducer", "guided", "consistency"]
    by_loss: dict[str, Tensor] = dict.fromkeys(names, zero)
    if distance is not None:
        distance = distance * (batch.text.layout.cu_seqlens.diff() + 1)
    if cross_entropy is not None:
        by_loss["cross_entropy"] = cross_entropy.sum()
        per_utterance = segment_sum(cross_entropy.detach(), layout)
    of_utterances = ("ctc", ctc), ("transducer", transducer), ("consistency", distance)
    for name, aligned in of_utterances:
        if aligned is not None:
            counted = aligned.where(batch.monotonic & (aligned != torch.inf), 0.0)
            by_loss[name] = counted.sum()
            per_utterance = per_utterance + counted.detach()
    if penalty is not None:
        penalty = _guided(penalty, batch)
        by_loss["guided"] = penalty.sum()
        per_utterance = per_utterance + segment_sum(penalty.detach(), layout)
    return Losses(**by_loss, per_utterance=per_utterance)


def _guided(penalty: Tensor, batch: Batch) -> Tensor:
    """Return the penalty of each counted target of monotonic utterances, otherwise 0: (U,)."""
    layout = batch.tokens.layout
    monotonic = torch.cat([batch.monotonic, batch.monotonic.new_zeros(1)])
    counted = (batch.targets != IGNORED) & monotonic[layout.sequence_ids()]
    # Of texts without times the weight is exactly 1.
    targets = segment_sum(counted.to(penalty.dtype), layout).clamp(min=1)
    weight = (batch.text.layout.cu_seqlens.diff() + 1) / targets
    weight = torch.cat([weight, weight.new_zeros(1)])
    return (penalty * weight[layout.sequence_ids()]).where(counted, 0.0)
