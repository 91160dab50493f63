"""Labels of recordings by a model: manifest lines with a confidence, to train another model on.

The folder of labels:

    journal.jsonl       one object for each recording that was transcribed, in that order
    labels.json         the model and the decoding that the journal is of
    manifest.jsonl      the lines to train on
    dropped.jsonl       what was left out, with the reason
    report.json         counts and hours of both

Only the journal is written while the model works. The others follow from it, so that another
threshold needs no new transcription.
"""

import json
import math
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from effasr.data.atomic_files import atomic_file
from effasr.data.audio.audio_file import AudioError, UnknownFormat, open_audio
from effasr.data.manifest.lines import numbered_lines, parse_object
from effasr.data.manifest.prepare import DROPPED_FILE, REPORT_FILE, Share
from effasr.data.prompt import Prompt
from effasr.transcription.inputs.sources import Source
from effasr.transcription.json_files import json_line, one_line, write_json
from effasr.transcription.results import Failure, Result, Transcription
from effasr.untrusted.documents import read_json_object

JOURNAL_FILE, SETTINGS_FILE, MANIFEST_FILE = "journal.jsonl", "labels.json", "manifest.jsonl"

_BLOCK = 1 << 16

# Why a segment, or with the last a recording, has no line in the manifest.
LOW_CONFIDENCE, EMPTY_TEXT, TRUNCATED, FAILED = (
    "low_confidence",
    "empty_text",
    "truncated",
    "failed",
)
NO_TEXT, NOT_SPOKEN, TOO_LONG = "no_text", "not_spoken", "too_long"  # of `effasr segment`


@dataclass(slots=True)
class LabelReport:
    """Numbers of labelled and dropped segments; the same as report.json."""

    min_confidence: float
    recordings: int
    kept: Share
    dropped: Share
    by_reason: dict[str, Share]

    def add(self, duration: float | None, reason: str | None) -> None:
        if reason is None:
            self.kept.add(duration)
            return
        self.dropped.add(duration)
        self.by_reason.setdefault(reason, Share()).add(duration)


class LabelFolder:
    """The labels of recordings, which grow by `add` and are written out by `finish`."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._folder = folder
        self._journal = folder / JOURNAL_FILE
        self._prepare(json.loads(json.dumps(settings)))
        self.done = {row["id"] for row in self._rows()}

    def _prepare(self, settings: dict[str, Any]) -> None:
        folder, path = self._folder, self._folder / SETTINGS_FILE
        if folder.is_dir() and path.is_file():
            before = read_json_object(path)
            for name in settings:
                if before.get(name) != settings[name]:
                    raise ValueError(
                        f"{folder}: `OUT` must hold labels by the same model and decoding, but its "
                        f"`{name}` was {before.get(name)!r} and is {settings[name]!r}: choose "
                        "another folder."
                    )
            self._cut_torn_line()
            return
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(
                f"{folder}: `OUT` must be new, empty or a folder of labels, but is not: choose "
                "another."
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, settings)

    def _cut_torn_line(self) -> None:
        """Remove what a killed process had written of a line."""
        if not os.path.lexists(self._journal):
            return
        if not stat.S_ISREG(self._journal.lstat().st_mode):
            # What it leads to would be written to.
            raise ValueError(
                f"{self._journal} must be a regular file, but is a link, a pipe or a folder: "
                "choose another folder for the labels."
            )
        with self._journal.open("rb+") as file:
            end = file.seek(0, os.SEEK_END)
            while end:
                begin = max(0, end - _BLOCK)
                file.seek(begin)
                newline = file.read(end - begin).rfind(b"\n")
                if newline >= 0:
                    end = begin + newline + 1
                    break
                end = begin
            file.truncate(end)

    def missing(self, sources: Sequence[Source]) -> list[Source]:
        for source in sources:
            try:
                f"{source.id}{Path(source.audio).absolute()}".encode()
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"{one_line(source.id)}: the paths of `AUDIO` must be UTF-8, as manifests are, "
                    "but this one is not: rename the file."
                ) from error
        return [source for source in sources if source.id not in self.done]

    def add(self, source: Source, result: Result, default: Prompt) -> None:
        row: dict[str, Any] = {"id": source.id}
        if isinstance(result, Failure):
            row |= {"audio": source.audio, "problem": result.reason}
        elif result.partial is not None:
            # Training does not read damaged files either.
            row |= {"audio": source.audio, "problem": f"{source.id}: {result.partial}"}
        else:
            row["segments"] = list(
                _segments(
                    source, result, result.prompt if result.language else source.prompt or default
                )
            )
        self.add_row(row)

    def add_row(self, row: dict[str, Any]) -> None:
        """Write a recording with its ``segments``, or with its ``audio`` and a ``problem``."""
        with self._journal.open("ab") as file:
            file.write(json_line(row).encode())
        self.done.add(row["id"])

    def finish(self, min_confidence: float) -> LabelReport:
        """Write manifest, dropped segments and report from the journal."""
        report = LabelReport(min_confidence, 0, Share(), Share(), {})
        # Line by line, because there may be millions; the manifest appears last.
        with atomic_file(self._folder / MANIFEST_FILE) as selected:
            with atomic_file(self._folder / DROPPED_FILE) as dropped:
                for row in self._rows():
                    report.recordings += 1
                    for line, reason in _lines(row, min_confidence):
                        report.add(line["duration"], reason)
                        file = selected if reason is None else dropped
                        file.write(json_line(line).encode())
            for share in (report.kept, report.dropped, *report.by_reason.values()):
                share.hours = round(share.hours, 6)
            write_json(self._folder / REPORT_FILE, asdict(report))
        return report

    def _rows(self) -> Iterator[dict[str, Any]]:
        if self._journal.is_file():
            for number, line in numbered_lines(self._journal):
                origin = f"{self._journal}:{number}"
                row = parse_object(line, origin)
                if not _is_row(row):
                    raise ValueError(
                        f"{origin}: must be a line that this command wrote, but is "
                        f"{line[:60]!r}: remove it, and its recording is transcribed again."
                    )
                yield row


def _is_row(row: dict[str, Any]) -> bool:
    """Return whether a line of the journal has the fields that are read again."""
    if not isinstance(row.get("id"), str):
        return False
    if "problem" in row:
        return isinstance(row["problem"], str) and isinstance(row.get("audio"), str)
    segments = row.get("segments")
    return isinstance(segments, list) and all(map(_is_segment, segments))


def _is_segment(segment: Any) -> bool:
    def is_number(name: str) -> bool:
        value = segment.get(name)
        return type(value) in (int, float) and math.isfinite(value)

    return (
        isinstance(segment, dict)
        and all(isinstance(segment.get(name), str) for name in ("id", "audio_filepath", "text"))
        and is_number("duration")
        and (segment.get("confidence") is None or is_number("confidence"))
        and isinstance(segment.get("truncated"), bool)
    )


def checked(source: Source) -> Source:
    """Return a recording, with a problem if no manifest can name it, before it is transcribed."""
    return source if source.problem is not None else replace(source, problem=_problem(source))


def _problem(source: Source) -> str | None:
    if source.cut is not None or not source.audio:
        return "only lhotse reads this audio: save it with `cuts.save_audios()`."
    try:
        with open_audio(source.audio) as file:
            channels = file.channels
    except UnknownFormat as error:
        # Transcription reads it by ffmpeg.
        return f"{error} Training reads nothing by ffmpeg: convert the file to WAV or FLAC."
    except AudioError:
        # Transcription reports it.
        return None
    if source.channels is not None and len(source.channels) not in (1, channels):
        return (
            f"channels {list(source.channels)} are neither one nor all {channels} of the file: "
            "save them as files of their own."
        )
    return None


def _segments(source: Source, result: Transcription, prompt: Prompt) -> Iterator[dict[str, Any]]:
    for number, segment in enumerate(result.segments):
        name = source.id if len(result.segments) == 1 else f"{source.id}#{number}"
        line: dict[str, Any] = {
            "id": name,
            "audio_filepath": str(Path(source.audio).absolute()),
            "offset": round(source.offset + segment.start, 6),
            "duration": round(segment.end - segment.start, 6),
            "text": segment.text.strip(),
            "source_lang": prompt.source,
            "target_lang": prompt.target,
            "pnc": prompt.punctuation,
            "confidence": segment.confidence,
            "pseudo": True,
            "truncated": segment.truncated,
            **source.fields(),
        }
        yield line


def _lines(row: dict[str, Any], least: float) -> Iterator[tuple[dict[str, Any], str | None]]:
    """Yield the lines that a row of the journal gives, and why each is left out; None if kept."""
    if "problem" in row:
        failed = {"id": row["id"], "reason": FAILED, "details": row["problem"]}
        yield failed | {"audio": row["audio"], "duration": None}, FAILED
    for line in row.get("segments", ()):
        truncated = line.pop("truncated")
        reason = line.pop("reason", None) or _reason(line, least, truncated=truncated)
        yield (line if reason is None else _dropped(line, reason, least)), reason


def _reason(line: dict[str, Any], least: float, *, truncated: bool) -> str | None:
    if truncated:
        return TRUNCATED
    if not line["text"]:
        return EMPTY_TEXT
    return LOW_CONFIDENCE if (line["confidence"] or 0.0) < least else None


def _dropped(line: dict[str, Any], reason: str, least: float) -> dict[str, Any]:
    details = {
        TRUNCATED: "the decoder reached its limit: it probably repeated itself",
        EMPTY_TEXT: "the model heard no text",
        NO_TEXT: "speech of which the transcript has nothing",
        NOT_SPOKEN: "most of the text is not in the recording",
        TOO_LONG: "longer than --max-duration, without a pause at which to cut",
        LOW_CONFIDENCE: f"{line['confidence'] or 0.0:.4f}, under {least:g}",
    }[reason]
    return {
        "id": line["id"],
        "reason": reason,
        "details": details,
        "audio": line["audio_filepath"],
        "duration": line["duration"],
        "text": line["text"],
        "confidence": line["confidence"],
    }
