"""The objective: a weighted sum of losses, each a mean over the whole global step."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from effasr.checks import check
from effasr.model.losses import Losses

LOSSES = ("loss", "cross_entropy", "ctc", "transducer", "guided", "consistency")
"""Names in metrics.jsonl, and the order in a stacked tensor. The first is the weighted sum."""

_AVERAGE_DECAY = 0.98


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """Weights of the losses, per token: ``(1 - w) ((1 - t) CE + t TRANSDUCER) + w CTC`` + more.

    These are ``g guided + c consistency``.
    The losses of the routers of experts are added with the weights that `ExpertsConfig` gives them.
    The guided-attention penalty helps a decoder to find the alignment, but only once the encoder
    separates sounds: from the first step on it would slow CTC down. It can therefore wait for CTC.

    Attributes:
        label_smoothing: Part of the target's probability spread over the vocabulary.
        ctc_weight: w. Null: 0 without a CTC head, 1 where that is the only output, else 0.3.
        transducer_weight: t, the transducer's part of what CTC leaves. Null: 0 without a
            transducer, 1 without a decoder, 0.5 with both.
        guided_weight: g; 0 leaves the penalty out.
        guided_sigma: Width of the diagonal, as a part of the utterance.
        guided_after_ctc: The penalty is on, for good, once the running average of the CTC loss
            has fallen under this share of the loss that the corpus allows without listening, its
            plateau: see `CTCBaseline`. None: from the first step.
        ctc_weight_before: w until then; None: ``ctc_weight`` all along.
        consistency_weight: c, of the distance of speech from its transcript as the text encoder
            reads it, under the best monotone alignment, before the layers that both share; see
            `best_alignment_loss`. 0 leaves it out.
        consistency_after_ctc: The same for the distance; before, representations may collapse.
    """

    label_smoothing: float = 0.1
    ctc_weight: float | None = None
    transducer_weight: float | None = None
    guided_weight: float = 0.0
    guided_sigma: float = 0.2
    guided_after_ctc: float | None = None
    ctc_weight_before: float | None = None
    consistency_weight: float = 0.0
    consistency_after_ctc: float | None = None

    def __post_init__(self) -> None:
        check(
            0 <= self.label_smoothing < 1, "label_smoothing", "lie in [0, 1)", self.label_smoothing
        )
        for name in ("ctc_weight", "transducer_weight", "ctc_weight_before"):
            value = getattr(self, name)
            check(value is None or 0 <= value <= 1, name, "lie between 0 and 1", value)
        for name in ("guided_weight", "consistency_weight"):
            check(getattr(self, name) >= 0, name, "be at least 0", getattr(self, name))
        check(self.guided_sigma > 0, "guided_sigma", "be positive", self.guided_sigma)
        if self.guided_after_ctc is None and self.ctc_weight_before is not None:
            raise ValueError(
                "`ctc_weight_before` needs `guided_after_ctc`, the CTC loss that ends it."
            )
        for name in ("guided_after_ctc", "consistency_after_ctc"):
            if getattr(self, name) is not None and self.ctc_weight == 0:
                raise ValueError(f"`{name}` needs a `ctc_weight` above 0, but it is 0.")


class Objective:
    """Weighs the losses of a micro-batch as its share of the loss of the global step."""

    def __init__(
        self,
        config: LossConfig,
        device: torch.device,
        masks_after_ctc: float | None = None,
        blind_ctc: float = math.nan,
    ) -> None:
        if config.ctc_weight is None or config.transducer_weight is None:
            raise ValueError(
                "`ctc_weight` and `transducer_weight` must be numbers here: see `resolve_losses`."
            )
        self.config = config
        self._ctc_weight, self._transducer_weight = config.ctc_weight, config.transducer_weight
        # Switches stay on the device, so that the host never waits for them.
        self._ctc_average = torch.full((), torch.nan, device=device)
        self.guided_on = torch.tensor(config.guided_after_ctc is None, device=device)
        # Whether SpecAugment masks: see `SpecAugmentConfig.after_ctc`.
        self.masks_on = torch.tensor(masks_after_ctc is None, device=device)
        self._masks_after_ctc = masks_after_ctc
        # The CTC loss per token at its plateau; NaN where nothing is transcribed.
        self._blind_ctc = blind_ctc
        self.consistency_on = torch.tensor(config.consistency_after_ctc is None, device=device)

    @property
    def guided_sigma(self) -> float | None:
        return self.config.guided_sigma if self.config.guided_weight else None

    def weigh(self, losses: Losses, targets: Tensor) -> dict[str, Tensor]:
        """Return each of `LOSSES` per target, float32 (); only ``loss`` has a gradient.

        ``targets`` (2,) are those of the global step over all ranks, and those of transcriptions.
        """
        all_targets, monotonic_targets = targets.clamp(min=1).float().unbind()
        cross_entropy = losses.cross_entropy / all_targets
        # Losses that the model lacks are one and the same zero: divide it once.
        sums = losses.ctc, losses.transducer, losses.guided, losses.consistency
        quotients = {x: x / monotonic_targets for x in dict.fromkeys(sums)}
        ctc, transducer, guided, consistency = (quotients[x] for x in sums)
        weight: float | Tensor = self._ctc_weight
        if self.config.ctc_weight_before is not None:
            weight = torch.where(self.guided_on, weight, self.config.ctc_weight_before)
        total = cross_entropy
        if share := self._transducer_weight:
            total = (1 - share) * cross_entropy + share * transducer
        # Without a CTC head its loss is a constant zero.
        if isinstance(weight, Tensor) or weight or losses.ctc.requires_grad:
            total = (1 - weight) * total + weight * ctc
        if self.config.guided_weight:
            total = total + torch.where(self.guided_on, self.config.guided_weight, 0.0) * guided
        if self.config.consistency_weight:
            share = torch.where(self.consistency_on, self.config.consistency_weight, 0.0)
            total = total + share * consistency
        if losses.router is not None:
            total = total + losses.router / all_targets
        unweighted = (x.detach() for x in (cross_entropy, *(quotients[x] for x in sums)))
        return dict(zip(LOSSES, (total, *unweighted), strict=True))

    def observe(self, ctc: Tensor, valid: Tensor) -> None:
        """Record the global step's CTC loss per token, where ``valid`` (bool ())."""
        switches = (
            (self.guided_on, self.config.guided_after_ctc),
            (self.masks_on, self._masks_after_ctc),
            (self.consistency_on, self.config.consistency_after_ctc),
        )
        if all(threshold is None for _, threshold in switches):
            return
        blended = torch.lerp(ctc, self._ctc_average, _AVERAGE_DECAY)
        updated = torch.where(self._ctc_average.isnan(), ctc, blended)
        # In place, because a CUDA graph reads these addresses.
        self._ctc_average.copy_(torch.where(valid, updated, self._ctc_average))
        for switch, threshold in switches:
            if threshold is not None:
                switch |= self._ctc_average < threshold * self._blind_ctc

    def state_dict(self) -> dict[str, Any]:
        state = {"average": self._ctc_average.clone(), "on": self.guided_on.clone()}
        if self._masks_after_ctc is not None:
            state["masks"] = self.masks_on.clone()
        if self.config.consistency_after_ctc is not None:
            state["consistency"] = self.consistency_on.clone()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ctc_average.copy_(state["average"])
        # With `guided_after_ctc` removed, no step would switch the penalty on any more.
        self.guided_on.copy_(state["on"] | (self.config.guided_after_ctc is None))
        # Without the field, the run masked from the first step on.
        masks = state.get("masks", torch.tensor(True))
        self.masks_on.copy_(masks | (self._masks_after_ctc is None))
        counts = state.get("consistency", torch.tensor(True))
        self.consistency_on.copy_(counts | (self.config.consistency_after_ctc is None))
