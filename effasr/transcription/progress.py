"""Progress bar of a transcription."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

_LEAST_WIDTH_FOR_BAR = 100  # columns of a terminal; the bar is left out of a narrower one


class TranscriptionProgress:
    """A bar on standard error with recordings, audio time and speed; only on a terminal."""

    def __init__(self, total: int) -> None:
        console = Console(stderr=True)
        # Standard output is for results, so rich must not redirect it.
        self._bar = Progress(
            *([] if console.width < _LEAST_WIDTH_FOR_BAR else [BarColumn(bar_width=24)]),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("recordings, {task.fields[audio]} of audio, RTFx {task.fields[rtfx]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("", total=total, audio="0:00:00", rtfx="-")
        self._seconds = 0.0
        self._started = time.monotonic()

    def __enter__(self) -> TranscriptionProgress:
        self._started = time.monotonic()
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def heard(self, seconds: float) -> None:
        self._seconds += seconds
        minutes, second = divmod(int(self._seconds), 60)
        hours, minute = divmod(minutes, 60)
        rtfx = self._seconds / max(1e-9, time.monotonic() - self._started)
        self._bar.update(self._task, audio=f"{hours}:{minute:02}:{second:02}", rtfx=f"{rtfx:.1f}")

    def done(self) -> None:
        self._bar.advance(self._task)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Hide the bar while something else is written to the terminal."""
        if self._bar.disable:
            yield
            return
        self._bar.stop()
        yield
        self._bar.start()
