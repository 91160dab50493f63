"""Progress of a command on standard error, where a terminal is attached."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_ERASE = "\r\x1b[K"
"""Moves to the beginning of the line and erases it."""
_REFRESH_S = 0.1
_PATIENCE_S = 2.0
"""Shorter work shows nothing; a rate or a time left is shown from here on."""


@contextmanager
def progress_counter(unit: str) -> Iterator[Callable[..., None]]:
    """Give a function that shows how many are done, of how many, the rate and the time left.

    Args:
        unit: Counted unit in the plural, such as ``utterances``.

    Yields:
        A function of the number done so far and, if known, of the total.
    """
    shown, due, started = sys.stderr.isatty(), 0.0, time.monotonic()

    def show(done: int, total: int | None = None) -> None:
        nonlocal due
        now = time.monotonic()
        if shown and now >= due:
            due = now + _REFRESH_S
            sys.stderr.write(f"\r{describe(done, total, unit, now - started)}\x1b[K")
            sys.stderr.flush()

    try:
        yield show
    finally:
        erase_line()


def describe(done: int, total: int | None, unit: str, seconds: float) -> str:
    """Return the progress as text; with rate and time left after the first two seconds."""
    text = f"{done:,}{'' if total is None else f'/{total:,}'} {unit}"
    if not done or seconds < _PATIENCE_S:
        return text
    rate = done / seconds
    text += f", {rate:,.0f}/s" if rate >= 10 else f", {rate:.1f}/s"
    if total is not None:
        text += f", {clock((total - done) / rate)} left"
    return text


@contextmanager
def working(text: str) -> Iterator[None]:
    """Show a text and the seconds so far, for work whose extent is unknown; after two seconds."""
    if not sys.stderr.isatty():
        yield
        return
    started, ended = time.monotonic(), threading.Event()

    def tick() -> None:
        wait = _PATIENCE_S
        while not ended.wait(wait):
            sys.stderr.write(f"\r{text}, {clock(time.monotonic() - started)}\x1b[K")
            sys.stderr.flush()
            wait = 1.0

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        erase_line()


def erase_line() -> None:
    """Erase what is shown, before another line is written."""
    if sys.stderr.isatty():
        sys.stderr.write(_ERASE)
        sys.stderr.flush()


def clock(seconds: float) -> str:
    """Return a duration as text: ``12 s``, ``3:05 min`` or ``2:00 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"
