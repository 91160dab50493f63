"""The progress display: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from effasr.training.config import interval_seconds
from effasr.untrusted.display import escape_controls

_LEAST_WIDTH_FOR_BAR = 110  # Columns of a terminal; the bar is left out of a narrower one


class ProgressDisplay:
    """Shows steps, loss, speed, padding, data wait and the time left, on standard error."""

    def __init__(
        self,
        total: int,
        done: int,
        ranks: int,
        console: Console | None = None,
        *,
        validate_every: int | str | None = None,
    ) -> None:
        self._validate_every = validate_every or max(total, 1)
        self.validation_s = 0.0  # Duration of the last validation
        self._console = console or Console(stderr=True)
        self._total = total
        self._ranks = ranks
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            *([] if self._console.width < _LEAST_WIDTH_FOR_BAR else [BarColumn(bar_width=24)]),
            # Of all columns only this one may be folded: steps and time left stay whole.
            TextColumn("{task.fields[state]}", table_column=Column(overflow="fold")),
            TextColumn("ETA"),
            TextColumn("{task.fields[left]}", table_column=Column(no_wrap=True)),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total, completed=done, state="", left="-:--:--")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._bar.stop()

    def advance(self, step: int) -> None:
        self._bar.update(self._task, completed=step)

    def metrics(self, line: Mapping[str, Any]) -> None:
        state = describe(line, self._ranks)
        # With AdaScale a step may count as several; learners share the steps among themselves.
        per_step = line["step_s"] / line.get("gain", 1.0)
        if line.get("plan_steps_per_s"):
            per_step = 1 / line["plan_steps_per_s"]
        steps = max(self._total - line.get("progress", line["step"]), 0)
        left, every = steps * per_step, self._validate_every
        seconds = interval_seconds("validate_every", every)
        count = steps / int(every) if seconds is None else left / seconds
        left += math.ceil(count) * self.validation_s
        self._bar.update(self._task, completed=line["step"], state=state, left=_clock(left))
        if not self._console.is_terminal:
            self.show(f"step {line['step']}/{self._total}  {state}  ETA {_clock(left)}")

    def show(self, text: str) -> None:
        """Show one line above the bar, on a terminal folded between words."""
        whole = not self._console.is_terminal
        self._console.print(escape_controls(text), markup=False, highlight=False, soft_wrap=whole)


class SilentDisplay(ProgressDisplay):
    """A display that shows nothing, for ranks other than 0."""

    def __init__(self) -> None:
        super().__init__(0, 0, 1, Console(quiet=True, force_terminal=False))


def describe(line: Mapping[str, Any], ranks: int) -> str:
    """Return the main figures of a line of metrics.jsonl."""
    seconds = max(line["step_s"], 1e-9)
    loss = "-" if line["loss"] is None else f"{line['loss']:.4f}"
    if line.get("transducer") and line["transducer"] != line["loss"]:
        loss += f" (transducer {line['transducer']:.4f})"
    speed = f"RTFx {line['audio_seconds'] / seconds / ranks:.0f}"
    if ranks > 1:
        speed += " per rank"
    padding = 100 * line["padding_frames"]
    wait = 100 * line["data_wait_s"] / seconds
    mfu = "" if line.get("mfu") is None else f"  MFU {100 * line['mfu']:.1f} %"
    gain = f"  worth {line['progress']:.1f} steps" if "progress" in line else ""
    skipped = f"  {line['skipped']} updates skipped" if line.get("skipped") else ""
    return (
        f"loss {loss}{gain}{skipped}  {speed}{mfu}  padding {padding:.1f} %  data wait {wait:.0f} %"
    )


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
