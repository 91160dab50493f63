"""Configuration of a teacher."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherConfig:
    """A teacher that labels utterances without text while the model is trained.

    The teacher is the average of the weights (``training.ema_decay``), in evaluation mode. It hears
    the same audio as the model, without SpecAugment and dropout, and writes what its CTC head says
    in each frame. Training continues with these labels as with transcripts, for the CTC loss; an
    attention decoder learns from transcripts alone.

    Attributes:
        after_step: Steps before the first labels; until then utterances without text count nothing.
        min_confidence: Labels below it are not used: exp(log p / n), with the probability p of the
            label over all alignments and its n tokens.

    References:
        Busbridge et al., How to scale your EMA, 2023, https://arxiv.org/abs/2307.13813; Higuchi et
        al., Momentum pseudo-labeling, 2021, https://arxiv.org/abs/2106.08922.
    """

    after_step: int = 0
    min_confidence: float = 0.0

    def __post_init__(self) -> None:
        if self.after_step < 0:
            raise ValueError(f"`after_step` must be at least 0, but is {self.after_step}.")
        if not 0 <= self.min_confidence <= 1:
            raise ValueError(
                f"`min_confidence` must be from 0 to 1, but is {self.min_confidence}: 0 takes "
                "every label."
            )
