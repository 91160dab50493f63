"""Results of transcription: a transcript in segments, or a failure."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from effasr.data.prompt import Prompt
from effasr.decoding.confidence.calibration import ConfidenceCalibration
from effasr.decoding.decoded import Score
from effasr.decoding.hypothesis import ScoreParts
from effasr.transcription.word_timestamps import Word, word_groups


def confidence(scores: Iterable[Score | None]) -> float | None:
    """Return the confidence in transcripts: the geometric mean of the probability of a symbol.

    It is ``exp(log p / n)``, from 0 to 1, with the probability p that the model gives to the text
    (of the attention decoder, or of CTC or the transducer over all alignments), and its n symbols:
    the tokens, with the end token except for CTC. Values of different methods do not compare.
    """
    complete = list(scores)
    if not complete or None in complete:
        return None
    total = sum(score.log_prob for score in complete if score is not None)
    symbols = sum(score.symbols for score in complete if score is not None)
    return math.exp(min(0.0, total / symbols))


@dataclass(frozen=True, slots=True)
class Alternative:
    """One of the texts that a search has found for some audio."""

    text: str  # different tokens may spell the same one
    score: float  # log-probability in nats; see `effasr.decoding.hypothesis.Hypothesis`
    rank: float  # what the list is ordered by, the best first
    lm_score: float | None = None  # log-probability by the language model of a second pass
    parts: ScoreParts | None = None  # what the score is the sum of, if requested

    def as_row(self) -> dict[str, Any]:
        """Return the JSON object: text, score, and lm_score if there is one; null for -inf."""
        row = {"text": self.text, "score": self.score if math.isfinite(self.score) else None}
        return row if self.lm_score is None else row | {"lm_score": self.lm_score}


def joined(lists: Iterable[Sequence[Alternative]], space: str = " ") -> tuple[Alternative, ...]:
    """Return the best alternatives of a recording from those of its chunks.

    Scores and ranks are sums over the chunks, so the result is the best of all combinations; it is
    as long as the longest list, if there are so many combinations.
    """
    of_chunks = list(lists)
    if not of_chunks or not all(of_chunks):
        return ()
    size = max(map(len, of_chunks))
    best = list(of_chunks[0])
    for following in of_chunks[1:]:
        # Both lists are ordered: combination (i, j) has (i + 1) (j + 1) - 1 others before it.
        pairs = [
            Alternative(
                space.join(text for text in (a.text, b.text) if text),
                a.score + b.score,
                a.rank + b.rank,
                None if a.lm_score is None or b.lm_score is None else a.lm_score + b.lm_score,
            )
            for i, a in enumerate(best)
            for b in following[: max(1, size // (i + 1))]
        ]
        best = sorted(pairs, key=lambda alternative: -alternative.rank)[:size]
    return tuple(best)


@dataclass(frozen=True, slots=True)
class WordConfidence:
    """A word, and the confidence in it from 0 to 1: the least of its tokens', then calibrated."""

    text: str
    confidence: float


def word_confidences(
    tokens: Sequence[int],
    confidences: Sequence[float],
    decode: Callable[[list[int]], str],
    *,
    spaces: bool = True,
    calibration: ConfidenceCalibration | None = None,
    cuts: Sequence[int] = (),
) -> tuple[WordConfidence, ...]:
    words = []
    places = [(n, n + 1) for n in range(len(tokens))]
    for group in word_groups(tokens, places, decode, spaces, cuts):
        value = min(confidences[int(group.first) : int(group.last)])
        value = value if calibration is None else calibration(value)
        words += [WordConfidence(text, value) for text in group.texts]
    return tuple(words)


Fallback = Literal["repetition", "low_likelihood", "no_speech"]
"""Why a segment was decoded again by another search, or has no text."""


@dataclass(frozen=True, slots=True)
class Segment:
    start: float  # seconds from the beginning of the recording
    end: float  # seconds from the beginning of the recording
    text: str
    truncated: bool = False  # whether the decoder reached its limit: it probably repeated itself
    words: tuple[Word, ...] | None = ()  # words with times, if requested
    score: Score | None = None  # score of the text, if requested
    # The best texts of the search, this one first, if requested.
    alternatives: tuple[Alternative, ...] = ()
    word_confidences: tuple[WordConfidence, ...] | None = ()  # words with confidences, if requested
    channel: int | None = None  # channel that was transcribed alone, from 0
    fallback: Fallback | None = None  # why the text is not that of the search

    @property
    def mean_word_confidence(self) -> float | None:
        """Confidence in the text as the mean over its words; None without any."""
        values = [word.confidence for word in self.word_confidences or ()]
        return math.fsum(values) / len(values) if values else None

    @property
    def confidence(self) -> float | None:
        return confidence([self.score])

    def later(self, seconds: float) -> Self:
        """Return the segment with times that count from another beginning."""
        words = self.words and tuple(
            replace(word, start=word.start + seconds, end=word.end + seconds) for word in self.words
        )
        return replace(self, start=self.start + seconds, end=self.end + seconds, words=words)

    def as_row(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "start": round(self.start, 3),
            "end": round(self.end, 3),
            "text": self.text,
        }
        if self.channel is not None:
            row["channel"] = self.channel
        if self.truncated:
            row["truncated"] = True
        if self.fallback is not None:
            row["fallback"] = self.fallback
        if self.score is not None:
            row["confidence"] = self.confidence
        if self.alternatives:
            row["alternatives"] = [alternative.as_row() for alternative in self.alternatives]
        if self.word_confidences is None:
            row |= {"mean_word_confidence": None, "word_confidences": None}
        elif self.word_confidences:
            row["mean_word_confidence"] = self.mean_word_confidence
            row["word_confidences"] = [
                {"word": word.text, "confidence": word.confidence} for word in self.word_confidences
            ]
        if self.words is None:
            row["words"] = None
        elif self.words:
            row["words"] = [
                {"word": word.text, "start": round(word.start, 3), "end": round(word.end, 3)}
                for word in self.words
            ]
        return row


INTERRUPTED = "interrupted"
"""Why a transcript is partial that a signal has ended."""


@dataclass(frozen=True, slots=True)
class Transcription:
    """The text of ``duration`` seconds of a recording; ``space`` separates those of chunks."""

    id: str
    duration: float
    text: str
    segments: tuple[Segment, ...]
    space: str = " "
    prompt: Prompt = field(default_factory=Prompt)
    partial: str | None = None  # why it is not that of the whole recording
    channels: tuple[int, ...] = ()  # channels that were transcribed each on its own
    warning: str | None = None  # why the text may be wrong
    vad: str = "loudness"  # name of the voice activity detector
    language: str | None = None  # the language spoken, where it was asked for

    def with_segments(self, segments: Sequence[Segment]) -> Self:
        text = self.space.join(segment.text for segment in segments if segment.text)
        return replace(self, text=text, segments=tuple(segments))

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """The best texts of the recording, if requested; see `joined`."""
        return joined((segment.alternatives for segment in self.segments), self.space)

    @property
    def word_confidences(self) -> tuple[WordConfidence, ...] | None:
        """Words of all segments with confidences; None if a segment lacks them."""
        of_segments = [segment.word_confidences for segment in self.segments]
        if any(words is None for words in of_segments):
            return None
        return tuple(word for words in of_segments for word in words or ())

    @property
    def truncated(self) -> bool:
        return any(segment.truncated for segment in self.segments)

    def as_row(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "id": self.id,
            "duration": round(self.duration, 3),
            "text": self.text,
            "vad": self.vad,
            "segments": [segment.as_row() for segment in self.segments],
        }
        if self.channels:
            row["channels"] = [
                {"channel": channel, "text": self.of_channel(channel).text}
                for channel in self.channels
            ]
        if self.warning is not None:
            row["warning"] = self.warning
        if self.language is not None:
            row["language"] = self.language
        return row if self.partial is None else row | {"partial": self.partial}

    def of_channel(self, channel: int) -> Self:
        return self.with_segments([item for item in self.segments if item.channel == channel])


@dataclass(frozen=True, slots=True)
class Failure:
    id: str
    reason: str

    def as_row(self) -> dict[str, Any]:
        return {"id": self.id, "error": self.reason}


Result = Transcription | Failure
