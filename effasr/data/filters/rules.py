"""Rules for which utterances can be trained on: each compares a length with a limit."""

import enum
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from effasr.data.audio.audio_file import LOSSY_TOLERANCE
from effasr.data.audio.waveform import duration_at, name_at, samples_in
from effasr.data.features.frame_geometry import Framing
from effasr.data.filters.config import Dropped, Limits
from effasr.data.manifest.cuts import prompt_of
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
    TIMES = "unusable_times"


class RejectedUtterance(ValueError):
    """An utterance cannot be trained on."""

    def __init__(self, reason: Reason, details: str) -> None:
        super().__init__(details)
        self.reason = reason


@dataclass(slots=True)
class Lengths:
    """Lengths of an utterance."""

    seconds: float
    frames: int = 0  # of the encoder
    characters: int = 0
    text: int = 0  # tokens
    prompt: int = 0  # tokens
    ctc_frames: int = 0  # see `frames_for_ctc`
    monotonic: bool = True  # whether the text follows the speech in order

    @property
    def tokens(self) -> int:
        return self.text + self.prompt

    @property
    def characters_per_second(self) -> float:
        return self.characters / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.text / self.seconds


class Rule(NamedTuple):
    reason: Reason
    limit: str  # field of `Limits`; None or False turns the rule off
    is_broken: Callable[[Lengths, Any], bool]
    details: str


DURATION_RULES = (
    Rule(
        Reason.TOO_SHORT,
        "min_duration",
        lambda x, limit: x.seconds < limit,
        "{x.seconds:.3f} s, under `min_duration` {limit:g} s",
    ),
    Rule(
        Reason.TOO_LONG,
        "max_duration",
        lambda x, limit: x.seconds > limit,
        "{x.seconds:.3f} s, over `max_duration` {limit:g} s",
    ),
)
FRAME_RULES = (
    Rule(
        Reason.FRAME_BUDGET,
        "frame_budget",
        lambda x, limit: x.frames > limit,
        "{x.frames} encoder frames, over `frame_budget` {limit}",
    ),
    Rule(
        Reason.MODEL,
        "max_frames",
        lambda x, limit: x.frames > limit,
        "{x.frames} encoder frames, over `max_frames` {limit}",
    ),
    Rule(
        Reason.CHARACTER_RATE,
        "max_characters_per_second",
        lambda x, limit: x.characters_per_second > limit,
        "{x.characters_per_second:.1f} per second, over {limit:g}",
    ),
)
TOKEN_RULES = (
    Rule(
        Reason.TOKEN_BUDGET,
        "token_budget",
        lambda x, limit: x.tokens > limit,
        "{x.tokens} tokens, over `token_budget` {limit}",
    ),
    Rule(
        Reason.MODEL,
        "max_positions",
        lambda x, limit: x.tokens > limit,
        "{x.tokens} tokens, over `max_positions` {limit}",
    ),
    Rule(
        Reason.CTC_INFEASIBLE,
        "ctc",
        lambda x, _: x.monotonic and x.ctc_frames > x.frames,
        "CTC needs {x.ctc_frames} encoder frames for {x.text} tokens, and there are {x.frames}",
    ),
    Rule(
        Reason.TOKEN_RATE,
        "max_tokens_per_second",
        lambda x, limit: x.tokens_per_second > limit,
        "{x.tokens_per_second:.1f} per second, over {limit:g}",
    ),
)


def require(rules: Sequence[Rule], lengths: Lengths, limits: Limits) -> None:
    """Raise `RejectedUtterance` for the first rule that an utterance breaks."""
    for rule in rules:
        limit = getattr(limits, rule.limit)
        if limit is not None and limit is not False and rule.is_broken(lengths, limit):
            raise RejectedUtterance(rule.reason, rule.details.format(x=lengths, limit=limit))


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """Input and target of the decoder for an utterance."""

    prompt: list[int]
    text: list[int]  # without the end token
    monotonic: bool  # whether the text follows the speech in order
    unknown: int  # ids of ``text`` that stand for what the vocabulary cannot spell
    times: tuple[float, ...] = ()  # seconds, of the tokens of times in ``text``, at speed 1


UNTRANSCRIBED = TokenizedText([], [], monotonic=True, unknown=0)
"""Placeholder for an utterance without a transcript."""


def tokenize(cut: "Cut", tokenizer: Tokenizer, limits: Limits | None = None) -> TokenizedText:
    """Return token ids of a cut's prompt and text; raises UnknownLanguageError."""
    prompt = prompt_of(cut)
    ids = tokenizer.prompt(prompt)
    stamps = tokenizer.timestamps if limits is not None and prompt.monotonic else None
    parts = [] if limits is None or stamps is None else _timed_texts(cut, limits)
    if parts and stamps is not None:
        texts = [tokenizer.encode(text, prompt.target) for text, _, _ in parts]
        # Which token of a time it is depends on the speed and on silence, which training draws.
        text = [token for part in texts for token in (stamps.first, *part, stamps.first)]
        times = np.array([ends for _, *ends in parts]).ravel().clip(0, cut.duration)
        ends = tuple(np.maximum.accumulate(times).tolist())
        unknown = tokenizer.count_unknown(text)
        return TokenizedText(stamps.prompt(ids), text, True, unknown, times=ends)
    text = tokenizer.encode(text_of(cut), prompt.target)
    return TokenizedText(ids, text, prompt.monotonic, tokenizer.count_unknown(text))


def _timed_texts(cut: "Cut", limits: Limits) -> list[tuple[str, float, float]]:
    """Return the parts of a text that get times; none of an utterance that is trained without."""
    alignment = cut.supervisions[0].alignment or {}
    by_word = [item for item in alignment.get("word", ()) if item.symbol.strip()]
    items = by_word if limits.timestamps == "words" else alignment.get("segment") or by_word
    drawn = zlib.crc32(cut.id.encode("utf-8", "surrogateescape")) / 2**32
    if limits.timestamps == "none" or not items or drawn >= limits.timestamp_share:
        return []
    times = [(item.start - cut.start, item.end - cut.start) for item in items]
    begin, end = times[0][0], times[-1][1]
    is_within = begin >= -LOSSY_TOLERANCE and end <= cut.duration + LOSSY_TOLERANCE
    if not is_within or times != sorted(times):
        details = f"times from {begin:.2f} to {end:.2f} s must be in order and within the utterance"
        raise RejectedUtterance(Reason.TIMES, details)
    symbols, text = [item.symbol for item in items], text_of(cut)
    if "".join("".join(symbols).split()) != "".join(text.split()):
        # Aligners change words, such as to lower case, but not their number.
        words, counts = iter(text.split()), [len(symbol.split()) for symbol in symbols]
        if sum(counts) != len(text.split()):
            details = f"{sum(counts)} words have times, of a text of {len(text.split())} words"
            raise RejectedUtterance(Reason.TIMES, details)
        symbols = [" ".join(islice(words, count)) for count in counts]
    if limits.timestamps == "segments" and items is by_word:
        return [(text, begin, end)]
    return [(symbol, *ends) for symbol, ends in zip(symbols, times, strict=True)]


def text_of(cut: "Cut") -> str:
    """Return the transcript or translation of a cut; empty where it has none."""
    return cut.supervisions[0].text or ""


def frames_of(cut: "Cut", framing: Framing, speed: float = 1.0) -> int:
    return framing.frames(samples_in(duration_at(cut.duration, speed)))


def check(
    cut: "Cut",
    limits: Limits,
    tokenizer: Tokenizer | None = None,
    *,
    speed: float = 1.0,
    tokens: TokenizedText | None = None,
) -> TokenizedText | None:
    """Check a cut by its manifest alone; raise `RejectedUtterance` for the first rule it breaks.

    Returns the tokens (``tokens``, if given): None without a tokenizer, `UNTRANSCRIBED` for an
    utterance that is used without a text.
    """
    text = text_of(cut)
    lengths = Lengths(duration_at(cut.duration, speed))
    require(DURATION_RULES, lengths, limits)
    lengths.frames = frames_of(cut, limits.framing, speed)
    if limits.text == "ignored" or (limits.text == "optional" and not text):
        _check_content(cut, "", limits)
        if limits.text == "optional" and not prompt_of(cut).monotonic:
            raise RejectedUtterance(Reason.EMPTY_TEXT, EMPTY_TRANSLATION)
        require(FRAME_RULES, lengths, limits)
        return UNTRANSCRIBED
    if not text:
        raise RejectedUtterance(Reason.EMPTY_TEXT, EMPTY_TEXT)
    _check_content(cut, text, limits)
    lengths.characters = len(text)
    require(FRAME_RULES, lengths, limits)
    if tokenizer is None:
        return None
    try:
        tokens = tokens or tokenize(cut, tokenizer, limits)
    except UnknownLanguageError as error:
        raise RejectedUtterance(Reason.UNKNOWN_LANGUAGE, str(error)) from error
    require_spelling(tokens, tokenizer, text)
    spoken, stamps = tokens.text, tokenizer.timestamps
    if tokens.times and stamps is not None:
        spoken, latest = stamps.plain(tokens.text), tokens.times[-1] / speed
        if latest > stamps.last_seconds:
            details = f"a time is {latest:.2f} s, after the last token, {stamps.last_seconds:g} s"
            raise RejectedUtterance(Reason.TIMES, details)
    lengths.text, lengths.prompt = len(spoken), len(tokens.prompt) + len(tokens.times)
    lengths.ctc_frames, lengths.monotonic = frames_for_ctc(spoken), tokens.monotonic
    require(TOKEN_RULES, lengths, limits)
    return tokens


EMPTY_TEXT = "the text is empty"
EMPTY_TRANSLATION = "the text is empty, and no teacher translates"


def check_copies(
    cut: "Cut", audio: str, limits: Limits, tokenizer: Tokenizer | None = None
) -> tuple[TokenizedText | None, list[int], list[Dropped]]:
    """Check an utterance at each of the speeds of ``limits``.

    Returns the tokens, which all copies share; the numbers of the speeds at which it can be trained
    on; and the other copies.
    """
    tokens: TokenizedText | None = None
    usable: list[int] = []
    dropped: list[Dropped] = []
    for number, speed in enumerate(limits.speed_perturbation):
        try:
            tokens = check(cut, limits, tokenizer, speed=speed, tokens=tokens)
            usable.append(number)
        except RejectedUtterance as error:
            name, seconds = name_at(cut.id, speed), duration_at(cut.duration, speed)
            dropped.append(Dropped(name, error.reason, str(error), audio, seconds))
    return tokens, usable, dropped


def frames_for_ctc(text: Sequence[int]) -> int:
    """Return the least frames of a CTC path: one per label, one per blank between equal ones."""
    repeats = sum(a == b for a, b in pairwise(text))
    return len(text) + repeats


def require_spelling(tokens: TokenizedText, tokenizer: Tokenizer, text: str) -> None:
    """Refuse a text of which no token stands for more than a space or an unknown character."""
    if tokens.text and not tokens.unknown:
        return
    if not any(
        tokenizer.decode([token]).strip()
        for token in tokens.text
        if not tokenizer.count_unknown([token])
    ):
        raise RejectedUtterance(
            Reason.UNKNOWN_TEXT, f"the vocabulary spells nothing of {text[:60]!r}"
        )


def _check_content(cut: "Cut", text: str, limits: Limits) -> None:
    if limits.languages:
        prompt = prompt_of(cut)
        for language in (prompt.source, prompt.target):
            if language not in limits.languages:
                details = f"{language!r} is not among {', '.join(limits.languages)}"
                raise RejectedUtterance(Reason.LANGUAGE, details)
    if limits.characters is not None:
        other = re.search(f"[^{limits.characters}]", text)
        if other is not None:
            details = f"{other[0]!r} is not among {limits.characters!r} in {text[:60]!r}"
            raise RejectedUtterance(Reason.CHARACTERS, details)


def rate_outliers(
    rates: np.ndarray,
    durations: np.ndarray,
    deviations: float = 4.0,
    languages: np.ndarray | None = None,
    *,
    both: bool = False,
) -> np.ndarray:
    """Find utterances with far more text per second than others of their language and length.

    Such pairs are mostly wrong, and they decide how much memory a batch needs. Utterances of a
    language are grouped by duration, at least a hundred to a group. An outlier's rate lies more
    than ``deviations`` standard deviations over its group's mean, in logarithms, and over one and a
    half times its median. With ``both``, those with far less text are outliers, too: as many
    deviations under the mean, and under a third of the median, as pauses are no error.

    ``rates`` (n,) are above 0, ``durations`` (n,) in seconds, ``languages`` (n,) numbers of
    languages; bool (n,) is returned.

    References:
        NeMo's per-duration token rate filter, https://github.com/NVIDIA/NeMo/pull/11738.
    """
    outliers = np.zeros(len(rates), dtype=bool)
    if languages is not None:
        for language in np.unique(languages):
            rows = languages == language
            outliers[rows] = rate_outliers(rates[rows], durations[rows], deviations, both=both)
        return outliers
    groups = max(1, min(10, len(rates) // 100))
    for group in np.array_split(np.argsort(durations, kind="stable"), groups):
        if not group.size:
            continue
        logs = np.log(rates[group])
        far = logs - logs.mean() > deviations * logs.std()
        outliers[group] = far & (rates[group] > 1.5 * np.median(rates[group]))
        if both:
            far = logs.mean() - logs > deviations * logs.std()
            outliers[group] |= far & (rates[group] < np.median(rates[group]) / 3)
    return outliers
