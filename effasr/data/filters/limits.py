"""Limits of utterances; `effasr.data.filters.rules` checks them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from effasr.data.features.frame_geometry import FASTCONFORMER, Framing

TextUse = Literal["required", "optional", "ignored"]
"""Use of transcripts: see `effasr.data.config.DataConfig.text`."""

_SLOWEST, _FASTEST = 0.5, 2.0
_MOST_SPEEDS = 8
"""Upper limit of the setting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits on utterances.

    Attributes:
        min_duration: Seconds.
        max_duration: Seconds.
        frame_budget: Encoder frames; None for no limit.
        token_budget: Decoder tokens, the prompt included; None for no limit.
        max_frames: Encoder frames that the model can read; None for no limit.
        max_positions: Decoder tokens that the model can write, the prompt included; likewise.
        max_tokens_per_second: None for no fixed limit; see
            `effasr.data.filters.rules.rate_outliers`.
        max_characters_per_second: None for no fixed limit.
        languages: The only ones of speech and text; empty for any.
        characters: The only ones of texts, as between the brackets of a regular expression; None
            for any.
        ctc: Whether a transcription must leave CTC a path through its frames.
        speed_perturbation: Speeds at which it is trained on, each as an utterance of its own.
        framing: Frame geometry of the model.
        text: Whether an utterance needs a text, may lack one, or is used without it.
    """

    min_duration: float = 0.1
    max_duration: float = 40.0
    frame_budget: int | None = None
    token_budget: int | None = None
    max_frames: int | None = None
    max_positions: int | None = None
    max_tokens_per_second: float | None = None
    max_characters_per_second: float | None = None
    languages: tuple[str, ...] = ()
    characters: str | None = None
    ctc: bool = True
    speed_perturbation: tuple[float, ...] = (1.0,)
    framing: Framing = FASTCONFORMER
    text: TextUse = "required"

    def __post_init__(self) -> None:
        if not 0 < self.min_duration <= self.max_duration:
            raise ValueError(
                "`min_duration` must be greater than 0 and at most `max_duration`, but they are "
                f"{self.min_duration} and {self.max_duration}."
            )
        for name in (
            "frame_budget",
            "token_budget",
            "max_frames",
            "max_positions",
            "max_tokens_per_second",
            "max_characters_per_second",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"`{name}` must be greater than 0, but is {value}.")
        _check_speeds(self.speed_perturbation)


def _check_speeds(speeds: tuple[float, ...]) -> None:
    problem = None
    if not 0 < len(speeds) <= _MOST_SPEEDS:
        problem = f"be one to {_MOST_SPEEDS} numbers, but are {len(speeds)}"
    elif outside := [speed for speed in speeds if not _SLOWEST <= speed <= _FASTEST]:
        problem = f"lie from {_SLOWEST:g} to {_FASTEST:g}, but one is {outside[0]:g}"
    elif len(set(speeds)) < len(speeds):
        problem = f"differ from each other, but are {list(speeds)}"
    if problem:
        raise ValueError(f"`speed_perturbation` must {problem}: [0.9, 1.0, 1.1] is usual.")
