"""Reads text pairs without audio: JSON lines with ``source_text``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from effasr.data.manifest.fields import optional_text, prompt_fields, text_field
from effasr.data.manifest.lines import numbered_lines, parse_object
from effasr.data.prompt import Prompt

SOURCE_TEXT = "source_text"
"""The field that makes a line a text-only one."""

SOURCE_NAME = "source"
"""The field that names what a pair comes from, such as the model whose hypotheses it has."""


@dataclass(frozen=True, slots=True)
class TextPair:
    """A text and its translation.

    Attributes:
        id: Name of the pair.
        origin: File and line, for messages.
        source: Text to translate.
        text: The translation.
        prompt: Languages and task.
        source_name: What the pair comes from, if the line names it.
    """

    id: str
    origin: str
    source: str
    text: str
    prompt: Prompt
    source_name: str | None = None


def is_text_only(path: str | Path) -> bool:
    """Return whether a manifest is one of text pairs, judged by its first line.

    Raises:
        ValueError: That line cannot be read.
    """
    path = Path(path)
    if not path.is_file():
        return False
    for number, line in numbered_lines(path):
        row = parse_object(line, f"{path}:{number}")
        return SOURCE_TEXT in row and "audio_filepath" not in row
    return False


def pairs(path: str | Path) -> Iterator[TextPair]:
    """Read a manifest of text pairs.

    Each line has ``source_text``, ``text`` (or ``target_text``), ``source_lang`` and
    ``target_lang``; it may have ``id``, ``pnc`` and ``source``, the name of what it comes from.

    Raises:
        ValueError: A line is malformed; the message names file, line, field and remedy.
    """
    path = Path(path)
    for number, line in numbered_lines(path):
        origin = f"{path}:{number}"
        row = parse_object(line, origin)
        if "audio_filepath" in row:
            raise ValueError(
                f"{origin}: has audio, but the first line of the file has none: put speech and "
                "text pairs in files of their own."
            )
        for name in ("source_lang", "target_lang"):
            text_field(row, name, origin)
        target = "target_text" if "text" not in row and "target_text" in row else "text"
        yield TextPair(
            id=optional_text(row, "id", origin) or f"{path.name}:{number}",
            origin=origin,
            source=text_field(row, SOURCE_TEXT, origin).strip(),
            text=text_field(row, target, origin).strip(),
            prompt=prompt_fields(row, origin, ""),
            source_name=optional_text(row, SOURCE_NAME, origin),
        )
