"""Answers of a measured system, and the memory of its process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any, Protocol


class System(Protocol):
    """One system with one task, alone in its process.

    Attributes:
        base_bytes: Memory of the process when everything was imported, and no weight was read.
        version: Version of the package that computes; effasr's is the revision of the row.
    """

    base_bytes: int
    version: str

    def check(self) -> dict[str, Any]:
        """Return the result that is compared before timing: a loss, or the tokens."""
        ...

    def run(self, number: int) -> dict[str, Any]:
        """Do one step or one pass; returns ``seconds``, and ``audio_s`` of the usual one."""
        ...


def resident_bytes() -> int:
    """Memory that this process holds now; 0 where only Linux could tell."""
    return _status("VmRSS")


def high_water_mark() -> int:
    """Return the peak memory of this process since it began."""
    # What getrusage gives counts the process that started this one, on Linux as well.
    if found := _status("VmHWM"):
        return found
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def _status(name: str) -> int:
    """Return bytes of a line of Linux's account of this process; 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
