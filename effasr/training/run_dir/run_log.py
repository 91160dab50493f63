"""Output of a run: the files of its directory and the messages for the user."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from effasr import config as configuration
from effasr.data.filters.config import TooManyDropped
from effasr.data.filters.rules import Dropped
from effasr.data.mixture_summary import MixtureSummary
from effasr.distributed.process_group import DistributedContext
from effasr.training.config import TrainConfig
from effasr.training.diagnostics import examples
from effasr.training.diagnostics.monitor import Change
from effasr.training.run_dir.progress import ProgressDisplay, SilentDisplay
from effasr.training.run_dir.run_directory import DROPPED, RunDirectory

if TYPE_CHECKING:
    from effasr.evaluation.result import ScoredUtterance
    from effasr.training.untranscribed.pretraining import LossResult
    from effasr.training.validation import SetResult

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
        self.directory.open(text, step, tensorboard=config.training.tensorboard)
        self._list(dropped)
        settings = config.training
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
        result: SetResult,
        shown: Sequence[ScoredUtterance] = (),
    ) -> None:
        evaluation = result.evaluation
        errors = evaluation.errors
        (rate, value), unit = errors.main_rate, "words"
        if rate == "CER":
            unit = "characters"
        count = getattr(errors, unit)
        self.show(
            f"step {step}: {name}: {rate} {100 * value:.2f} % of {count} {unit}, "
            f"RTFx {evaluation.rtfx:.0f}, {len(evaluation.failures)} failed"
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

    def validation_loss(self, step: int, epoch: int, name: str, result: LossResult) -> None:
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
