"""A line of a manifest, and the checks of its fields."""

import os
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effasr.data.audio.audio_file import DURATION_TOLERANCE
from effasr.data.manifest.lines import parse_object
from effasr.data.prompt import Prompt, Task
from effasr.untrusted.remote import is_url, local_path

_TASKS: dict[str, Task] = {
    "asr": "transcribe",
    "transcribe": "transcribe",
    "transcription": "transcribe",
    "ast": "translate",
    "s2t_translation": "translate",
    "translate": "translate",
    "translation": "translate",
}
_NUMBER = re.compile(r"-?\d+(\.\d*)?([eE]-?\d+)?")
_YES_NO = {
    "yes": True,
    "true": True,
    "pnc": True,
    "no": False,
    "false": False,
    "nopnc": False,
}


AUDIO = (
    *("audio_filepath", "file_name", "path", "audio", "wav", "audio_path", "audio_file"),
    *("filename", "file", "filepath", "wav_path", "wav_filename", "audio_filename"),
)
TEXT = (
    *("text", "sentence", "transcription", "transcript", "normalized_text", "raw text"),
    *("raw_text", "raw_transcription", "wrd"),
)
START = (
    *("offset", "start", "start_time", "begin", "begin_time", "start_sec", "segment_start"),
    "start_ms",
)
END = ("end", "end_time", "stop", "end_sec", "segment_end", "end_ms")
IDS = ("id", "utt_id", "utterance_id")
SPEAKER = ("speaker", "speaker_id", "client_id")
LANGUAGES = ("lang", "language", "locale", "language_id")
SOURCE_LANG, TARGET_LANG = ("source_lang", "src_lang"), ("target_lang", "tgt_lang")
WORDS, SEGMENTS = ("words", "timestamps_word"), ("segments", "timestamps_segment")
"""Names of fields; the first that a row has is read."""

READ = frozenset(
    (
        *(*AUDIO, *TEXT, *START, *END, *IDS, *SPEAKER, *LANGUAGES, "duration", "channel", "pnc"),
        *(*WORDS, *SEGMENTS, *SOURCE_LANG, *TARGET_LANG, "task", "taskname"),
    )
)


def spaced(text: str) -> str:
    """Return a text with one space between words: tokenizers spell no tab or no-break space."""
    return " ".join(text.split())


def unread(names: Collection[str], text: str) -> set[str]:
    """Return those of a row's fields that have no use, where its text is read from ``text``."""
    return {name for name in names if name not in READ or name in TEXT} - {text, ""}


class RowError(ValueError):
    """A manifest line that cannot be used, with the line, the field and the reason."""

    def __init__(self, row: "ManifestRow", reason: str, field: str | None = None) -> None:
        super().__init__(row, reason, field)  # what unpickling in another process calls it with
        self.path, self.line, self.field, self.reason = row.path, row.line, field, reason
        self._message = f"{row.origin}: {reason}"

    def __str__(self) -> str:
        return self._message


@dataclass(slots=True)
class ManifestRow:
    """The fields of one line; a field that breaks a rule raises `RowError`."""

    values: Mapping[str, Any]
    path: Path  # relative audio paths are relative to its folder
    line: int
    origin: str  # file and line, for messages
    text: str = ""  # the line itself

    @classmethod
    def parse(cls, text: str, path: Path, line: int) -> "ManifestRow":
        origin = f"{path}:{line}"
        return cls(parse_object(text, origin), path, line, origin, text)

    def error(self, reason: str, field: str | None = None) -> RowError:
        return RowError(self, reason, field)

    def string(self, name: str) -> str:
        if name not in self.values:
            raise self.error(f"`{name}` is missing: every line needs it.", name)
        value = self.values[name]
        if not isinstance(value, str):
            raise self.error(f"`{name}` must be a string, but is {value!r}.", name)
        return value

    def optional_string(self, name: str) -> str | None:
        """Return a string that may be missing, null or empty: None then."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.error(f"`{name}` must be a string, but is {value!r}.", name)
        return value or None

    def first(self, names: tuple[str, ...]) -> str:
        """Return the first of these names that the row has a value for, else the first of all."""
        for name in names:
            if self.values.get(name) not in (None, ""):
                return name
        return names[0]

    def name(self, names: tuple[str, ...]) -> str | None:
        """Return an id or a name, which may be a whole number."""
        field = self.first(names)
        value = self.values.get(field)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        return self.optional_string(field)

    def channel(self) -> int | None:
        """Return the channel of the file, from 0; None for all."""
        value = self.values.get("channel")
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if isinstance(value, str) and value.strip():
            value = {"A": 0, "B": 1, "L": 0, "R": 1}.get(value.strip().upper(), value)
            value = int(value) if isinstance(value, str) and value.strip().isdigit() else value
        if value is None or value == "":
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(
                f"`channel` must be a number from 0, A or B, but is {repr(value)[:60]}.", "channel"
            )
        return value

    def span(self) -> tuple[float | None, float | None]:
        """Return offset and duration in seconds, where the row has them; they must agree."""
        start, end, end_field = self._agreed(START), self._agreed(END), self.first(END)
        duration = self.seconds("duration")
        if end is None or (start is None and duration is not None):
            return start, duration
        if start is None:
            raise self.error(f"`{end_field}` needs `offset` or `start` beside it.", end_field)
        if end <= start:
            raise self.error(f"`{end_field}` must be after the start, but is {end:g}.", end_field)
        if duration is not None and abs(end - start - duration) > DURATION_TOLERANCE:
            raise self.error(
                f"`duration` is {duration:g} s, but `{end_field}` is {end - start:g} s after "
                f"`{self.first(START)}`: remove the field that is wrong.",
                "duration",
            )
        return start, end - start if duration is None else duration

    def _agreed(self, names: tuple[str, ...]) -> float | None:
        """Return a time that may be in several fields."""
        field = self.first(names)
        time = self.seconds(field, zero=True)
        for other in names:
            try:
                again = self.seconds(other, zero=True)
            except RowError:  # something else, such as the time of day
                continue
            if time is not None and again is not None and abs(again - time) > DURATION_TOLERANCE:
                raise self.error(
                    f"`{field}` is {time:g} s, but `{other}` {again:g} s: remove the field that is "
                    "wrong.",
                    field,
                )
        return time

    def transcript(self, name: str, *, untranscribed: bool = False) -> str:
        """Return a text, stripped. Null is an empty text, which filters drop."""
        if untranscribed or name in self.values:
            return (self.optional_string(name) or "").strip()
        return self.string(name).strip()

    def seconds(self, name: str, *, zero: bool = False) -> float | None:
        """Return a time that may be missing; ``zero`` allows 0."""
        value: Any = self.values.get(name)
        if value is None or value == "":
            return None
        number = _NUMBER.fullmatch(value.strip()) if isinstance(value, str) else None
        value = value if number is None else float(number[0])
        # A Python int may exceed the range of floats.
        finite = isinstance(value, int | float) and abs(value) <= sys.float_info.max
        if isinstance(value, bool) or not finite:
            value_text = repr(value)[:60]
            raise self.error(f"`{name}` must be a number of seconds, but is {value_text}.", name)
        if value < 0 or (value == 0 and not zero):
            rule = "at least 0" if zero else "greater than 0"
            raise self.error(f"`{name}` must be {rule}, but is {value}.", name)
        return value / 1000 if name.endswith("_ms") else float(value)

    def audio(self, name: str) -> str:
        """Return the absolute path of an audio file."""
        value = self.values.get(name)  # Hugging Face writes an object with the path
        path = value.get("path") if isinstance(value, dict) else None
        path = path if isinstance(path, str) else self.string(name)
        try:
            audio = absolute(path, self.path.parent)
        except ValueError as error:
            raise self.error(str(error), name) from error
        if "shard_id" in self.values and not os.path.lexists(audio):
            raise self.error(
                f"{path!r} is in a tar file, as NeMo's tarred sets have it, but none of its "
                "number, such as audio_0.tar, is beside the manifest.",
                name,
            )
        return audio

    def prompt(self, default: Prompt) -> Prompt:
        """Return languages, task and punctuation, by NeMo's names or others.

        ``source_lang`` is the language spoken; without it ``lang`` is. ``target_lang`` is the
        language of the text; without it ``lang`` is, beside a ``source_lang``. ``task`` or
        ``taskname`` says transcription or translation; without it the languages do. What the line
        does not say is as in ``default``; only a translation has another target than its source.
        """
        lang = self.optional_string(self.first(LANGUAGES))
        spoken = self.optional_string(self.first(SOURCE_LANG))
        target = self.optional_string(self.first(TARGET_LANG)) or (lang if spoken else None)
        name = self.optional_string("task") or self.optional_string("taskname")
        task: Task | None = None
        if name is not None:
            task = _TASKS.get(name.lower())
            if task is None:
                rule = f"must be one of {', '.join(_TASKS)}"
                raise self.error(f"`task` {rule}, but is {name!r}.", "task")
        punctuation = self._punctuation()
        try:
            return default.stating(spoken or lang, target, task, punctuation)
        except ValueError as error:
            raise self.error(str(error)) from error

    def stated(self) -> set[str]:
        """Return the `custom_fields` of a cut that the line itself says, and ``lang``."""
        names = {name for name in ("task", "pnc") if self.values.get(name)}
        lang, spoken, target = (
            self.values.get(self.first(group)) for group in (LANGUAGES, SOURCE_LANG, TARGET_LANG)
        )
        if lang or spoken:
            names.add("lang")
        if self.values.get("pnc") is False:
            names.add("pnc")
        if self.values.get("taskname"):
            names.add("task")
        if target or (lang and spoken):
            names.add("target_lang")
        return names

    def _punctuation(self) -> bool | None:
        value = self.values.get("pnc")
        if value is None or value == "":
            return None
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in _YES_NO:
            return _YES_NO[value.lower()]
        rule = f"must be true, false or one of {', '.join(_YES_NO)}"
        raise self.error(f"`pnc` {rule}, but is {value!r}.", "pnc")


_NOT_PLAIN = re.compile(r"//|/\.?(/|$)")  # path parts that a `Path` would normalise


def absolute(path: str, folder: Path) -> str:
    """Return a path of a manifest in ``folder`` as an absolute path; links stay as they are."""
    if is_url(path):
        return str(local_path(path))
    # A Path costs as much as the rest of a line.
    if path.startswith("/") and not _NOT_PLAIN.search(path):
        return path
    return str((folder / path).absolute())
