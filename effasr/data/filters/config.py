"""Limits and filters of utterances, and the check of how many they drop."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from effasr.checks import check
from effasr.data.features.frame_geometry import FASTCONFORMER, Framing
from effasr.untrusted.display import utf8

Times = Literal["none", "words", "segments"]
"""Times that a decoder learns to write: see `effasr.data.config.DataConfig.timestamps`."""

TextUse = Literal["required", "optional", "ignored"]
"""Use of transcripts: see `effasr.data.config.DataConfig.text`."""

_SLOWEST, _FASTEST = 0.5, 2.0
_MOST_SPEEDS = 8  # upper limit of the setting


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
    text_column: str | None = None  # field of a row that is its text; None for the usual names
    timestamps: Times = "none"
    timestamp_share: float = 0.5

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
            check(value is None or value > 0, name, "be greater than 0", value)
        speeds = self.speed_perturbation
        problem = None
        if not 0 < len(speeds) <= _MOST_SPEEDS:
            problem = f"be one to {_MOST_SPEEDS} numbers, but are {len(speeds)}"
        elif outside := [speed for speed in speeds if not _SLOWEST <= speed <= _FASTEST]:
            problem = f"lie from {_SLOWEST:g} to {_FASTEST:g}, but one is {outside[0]:g}"
        elif len(set(speeds)) < len(speeds):
            problem = f"differ from each other, but are {list(speeds)}"
        if problem:
            raise ValueError(f"`speed_perturbation` must {problem}: [0.9, 1.0, 1.1] is usual.")


_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterConfig:
    """Filters of utterances, in addition to the limits of model and budgets.

    Attributes:
        max_tokens_per_second: Limit of the tokens per second: more is an error of the transcript.
        max_characters_per_second: Limit of the characters per second.
        rate_deviations: Utterances are left out whose tokens per second lie so many standard
            deviations over those of others of their language and length; see
            `effasr.data.filters.rules.rate_outliers`.
            ``effasr prepare`` has done it with 4.
        languages: The only languages wanted, of speech and of text; any by default.
        characters: The only characters wanted in a text, as between the brackets of a regular
            expression: ``a-z '``; any by default.
        max_dropped: The run stops before its first step where a single reason leaves out more
            than this share of the utterances: mostly a wrong path, tokenizer or unit.
        max_unknown: The run stops before its first step where more than this share of the tokens
            are unknown to the tokenizer: mostly that of texts in another form.
    """

    max_tokens_per_second: float | None = None
    max_characters_per_second: float | None = None
    rate_deviations: float | None = None
    languages: tuple[str, ...] = ()
    characters: str | None = None
    max_dropped: float = 0.2
    max_unknown: float = 0.05

    def __post_init__(self) -> None:
        for name in ("max_tokens_per_second", "max_characters_per_second", "rate_deviations"):
            value = getattr(self, name)
            check(value is None or value > 0, name, "be greater than 0", value, "null turns it off")
        rule = "be a share from 0 to 1"
        remedy = "1 allows everything"
        check(0 <= self.max_dropped <= 1, "max_dropped", rule, self.max_dropped, remedy)
        check(0 <= self.max_unknown <= 1, "max_unknown", rule, self.max_unknown, remedy)
        if self.characters is not None:
            try:
                re.compile(f"[^{self.characters}]")
            except re.error as error:
                raise ValueError(
                    "`characters` must be what stands between the brackets of a regular "
                    f'expression, such as "a-z \'", but is {self.characters!r}: {error}.'
                ) from error


@dataclass(frozen=True, slots=True)
class Dropped:
    """An utterance that was left out."""

    id: str
    reason: str  # a `rules.Reason` or an `effasr.data.audio.waveform.AudioProblem`
    details: str
    audio: str
    duration: float | None = None  # seconds; None where it is unknown

    def json_line(self) -> bytes:
        return utf8(json.dumps(asdict(self), ensure_ascii=False) + "\n")


class TooManyDropped(ValueError):
    """A single reason leaves out more of the data than was allowed, or nothing is left."""

    def __init__(self, message: str, dropped: Sequence[Dropped]) -> None:
        super().__init__(message)
        self.dropped = tuple(dropped)


def check_share(dropped: Sequence[Dropped], utterances: int, limit: float) -> None:
    """Check that no single reason leaves out too much."""
    for reason, count in Counter(str(drop.reason) for drop in dropped).most_common(1):
        # Divided as the remedy below is: 0.29 * 100 is less than 29.
        if count / utterances <= limit:
            return
        first = [drop for drop in dropped if str(drop.reason) == reason][:_SHOWN]
        examples = "; ".join(f"{drop.id}: {drop.details}" for drop in first)
        raise TooManyDropped(
            f"{reason} leaves out {count} of {utterances} utterances "
            f"({100 * count / utterances:.1f} %), over the {100 * limit:g} % that "
            f"`data.filters.max_dropped` allows: {examples}. Mend the data or the limit behind "
            f"it, or allow more with data.filters.max_dropped={_allowing(count, utterances)}.",
            dropped,
        )


def _allowing(count: int, utterances: int) -> float:
    """Return the least share, in steps of one percent, that lets them pass."""
    return min(1.0, -(-100 * count // utterances) / 100)
