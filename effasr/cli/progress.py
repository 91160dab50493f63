"""Progress of a command on standard error: a line that changes on a terminal, else now and then."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from effasr.transcription.results import Result

ERASE = "\r\x1b[K"
"""Moves to the beginning of the line and erases it."""
_REFRESH_S = 0.1
_IO = Path("/proc/self/io")
_MEGABYTE = 10**6
_TICK_S = 1.0
_PATIENCE_S = 2.0
"""Shorter work shows nothing; a rate or a time left is shown from here on."""
_LINE_S = 30.0
"""Time between two lines where no terminal is attached, and before the first."""


@contextmanager
def progress_counter(unit: str) -> Iterator[Callable[..., None]]:
    """Yield a function of how many are done, of how many, and of how many seconds of audio."""
    wait, started = _REFRESH_S if sys.stderr.isatty() else _LINE_S, time.monotonic()
    due = 0.0 if sys.stderr.isatty() else started + wait

    def show(done: int, total: int | None = None, audio: float | None = None) -> None:
        nonlocal due
        now = time.monotonic()
        if now >= due:
            due = now + wait
            _write(describe(done, total, unit, now - started, audio))

    try:
        yield show
    finally:
        erase_line()


@dataclass
class DecodingProgress:
    """Counts what is decoded, and its audio, and shows rate, RTFx and time left."""

    total: int
    show: Callable[..., None]
    count: int = 0
    audio: float = 0.0  # seconds

    def add_audio(self, seconds: float) -> None:
        self.audio += seconds
        self.show(self.count, self.total, self.audio)

    def done(self) -> None:
        self.count += 1
        self.show(self.count, self.total, self.audio)

    def add(self, result: "Result") -> None:
        """Count an utterance with its audio."""
        from effasr.transcription.results import Transcription

        self.count += 1
        self.add_audio(result.duration if isinstance(result, Transcription) else 0.0)


@contextmanager
def decoding_progress(total: int, unit: str = "utterances") -> Iterator[DecodingProgress]:
    with progress_counter(unit) as show:
        yield DecodingProgress(total, show)


def describe(
    done: int, total: int | None, unit: str, seconds: float, audio: float | None = None
) -> str:
    """Return the progress as text; with rate, RTFx and time left after the first two seconds."""
    text = f"{done:,}{'' if total is None else f'/{total:,}'} {unit}"
    if not done or seconds < _PATIENCE_S:
        return text
    rate = done / seconds
    text += f", {rate:,.0f}/s" if rate >= 10 else f", {rate:.1f}/s"
    if audio is not None:
        text += f", RTFx {audio / seconds:.1f}"
    if total is not None:
        text += f", {clock((total - done) / rate)} left"
    return text


@contextmanager
def reading(*sources: Path) -> Iterator[None]:
    """Show the megabytes read of files or folders, or seconds where the kernel does not count."""
    names = ", ".join(map(str, sources))
    total = sum(map(_size, sources))
    # A file that is mapped to memory counts in the second, where it is not in memory yet.
    with _transfer(f"reading {names}", total, "rchar", "read_bytes"):
        yield


@contextmanager
def writing(target: Path, size: int) -> Iterator[None]:
    """Show the megabytes that were written of ``size`` bytes; see `reading`."""
    with _transfer(f"writing {target}", size, "wchar"):
        yield


@contextmanager
def _transfer(text: str, total: int, *fields: str) -> Iterator[None]:
    begin = _transferred(fields)

    def count() -> tuple[int, int] | None:
        done = min(total, _transferred(fields) - begin) // _MEGABYTE
        return (done, total // _MEGABYTE) if done else None

    with working(text, "MB", count):
        yield


def _transferred(fields: tuple[str, ...]) -> int:
    """Return the largest of these counters of the process, in bytes; 0 without any."""
    with suppress(OSError, ValueError):
        lines = (line.partition(":") for line in _IO.read_text().splitlines())
        return max((int(value) for name, _, value in lines if name in fields), default=0)
    return 0


def _size(path: Path) -> int:
    with suppress(OSError):
        files = path.rglob("*") if path.is_dir() else [path]
        return sum(file.stat().st_size for file in files if file.is_file())
    return 0


@contextmanager
def working(
    text: str, unit: str = "", count: Callable[[], tuple[int, int] | None] | None = None
) -> Iterator[Callable[[int, int], None]]:
    """Show a text and the seconds so far, if the work takes more than two.

    Yields a function of the parts done so far and of all, in ``unit``; ``count`` returns both where
    the work cannot tell, or None.
    """
    parts: tuple[int, int] | None = None

    def show(done: int, total: int) -> None:
        nonlocal parts
        # A single part has no more to show than the time.
        parts = (done, total) if total > 1 else None

    waits = (_PATIENCE_S, _TICK_S) if sys.stderr.isatty() else (_LINE_S, _LINE_S)
    started, ended = time.monotonic(), threading.Event()

    def tick() -> None:
        wait = waits[0]
        while not ended.wait(wait):
            if count is not None and (result := count()) is not None:
                show(*result)
            seconds = time.monotonic() - started
            counted = "" if parts is None else f", {describe(*parts, unit, seconds)}"
            _write(f"{text}, {clock(seconds)}{counted}")
            wait = waits[1]

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield show
    finally:
        ended.set()
        thread.join()
        erase_line()


def _write(text: str) -> None:
    sys.stderr.write(f"\r{text}\x1b[K" if sys.stderr.isatty() else f"{text}\n")
    sys.stderr.flush()


def erase_line() -> None:
    if sys.stderr.isatty():
        sys.stderr.write(ERASE)
        sys.stderr.flush()


def clock(seconds: float) -> str:
    """Return a duration as text: ``12 s``, ``3:05 min`` or ``2:00 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"
