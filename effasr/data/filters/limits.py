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
    """Limits on utterances; None is no limit."""

    min_duration: float = 0.1  # seconds
    max_duration: float = 40.0  # seconds
    frame_budget: int | None = None  # encoder frames
    token_budget: int | None = None  # decoder tokens, the prompt included
    max_frames: int | None = None  # encoder frames that the model can read
    max_positions: int | None = None  # decoder tokens that the model can write, the prompt included
    max_tokens_per_second: float | None = None
    max_characters_per_second: float | None = None
    languages: tuple[str, ...] = ()  # of speech and of text; empty for any
    characters: str | None = None  # as between the brackets of a regular expression
    ctc: bool = True  # whether a transcription must leave CTC a path through its frames
    speed_perturbation: tuple[float, ...] = (1.0,)  # each speed makes an utterance of its own
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
