"""Output of a run: the files of its directory and the messages for the user."""

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from effasr import config as configuration
from effasr.data.filters.config import TooManyDropped
from effasr.data.filters.rules import Dropped
from effasr.data.mixture_summary import MixtureSummary
from effasr.distributed.process_group import DistributedContext
from effasr.training.config import TrainConfig, interval_seconds
from effasr.training.diagnostics import examples
from effasr.training.diagnostics.monitor import Change
from effasr.training.run_dir.run_directory import DROPPED, RunDirectory
from effasr.untrusted.display import escape_controls
from effasr.untrusted.remote import shown

if TYPE_CHECKING:
    from effasr.evaluation.result import ScoredUtterance
    from effasr.training.untranscribed.pretraining import LossResult
    from effasr.training.validation import SetResult


# The progress display: a bar on a terminal, plain lines elsewhere.

_LEAST_WIDTH_FOR_BAR = 110  # Columns of a terminal; the bar is left out of a narrower one
_LINE_S = 30.0  # Between two lines of steps or of a validation, where there is no bar


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
        self.validated_s = 0.0  # Duration of those since the first step
        self._first: tuple[int, float] | None = None  # First step here, which is slow, and its end
        self._due = 0.0
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
        if self._first is None:
            self._first, self.validated_s, self._due = (step, time.monotonic()), 0.0, 0.0
        seconds = self._seconds_a_step(step)
        left = "-:--:--" if seconds is None else self._left(self._total - step, seconds)
        if step < self._total:  # the last one has metrics
            self._say(f"step {step}/{self._total}  ETA {left}")

    def metrics(self, line: Mapping[str, Any]) -> None:
        state = describe(line, self._ranks)
        # With AdaScale a step may count as several; learners share the steps among themselves.
        per_step = (self._seconds_a_step(line["step"]) or line["step_s"]) / line.get("gain", 1.0)
        if line.get("plan_steps_per_s"):
            per_step = 1 / line["plan_steps_per_s"]
        left = self._left(self._total - line.get("progress", line["step"]), per_step)
        self._bar.update(self._task, completed=line["step"], state=state, left=left)
        self._due = 0.0
        self._say(f"step {line['step']}/{self._total}  {state}  ETA {left}")

    def validating(self, name: str, done: int, total: int) -> None:
        text = f"{done}/{total} utterances of {name} are decoded"
        self._bar.update(self._task, state=text)
        self._say(text)

    def _say(self, text: str) -> None:
        """Show a line where there is no bar, if the last is long ago."""
        now = time.monotonic()
        if now >= self._due and not self._console.is_terminal:
            self._due = now + _LINE_S
            self.show(text)

    def _seconds_a_step(self, step: int) -> float | None:
        """Return the mean of the steps here but the first, with checkpoints; None before."""
        if self._first is None or step <= self._first[0]:
            return None
        seconds = time.monotonic() - self._first[1] - self.validated_s
        return seconds / (step - self._first[0])

    def _left(self, steps: float, per_step: float) -> str:
        left, every = max(steps, 0) * per_step, self._validate_every
        seconds = interval_seconds("validate_every", every)
        count = max(steps, 0) / int(every) if seconds is None else left / seconds
        return _clock(left + math.ceil(count) * self.validation_s)

    def show(self, text: str) -> None:
        """Show one line above the bar, on a terminal folded between words."""
        whole = not self._console.is_terminal
        text = escape_controls(shown(text))
        self._console.print(text, markup=False, highlight=False, soft_wrap=whole)


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


log = logging.getLogger(__name__)


class RunLog:
    """Writes the files of a run and reports to the user on rank 0; other ranks keep their lines."""

    def __init__(self, directory: RunDirectory, start: str) -> None:
        self.directory = directory  # Directory of the run
        self._start = start
        self.display: ProgressDisplay = SilentDisplay()  # Progress display
        self.step = 0  # Step of the last line of metrics
        self._is_main = False
        self._skipped: list[dict[str, Any]] = []
        self._unreadable: list[dict[str, Any]] = []
        self._has_warned = False

    def lock(self, *, takeover: bool = False) -> None:
        self.directory.lock(self._start, takeover=takeover)

    def open(
        self, config: TrainConfig, is_main: bool, step: int, ranks: int, dropped: Sequence[Dropped]
    ) -> None:
        """Open the files and the display, if this rank is to write."""
        self.step = step
        self._is_main = is_main
        if not is_main:
            return
        text = configuration.dump(config)
        settings = config.training
        loggers = set(settings.loggers) - set(() if settings.tensorboard else ("tensorboard",))
        self.directory.open(text, step, loggers=sorted(loggers))
        self._list(dropped)
        self.display = ProgressDisplay(
            settings.known_steps, step, ranks, validate_every=settings.validate_every
        )

    def show(self, text: str) -> None:
        self.display.show(text)

    @contextmanager
    def listing_dropped(self, context: DistributedContext) -> Iterator[None]:
        """Write dropped.jsonl if filters drop too much of the corpus in the block."""
        try:
            yield
        except TooManyDropped as error:
            if context.is_main:
                self._list(error.dropped)
            listed = self.directory.path / DROPPED
            raise ValueError(f"{error} All are listed in {listed}.") from error

    def _list(self, dropped: Iterable[Dropped]) -> None:
        self.directory.path.mkdir(parents=True, exist_ok=True)
        self.directory.dropped(map(asdict, dropped))

    def metrics(self, line: dict[str, Any]) -> None:
        self.step = line["step"]
        if self._is_main:
            self.directory.metrics(line)
        self.display.metrics(line)

    def validation(
        self,
        step: int,
        epoch: int,
        name: str,
        result: "SetResult",
        shown: "Sequence[ScoredUtterance]" = (),
    ) -> None:
        evaluation = result.evaluation
        errors, metric, parts = evaluation.errors, evaluation.metric, []
        if metric.name in ("wer", "cer"):
            unit = "characters" if metric.name == "cer" else "words"
            value, count = metric.text(getattr(errors, metric.name)), getattr(errors, unit)
            parts.append(f"{metric.label} {value} of {count} {unit} ({evaluation.normalizer})")
        parts += [
            f"BLEU {score.bleu:.2f} and chrF {score.chrf:.2f} of {score.utterances} {group}"
            for group, score in evaluation.translations.items()
        ]
        self.show(
            f"step {step}: {name}: {', '.join(parts)}, RTFx {evaluation.rtfx:.0f}, "
            f"{len(evaluation.failures)} failed"
        )
        for utterance in shown:
            for text in examples.lines(utterance):
                self.show(text)
        if self._is_main:
            line = {"step": step, "epoch": epoch, "set": name}
            line |= evaluation.summary() | result.probe.summary()
            if shown:
                line["examples"] = [
                    {name: getattr(utterance, name) for name in ("id", "reference", "hypothesis")}
                    for utterance in shown
                ]
            self.directory.validation(line)
            # Imported here, as only a run that validates needs it.
            from effasr.evaluation.result import save

            save(evaluation, self.directory.path / "evaluation" / name)

    def validation_loss(self, step: int, epoch: int, name: str, result: "LossResult") -> None:
        """Write and show the loss on a set, in pretraining on audio alone."""
        text = f"step {step}: {name}: loss {result.loss:.4f} over {result.frames} frames"
        self.show(f"{text}, {result.failed} failed" if result.failed else text)
        if self._is_main:
            line = {"step": step, "epoch": epoch, "set": name}
            line |= {"cross_entropy": result.loss, "frames": result.frames, "failed": result.failed}
            self.directory.validation(line)

    def changes(self, step: int, epoch: int, changes: Iterable[Change]) -> None:
        for change in changes:
            text = f"step {step}: {change}"
            for number, line in enumerate(examples.fold(text, examples.WIDTH - 4)):
                self.show(line if not number else f"    {line}")
            if self._is_main:
                self.directory.warning({"step": step, "epoch": epoch} | change.row(), text)

    def mixture(self, step: int, blends: Sequence[MixtureSummary]) -> None:
        if blends and self._is_main:
            self.directory.blend(step, [row for blend in blends for row in blend.mapping()])

    def skipped(self, line: dict[str, Any]) -> None:
        """Write a line of skipped.jsonl, or keep it until `write_skipped`."""
        if self._is_main:
            self.directory.skipped(line)
        else:
            self._skipped.append(line)

    def write_skipped(self, context: DistributedContext) -> None:
        """Write the lines for skipped.jsonl that the other ranks kept; all ranks call this."""
        gathered = context.all_gather(self._skipped)
        self._skipped = []
        if self._is_main:
            lines = [line for lines in gathered for line in lines]
            for line in sorted(lines, key=lambda line: line["step"]):
                self.directory.skipped(line)

    def unreadable(self, step: int, utterances: Iterable[Dropped]) -> None:
        """Keep lines of unreadable.jsonl until `write_unreadable`."""
        self._unreadable += [{"step": step} | asdict(dropped) for dropped in utterances]

    def write_unreadable(self, context: DistributedContext) -> None:
        """Write the lines for unreadable.jsonl that all ranks kept; all ranks call this."""
        gathered = context.all_gather(self._unreadable)
        self._unreadable = []
        if self._is_main:
            self.directory.unreadable(line for lines in gathered for line in lines)

    def warn_of_splits(self, step: int) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "there was not enough memory for a micro-batch, near step %d: it was computed in "
                "pieces, with the same gradient, but slower (oom_splits in metrics.jsonl counts "
                "how often). `effasr calibrate` finds a data.frame_budget that fits.",
                step,
            )
