"""Checks which utterances can be trained on."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from effasr.data.audio.speed_perturbation import duration_at, name_at
from effasr.data.audio.waveform import samples_in
from effasr.data.features.frame_geometry import Framing
from effasr.data.filters.limits import Limits
from effasr.data.manifest.reader import request
from effasr.data.tokenizer import Tokenizer, UnknownLanguageError

if TYPE_CHECKING:
    from lhotse.cut import Cut


class Reason(enum.StrEnum):
    """Why an utterance is left out; `effasr.data.audio.waveform.AudioProblem` has the others."""

    TOO_SHORT = "too_short"
    TOO_LONG = "too_long"
    EMPTY_TEXT = "empty_text"
    UNKNOWN_LANGUAGE = "unknown_language"
    UNKNOWN_TEXT = "unknown_text"
    FRAME_BUDGET = "over_frame_budget"
    TOKEN_BUDGET = "over_token_budget"
    MODEL = "over_model_length"
    CTC_INFEASIBLE = "ctc_infeasible"
    TOKEN_RATE = "token_rate_outlier"
    CHARACTER_RATE = "character_rate_outlier"
    LANGUAGE = "unwanted_language"
    CHARACTERS = "unwanted_characters"
    MESSAGE = "malformed_message"
    ROLES = "wrong_roles"
    CHAT_TEMPLATE = "chat_template"


@dataclass(frozen=True, slots=True)
class Dropped:
    """An utterance that was left out.

    Attributes:
        id: Name of the utterance.
        reason: A `Reason` or an `effasr.data.audio.waveform.AudioProblem`.
        details: Description of the problem, with figures.
        audio: Audio file of the utterance.
        duration: Seconds; None where it could not be found out.
    """

    id: str
    reason: str
    details: str
    audio: str
    duration: float | None = None


class Unfit(ValueError):
    """An utterance cannot be trained on.

    Attributes:
        reason: Why, for counting.
    """

    def __init__(self, reason: Reason, details: str) -> None:
        super().__init__(details)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """Input and target of the decoder for an utterance.

    Attributes:
        prompt: Token ids of the prompt.
        text: Token ids of the text, without the end token.
        monotonic: Whether the text follows the speech in order.
        unknown: Number of ids of ``text`` that stand for what the vocabulary cannot spell.
    """

    prompt: list[int]
    text: list[int]
    monotonic: bool
    unknown: int


UNTRANSCRIBED = TokenizedText([], [], monotonic=True, unknown=0)
"""Of an utterance that is used without a text."""


def tokenize(cut: Cut, tokenizer: Tokenizer) -> TokenizedText:
    """Token ids of a cut's request and text.

    Raises:
        UnknownLanguageError: The tokenizer does not know one of the cut's languages.
    """
    asked = request(cut)
    prompt = tokenizer.prompt(asked)
    text = tokenizer.encode(text_of(cut), asked.target)
    return TokenizedText(prompt, text, asked.monotonic, tokenizer.count_unknown(text))


def text_of(cut: Cut) -> str:
    """Return the transcript or translation of a cut; empty where it has none."""
    return cut.supervisions[0].text or ""


def frames_of(cut: Cut, framing: Framing, speed: float = 1.0) -> int:
    """Encoder frames of a cut."""
    return framing.frames(samples_in(duration_at(cut.duration, speed)))


def check(
    cut: Cut,
    limits: Limits,
    tokenizer: Tokenizer | None = None,
    *,
    speed: float = 1.0,
    tokens: TokenizedText | None = None,
) -> TokenizedText | None:
    """Check a cut by its manifest alone.

    Args:
        cut: Cut with one supervision.
        limits: Limits on the utterance.
        tokenizer: Tokenizer of the checks of language and tokens; None to omit these.
        speed: Speed at which it is trained on.
        tokens: Result of `tokenize`, if known.

    Returns:
        The tokens; None without a tokenizer, `UNTRANSCRIBED` for an utterance that is used without
        a text.

    Raises:
        Unfit: The cut cannot be trained on; the first reason found.
    """
    text, duration = text_of(cut), duration_at(cut.duration, speed)
    check_duration(duration, limits.min_duration, limits.max_duration)
    if limits.text == "ignored" or (limits.text == "optional" and not text):
        _check_wanted(cut, "", limits)
        if limits.text == "optional" and not request(cut).monotonic:
            raise Unfit(Reason.EMPTY_TEXT, "the text is empty, and no teacher translates")
        _check_frames(frames_of(cut, limits.framing, speed), limits)
        return UNTRANSCRIBED
    if not text:
        raise Unfit(Reason.EMPTY_TEXT, "the text is empty")
    _check_wanted(cut, text, limits)
    frames = frames_of(cut, limits.framing, speed)
    _check_frames(frames, limits)
    rate = len(text) / duration
    _check_rate(Reason.CHARACTER_RATE, rate, limits.max_characters_per_second)
    if tokenizer is None:
        return None
    try:
        tokens = tokens or tokenize(cut, tokenizer)
    except UnknownLanguageError as error:
        raise Unfit(Reason.UNKNOWN_LANGUAGE, str(error)) from error
    if not spells_something(tokens, tokenizer):
        raise Unfit(Reason.UNKNOWN_TEXT, f"the vocabulary spells nothing of {text[:60]!r}")
    _check_tokens(tokens, frames, limits)
    _check_rate(Reason.TOKEN_RATE, len(tokens.text) / duration, limits.max_tokens_per_second)
    return tokens


def check_copies(
    cut: Cut, audio: str, limits: Limits, tokenizer: Tokenizer | None = None
) -> tuple[TokenizedText | None, list[int], list[Dropped]]:
    """Check an utterance at each of the speeds of ``limits``.

    Returns:
        The tokens, which all copies share, if there are any; the numbers of the speeds at which
        it can be trained on; and the other copies.
    """
    tokens: TokenizedText | None = None
    fitting: list[int] = []
    dropped: list[Dropped] = []
    for number, speed in enumerate(limits.speed_perturbation):
        try:
            tokens = check(cut, limits, tokenizer, speed=speed, tokens=tokens)
            fitting.append(number)
        except Unfit as error:
            name, seconds = name_at(cut.id, speed), duration_at(cut.duration, speed)
            dropped.append(Dropped(name, error.reason, str(error), audio, seconds))
    return tokens, fitting, dropped


def frames_for_ctc(text: list[int]) -> int:
    """Return the least frames of a CTC path: one per label, one per blank between equal ones."""
    repeats = sum(a == b for a, b in pairwise(text))
    return len(text) + repeats


def rate_outliers(
    rates: np.ndarray,
    durations: np.ndarray,
    deviations: float = 4.0,
    languages: np.ndarray | None = None,
) -> np.ndarray:
    """Return utterances with far more text per second than others of their language and length.

    Such pairs are mostly wrong, and they decide how much memory a batch needs. Utterances of a
    language are grouped by duration, at least a hundred to a group. An outlier's rate lies more
    than ``deviations`` standard deviations over its group's mean, in logarithms, and over one and a
    half times its median.

    Args:
        rates: float (n,), tokens or characters per second, greater than 0.
        durations: float (n,), seconds.
        deviations: Deviations beyond which a value is an outlier.
        languages: int (n,), number of the language of each text; None for one language.

    Returns:
        bool (n,).

    References:
        NeMo's per-duration token rate filter, https://github.com/NVIDIA/NeMo/pull/11738.
    """
    outliers = np.zeros(len(rates), dtype=bool)
    if languages is not None:
        for language in np.unique(languages):
            own = languages == language
            outliers[own] = rate_outliers(rates[own], durations[own], deviations)
        return outliers
    groups = max(1, min(10, len(rates) // 100))
    for group in np.array_split(np.argsort(durations, kind="stable"), groups):
        if not group.size:
            continue
        logs = np.log(rates[group])
        far = logs - logs.mean() > deviations * logs.std()
        outliers[group] = far & (rates[group] > 1.5 * np.median(rates[group]))
    return outliers


def check_duration(duration: float, least: float, most: float) -> None:
    """Raise `Unfit` for a duration that is not within the limits, in seconds."""
    if duration < least:
        raise Unfit(Reason.TOO_SHORT, f"{duration:.3f} s, under `min_duration` {least:g} s")
    if duration > most:
        raise Unfit(Reason.TOO_LONG, f"{duration:.3f} s, over `max_duration` {most:g} s")


def _check_frames(frames: int, limits: Limits) -> None:
    if limits.frame_budget is not None and frames > limits.frame_budget:
        details = f"{frames} encoder frames, over `frame_budget` {limits.frame_budget}"
        raise Unfit(Reason.FRAME_BUDGET, details)
    if limits.max_frames is not None and frames > limits.max_frames:
        raise Unfit(Reason.MODEL, f"{frames} encoder frames, over `max_frames` {limits.max_frames}")


def _check_wanted(cut: Cut, text: str, limits: Limits) -> None:
    if limits.languages:
        asked = request(cut)
        for language in (asked.source, asked.target):
            if language not in limits.languages:
                wanted = ", ".join(limits.languages)
                raise Unfit(Reason.LANGUAGE, f"{language!r} is not among {wanted}")
    if limits.characters is not None:
        other = re.search(f"[^{limits.characters}]", text)
        if other is not None:
            details = f"{other[0]!r} is not among {limits.characters!r} in {text[:60]!r}"
            raise Unfit(Reason.CHARACTERS, details)


def spells_something(tokens: TokenizedText, tokenizer: Tokenizer) -> bool:
    """Return whether any token stands for more than a space or an unknown character."""
    if tokens.text and not tokens.unknown:
        return True
    return any(
        tokenizer.decode([token]).strip()
        for token in tokens.text
        if not tokenizer.count_unknown([token])
    )


def _check_tokens(tokens: TokenizedText, frames: int, limits: Limits) -> None:
    length = len(tokens.text)
    count = len(tokens.prompt) + length
    if limits.token_budget is not None and count > limits.token_budget:
        details = f"{count} tokens, over `token_budget` {limits.token_budget}"
        raise Unfit(Reason.TOKEN_BUDGET, details)
    if limits.max_positions is not None and count > limits.max_positions:
        raise Unfit(Reason.MODEL, f"{count} tokens, over `max_positions` {limits.max_positions}")
    needed = frames_for_ctc(tokens.text)
    if limits.ctc and tokens.monotonic and needed > frames:
        raise Unfit(
            Reason.CTC_INFEASIBLE,
            f"CTC needs {needed} encoder frames for {length} tokens, and there are {frames}",
        )


def _check_rate(reason: Reason, rate: float, limit: float | None) -> None:
    if limit is not None and rate > limit:
        raise Unfit(reason, f"{rate:.1f} per second, over {limit:g}")
