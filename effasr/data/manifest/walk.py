"""Lists the files of a folder, for training and for transcription alike."""

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

AUDIO_SUFFIXES = tuple(
    f".{name}"
    for name in (
        *("wav", "flac", "ogg", "oga", "opus", "mp3", "aiff", "aif", "aifc", "au", "snd", "caf"),
        *("w64", "rf64", "sph", "m4a", "mp4", "m4b", "aac", "webm", "mkv", "mka", "mov", "avi"),
        *("wma", "amr", "3gp", "ac3", "ts", "mp2", "m4v", "mpg", "mpeg", "mts", "flv", "wv", "ape"),
        *("3g2", "3gpp", "asf", "awb", "divx", "dsf", "dts", "dv", "eac3", "f4v", "gsm", "iff"),
        *("m2a", "m2t", "m2ts", "m4r", "mj2", "mk3d", "mpa", "mpc", "mxf", "nut", "ogm", "ogv"),
        *("oma", "qcp", "qt", "ra", "rm", "rmvb", "shn", "spx", "tak", "tta", "voc", "vob", "wave"),
        *("weba", "wmv", "wtv", "xwma"),
    )
)
"""Suffixes of recordings; those that soundfile cannot read are listed by name, not passed over."""


def walk(folder: str | Path, unreadable: list[OSError]) -> Iterator[str]:
    """Yield the files below a folder, in no fixed order.

    Links to folders are followed, but no folder is entered twice: one that is below ``folder``
    without links has the path without links. Names that begin with a dot are left out.
    ``unreadable`` gets the errors of the folders that cannot be listed.
    """
    entered: set[tuple[int, int]] = set()
    roots = deque([str(folder)])
    while roots:
        for root, folders, files in os.walk(roots.popleft(), onerror=unreadable.append):
            status = os.stat(root)
            if (status.st_dev, status.st_ino) in entered:
                folders.clear()
                continue
            entered.add((status.st_dev, status.st_ino))
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            paths = (os.path.join(root, name) for name in folders)
            roots.extend(path for path in paths if os.path.islink(path))
            yield from (os.path.join(root, name) for name in files if not name.startswith("."))
