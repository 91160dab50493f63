"""Standard input of ``effasr transcribe -``: names of files, or the audio of one."""

import codecs
import os
import re
import shutil
from pathlib import Path
from typing import IO, BinaryIO

from effasr.transcription.inputs.sources import Source

_HEAD = 4096

# Text has none of these; the header of every audio format has, but for those in `_AUDIO`.
_CONTROLS = re.compile(rb"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f]")
_AUDIO = b"NIST_1A", b"#!AMR"

_UTF_16 = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE


def sources_on_stdin(stream: BinaryIO, copy: IO[bytes]) -> list[Source]:
    """Return the recordings that standard input names, or ``copy``, which gets its audio.

    ``copy`` is an empty file with a name. A list has a name a line, or separated by zero bytes, in
    UTF-8, UTF-16 or the bytes of the file system. Its names are files: a pattern or a folder among
    them is a source with a problem.
    """
    head = stream.read(_HEAD)
    if not head:
        raise ValueError(
            "standard input must have names of recordings or audio, but is empty: name a FILE in "
            "place of -."
        )
    if _is_text(head):
        return [_listed(name) for name in _names(head + stream.read())]
    copy.write(head)
    shutil.copyfileobj(stream, copy)
    copy.flush()
    return [Source("-", "stdin", copy.name)]


def _is_text(head: bytes) -> bool:
    if head.startswith(_AUDIO):
        return False
    return head.startswith(_UTF_16) or _is_utf16(head) or not _CONTROLS.search(head)


def _is_utf16(content: bytes) -> bool:
    """Return whether each second byte is 0, as in UTF-16 of Latin letters without a mark."""
    high = content[1:_HEAD:2]
    return len(high) > 1 and not any(high) and not _CONTROLS.search(content[:_HEAD:2])


def _names(content: bytes) -> list[str]:
    if content.startswith(_UTF_16) or _is_utf16(content):
        text = content.decode("utf-16" if content.startswith(_UTF_16) else "utf-16-le", "replace")
    else:
        text = os.fsdecode(content.removeprefix(codecs.BOM_UTF8))
    lines = text.split("\0" if "\0" in text else "\n")
    return [name for line in lines if (name := line.removesuffix("\r")).strip()]


def _listed(name: str) -> Source:
    problem = None
    if os.path.isdir(name):
        problem = f"{name}: a folder in a list of files: give it as FILE for all in it."
    return Source(name, Path(name).stem or name, name, problem=problem)
