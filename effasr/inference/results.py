"""What recognition gives back: a transcript in segments, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from effasr.inference.words import Word


@dataclass(frozen=True, slots=True)
class Segment:
    """The text of one chunk of a recording.

    Attributes:
        start: Seconds from the beginning of the recording.
        end: Likewise.
        text: What was recognised.
        truncated: Whether the decoder was stopped at the longest text allowed: it probably
            repeated itself.
        words: Its words with their times, if they were asked for and could be found.
    """

    start: float
    end: float
    text: str
    truncated: bool = False
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class Transcription:
    """The text of a recording, ``duration`` seconds long, and of its chunks."""

    id: str
    duration: float
    text: str
    segments: tuple[Segment, ...]

    @property
    def truncated(self) -> bool:
        """Whether a chunk was."""
        return any(segment.truncated for segment in self.segments)

    def as_row(self) -> dict[str, Any]:
        """The object of a line of JSON: id, duration, text, segments."""
        segments = [
            {"start": round(s.start, 3), "end": round(s.end, 3), "text": s.text}
            | ({"truncated": True} if s.truncated else {})
            | ({"words": [_word_row(word) for word in s.words]} if s.words else {})
            for s in self.segments
        ]
        return {
            "id": self.id,
            "duration": round(self.duration, 3),
            "text": self.text,
            "segments": segments,
        }


@dataclass(frozen=True, slots=True)
class Failure:
    """A recording that could not be transcribed, and why."""

    id: str
    reason: str

    def as_row(self) -> dict[str, Any]:
        """The object of a line of JSON: id, error."""
        return {"id": self.id, "error": self.reason}


def _word_row(word: Word) -> dict[str, Any]:
    return {"word": word.text, "start": round(word.start, 3), "end": round(word.end, 3)}


Result = Transcription | Failure
