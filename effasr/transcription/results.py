"""Results of transcription: a transcript in segments, or a failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from effasr.transcription.word_timestamps import Word


@dataclass(frozen=True, slots=True)
class Segment:
    """The text of one chunk of a recording.

    Attributes:
        start: Seconds from the beginning of the recording.
        end: Seconds from the beginning of the recording.
        text: Transcript.
        truncated: Whether the decoder reached its limit: it probably repeated itself.
        words: Words with times, if requested; None if they could not be found.
    """

    start: float
    end: float
    text: str
    truncated: bool = False
    words: tuple[Word, ...] | None = ()

    def as_row(self) -> dict[str, Any]:
        """Return the JSON object: start, end, text; truncated and words if present."""
        row: dict[str, Any] = {
            "start": round(self.start, 3),
            "end": round(self.end, 3),
            "text": self.text,
        }
        if self.truncated:
            row["truncated"] = True
        if self.words is None:
            row["words"] = None
        elif self.words:
            row["words"] = [
                {"word": word.text, "start": round(word.start, 3), "end": round(word.end, 3)}
                for word in self.words
            ]
        return row


@dataclass(frozen=True, slots=True)
class Transcription:
    """The text of a recording, ``duration`` seconds long, and of its chunks."""

    id: str
    duration: float
    text: str
    segments: tuple[Segment, ...]

    @property
    def truncated(self) -> bool:
        """Whether a segment is truncated."""
        return any(segment.truncated for segment in self.segments)

    def as_row(self) -> dict[str, Any]:
        """Return the JSON object: id, duration, text, segments."""
        return {
            "id": self.id,
            "duration": round(self.duration, 3),
            "text": self.text,
            "segments": [segment.as_row() for segment in self.segments],
        }


@dataclass(frozen=True, slots=True)
class Failure:
    """A recording that could not be transcribed, and why."""

    id: str
    reason: str

    def as_row(self) -> dict[str, Any]:
        """Return the JSON object: id, error."""
        return {"id": self.id, "error": self.reason}


Result = Transcription | Failure
