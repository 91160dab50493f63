"""Text pairs without audio: JSON lines with ``source_text``."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from effasr.data.manifest.lines import first_fields, numbered_lines
from effasr.data.manifest.row import SOURCE_LANG, TARGET_LANG, ManifestRow, spaced
from effasr.data.prompt import Prompt

SOURCE_TEXT = "source_text"  # the field that makes a line a text-only one


@dataclass(frozen=True, slots=True)
class TextPair:
    """A text and its translation."""

    id: str
    origin: str
    source: str  # the text to translate
    text: str
    prompt: Prompt


def is_text_only(path: str | Path) -> bool:
    """Return whether a manifest is one of text pairs, judged by its first line."""
    fields = first_fields(Path(path))
    return SOURCE_TEXT in fields and "audio_filepath" not in fields


def pairs(path: str | Path) -> Iterator[TextPair]:
    """Read a manifest of text pairs.

    Each line has ``source_text``, ``text`` (or ``target_text``), ``source_lang`` and
    ``target_lang``; it may have ``id`` and ``pnc``.
    """
    path = Path(path)
    for number, line in numbered_lines(path):
        row = ManifestRow.parse(line, path, number)
        if "audio_filepath" in row.values:
            raise row.error(
                "has audio, but the first line of the file has none: put speech and text pairs in "
                "files of their own.",
                "audio_filepath",
            )
        for names in (SOURCE_LANG, TARGET_LANG):
            row.string(row.first(names))
        has_target = "text" not in row.values and "target_text" in row.values
        yield TextPair(
            id=row.optional_string("id") or f"{path.name}:{number}",
            origin=row.origin,
            source=spaced(row.string(SOURCE_TEXT)),
            text=spaced(row.string("target_text" if has_target else "text")),
            prompt=row.prompt(Prompt()),
        )
