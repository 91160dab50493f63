"""Refuses recordings of lhotse whose audio is the output of a program, or comes from a network.

lhotse runs a source of type ``command`` in a shell when the audio is read; of type ``url`` it runs
what begins with ``pipe:``, and opens connections. For ``.sph`` and, in older versions, ``.opus`` it
starts a program in a shell with the name of the file; one such file alone is read without lhotse.
"""

from __future__ import annotations

import re
from typing import Any

from effasr.data.audio.cut_sources import recordings

_TYPES = ("file", "memory", "shar")
_SUSPECT = re.compile(r"command|url|sph|opus|\\u", re.IGNORECASE)
"""A line without these, and so most lines, needs no closer look."""

_IN_A_SHELL = (".sph", ".opus")


def refuse_programs(row: dict[str, Any], line: str, origin: str) -> None:
    """Check the audio sources of a cut or recording, those inside its transforms included.

    Args:
        row: The parsed line.
        line: The line itself.
        origin: File and line, for messages.

    Raises:
        ValueError: Reading the audio would run a program or open a connection.
    """
    if not _SUSPECT.search(line):
        return
    # lhotse reads what is not the recording of a simple cut, such as the tracks of a mixed one.
    of_cut = row if "sources" in row else row.get("recording")
    for recording in recordings(row):
        sources = recording["sources"]
        alone = recording is of_cut and len(sources) == 1 and not recording.get("transforms")
        for source in sources:
            _check(source, alone, origin)


def _check(source: Any, alone: bool, origin: str) -> None:
    kind = source.get("type") if isinstance(source, dict) else source
    if kind not in _TYPES:
        raise ValueError(
            f"{origin}: an audio source must be of type {', '.join(_TYPES)}, but is "
            f"{repr(kind)[:60]}: no program is run and nothing is downloaded; write the audio to "
            "a file, and name that."
        )
    if not alone and str(source.get("source")).lower().endswith(_IN_A_SHELL):
        raise ValueError(
            f"{origin}: a recording of several files, with transforms, or in a mixed cut must not "
            "be of .sph or .opus files, as lhotse reads these with other programs: convert them to "
            "FLAC."
        )
