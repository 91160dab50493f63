"""A run from its first step to its last, over as many interruptions as it takes."""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from effasr import config as configuration
from effasr import ranges
from effasr.data.filters.config import TooManyDropped
from effasr.data.index.corpus import Corpus
from effasr.data.loader import Loader
from effasr.data.micro_batch_loader import StepBatch
from effasr.distributed.batch_norm import average
from effasr.distributed.process_group import World, joined
from effasr.evaluation.result import Evaluation, merge
from effasr.evaluation.result import save as save_evaluation
from effasr.model.cost import cost_model
from effasr.nn.lora import merged
from effasr.training import build
from effasr.training.async_sgd.sync_point import Pace, form_learners, meet, steps_of
from effasr.training.build import Saved
from effasr.training.calibration.calibrate import settle as settle_budgets
from effasr.training.checkpointing.resume import check_same_plan, check_same_ranks, check_same_run
from effasr.training.checkpointing.run_checkpoints import RunCheckpoints
from effasr.training.checkpointing.state import restore, state_of
from effasr.training.config import LEARNING_APART, TrainConfig
from effasr.training.fault_tolerance.nonfinite_guard import NonFiniteGuard, TrainingFailed
from effasr.training.fault_tolerance.phase_tracker import LOADING, WAITING
from effasr.training.fault_tolerance.stop import StopRequest, listening
from effasr.training.fault_tolerance.watchdog import Watchdog
from effasr.training.metrics import Meter
from effasr.training.mixture_stats import DrawnBlend
from effasr.training.profiler import PROFILE_FOLDER, Capture
from effasr.training.run_dir.progress import ProgressDisplay, SilentDisplay
from effasr.training.run_dir.run_directory import RunDirectory
from effasr.training.run_dir.summary import summarise
from effasr.training.step import StepReport, train_step
from effasr.training.strategies import is_sharded, settle, whole
from effasr.training.validation import Validator, averaged

log = logging.getLogger(__name__)


def run(config: TrainConfig) -> int:
    """Train, or go on training, until the last step or a request to stop.

    Started by torchrun, every process calls it. SIGTERM or SIGINT, to any of them, ends the run
    with a checkpoint: after the step which then begins, when all ranks know of it. The same
    command goes on from there. A second SIGINT interrupts at once.

    Args:
        config: The run.

    Returns:
        The exit code: 0 done or stopped on request, 1 failed, the reason having been shown.

    Raises:
        ValueError: The configuration, the data or a checkpoint cannot be used.
    """
    if config.training.threads is not None:
        torch.set_num_threads(config.training.threads)
    settings = config.training
    apart = settings.strategy in LEARNING_APART
    with (
        joined(settings.device, settings.timeout_s, on_host=apart) as world,
        listening() as stop,
    ):
        if not world.is_main:
            logging.getLogger("effasr").setLevel(logging.ERROR)
        with closing(RunDirectory(Path(config.output) / config.name)) as directory:
            trainer = Trainer(config, world, directory)
            try:
                with trainer.display, trainer.checkpoints:
                    trainer.train(stop)
            except TrainingFailed as error:
                trainer.display.say(f"failed: {error}")
                return 1
    return 0


class Trainer:
    """One process of a run.

    Args:
        config: The run.
        world: The ranks.
        directory: Of the run, which rank 0 locks; whoever made it closes it.

    Raises:
        ValueError: As `run`.
    """

    def __init__(self, config: TrainConfig, world: World, directory: RunDirectory) -> None:
        self.world = world
        self.directory = directory
        # Whoever takes the place of rank 0 knows by it that the lock is that of this start.
        self.start = world.broadcast(uuid.uuid4().hex)
        self.checkpoints = RunCheckpoints(
            self.directory.checkpoints, config.training.keep, background=config.training.async_save
        )
        saved = self._find_checkpoint(restart=config.training.restart)
        self.config = config = build.resolve(config, saved)
        if saved is not None:
            before = configuration.complete(TrainConfig, saved.state["config"])
            for change in check_same_run(before, configuration.to_mapping(config)):
                log.warning("not as in the checkpoint: %s", change)
            check_same_ranks(saved.state, config.data.strategy, world.size)
        self.tokenizer = build.find_tokenizer(config, saved)
        self.config = config = settle_budgets(config, self.tokenizer, world)
        self.corpus = self._load_corpus(saved)
        self.loader = Loader(
            self.corpus,
            config.data,
            seed=config.seed,
            rank=world.rank,
            world_size=world.size,
            pin_memory=world.device.type == "cuda",
            cost=cost_model(config.model, self.tokenizer.vocab_size),
        )
        if saved is not None:
            check_same_plan(saved.state, self.loader.fingerprint)
        self.model = build.build_model(config, self.tokenizer.vocab_size, saved, world.device)
        self.learners = form_learners(config, world)
        own = world if self.learners is None else self.learners.own
        self.trainee = build.build_trainee(config, self.model, own, self.learners)
        if is_sharded(self.trainee):
            self.checkpoints.share(world, config.training.timeout_s)
        self.validator = None
        if config.data.validation:
            self.validator = Validator(config, self.model, self.tokenizer, world)
        self.meter = Meter(world.device, own.size)
        self.pace = Pace()
        self.drawn = DrawnBlend(self.corpus)
        self.left_out: list[dict[str, Any]] = []
        self.guard = NonFiniteGuard(
            self.model,
            self.trainee.autocast,
            config.training.on_nan,
            own,
            # Learners tell rank 0 of theirs when they meet.
            self.directory.skipped if world.is_main else self.left_out.append,
        )
        limits = config.training.timeout_s, config.training.data_timeout_s
        calls = self.loader.reading, self.checkpoints.linger
        self.watchdog = Watchdog(world, self.trainee.activity, *limits, *calls)
        self.capture = Capture(config.training.profile, world, self.directory.path / PROFILE_FOLDER)
        self.has_told_splits = False
        self.unreadable: list[dict[str, Any]] = []
        self.logged = 0
        self.step = 0
        self.epoch = 0
        self.position = (0, 0)
        self.best = math.inf
        self.is_best = False
        self.must_validate = False
        if saved is not None:
            restore(self, saved)
            self.logged = self.step
        self.display = self.open()

    def train(self, stop: StopRequest) -> None:
        """Train until the last step, or until a rank was asked to stop.

        Raises:
            TrainingFailed: A loss or gradient is not finite, and the run is to stop there.
        """
        settings = self.config.training
        for line in summarise(self):
            self.display.say(line)
        if self._is_finished:
            self.display.say(
                f"all {settings.max_steps} steps have been made: training.max_steps allows more"
            )
        elif self.step:
            self.display.say(f"going on from step {self.step} of {settings.max_steps}")
        with closing(self.capture), steps_of(self) as steps, self.watchdog:
            if self.must_validate:
                self._validate()
                self._save()
            while not self._is_finished and not self._is_stopping:
                made = self.step if self.learners is None else self.learners.made
                with self.capture.step(made), ranges.range("step", self.step):
                    together = self._advance(steps, stop)
                if not together:
                    continue
                # A request to stop does not wait for it: it comes first when the run goes on.
                if self.must_validate and not self._is_stopping:
                    self._validate()
                if self.is_best or self._is_stopping or self._is_due(settings.checkpoint_every):
                    self._save()
        self.checkpoints.wait()
        if not self._is_finished:
            self.display.say(f"stopped at step {self.step}; the same command goes on from there")
        else:
            self.display.say(f"done: {self.directory.path}")

    def _load_corpus(self, saved: Saved | None) -> Corpus:
        """The utterances; what a filter took too much of is listed all the same."""
        try:
            return build.load_corpus(self.config, self.tokenizer, saved)
        except TooManyDropped as error:
            if self.world.is_main:
                self.directory.path.mkdir(parents=True, exist_ok=True)
                self.directory.dropped(map(asdict, error.dropped))
            listed = self.directory.path / "dropped.jsonl"
            raise ValueError(f"{error} All are listed in {listed}.") from error

    def _advance(self, steps: Iterator[StepBatch | None], stop: StopRequest) -> bool:
        """Make a step, or let learners meet; whether all ranks are at the same step now."""
        self.checkpoints.check()
        started = time.perf_counter()
        # Learners wait for each other there, too, and say when they load.
        phase = LOADING if self.learners is None else "finding work"
        self.trainee.activity.begin(phase, self.step + 1)
        with ranges.range("data"):
            data = next(steps)
        waited = time.perf_counter() - started
        if data is None:
            self._handle(self.meter.collect(leave=0))
            meet(self)
        elif self.learners is None:
            self._train(
                data, self.step, bool(stop) or self.step + 1 == self.config.training.stop_at
            )
            self.step += 1
            self.epoch, self.position = data.epoch, data.next_position
        else:
            self._train(data, data.number // self.learners.count, bool(stop))
            self.step = self.learners.finish(data.number, stopping=self.meter.stopping)
            self.epoch = data.epoch
        together = data is None or self.learners is None
        self.is_best = False
        self.must_validate = together and self._is_due(self.config.training.validate_every)
        must_log = self._must_log(together)
        left_out = self.meter.collect(leave=0 if must_log else 1)
        self._tell_splits()
        self._handle(left_out)
        if data is not None:
            self.meter.time(time.perf_counter() - started, waited)
        self.display.advance(self.step)
        if must_log:
            self._log(together)
        return together

    def _train(self, data: StepBatch, number: int, stopping: bool) -> None:
        self.trainee.activity.begin(WAITING, batches=data.batches)
        report = train_step(
            self.trainee, data.batches, number, stopping=stopping, places=data.places
        )
        self.unreadable += [{"step": number + 1} | asdict(dropped) for dropped in data.skipped]
        self.meter.add(report)
        self.drawn.add(data)

    def _tell_splits(self) -> None:
        """Say once that memory ran out, for a run that has become slow without a word."""
        if self.meter.oom_splits and not self.has_told_splits:
            self.has_told_splits = True
            log.warning(
                "there was not enough memory for a micro-batch, near step %d: it was computed in "
                "pieces, with the same gradient, but slower (oom_splits in metrics.jsonl counts "
                "how often). `effasr calibrate` finds a data.frame_budget that fits.",
                self.step,
            )

    def _is_due(self, every: int) -> bool:
        return self.step % every == 0 or self._is_finished

    def _must_log(self, together: bool) -> bool:
        every = self.config.training.log_every
        if self.learners is None:
            return self._is_due(every)
        # A learner does not see every step.
        return together or self.step // every > self.logged // every

    @property
    def _is_stopping(self) -> bool:
        return self.meter.stopping if self.learners is None else self.learners.stopped

    @property
    def _is_finished(self) -> bool:
        """Whether the last step was made; with AdaScale, that worth of steps, as far as is known.

        What a step was worth is known when the next one has been made.
        """
        adascale, last = self.trainee.adascale, self.config.training.max_steps
        return self.step >= last or (adascale is not None and adascale.progress >= last)

    def _log(self, together: bool) -> None:
        line = self.meter.line(self.step, self.epoch)
        self.logged = self.step
        if together:
            self._list_unreadable()
        if self.world.is_main:
            apart = self.learners is not None
            line |= self.pace.line(self, together) if apart else self.watchdog.slowest()
            self.directory.metrics(line)
        self.display.metrics(line)

    def _validate(self) -> None:
        """Validate, and note whether no validation before was as good."""
        self.must_validate = False
        if self.validator is None:
            return
        self.trainee.activity.begin("validating")
        settle(self.trainee)
        average(self.trainee.statistics, self.world)
        with ranges.range("validation"), self._weights_to_evaluate(), merged(self.model):
            evaluations = self.validator()
        for name, evaluation in evaluations.items():
            self._record(name, evaluation)
        wer = merge(list(evaluations.values())).wer
        # NaN, where no reference has a word, is never an improvement.
        self.is_best = wer < self.best
        self.best = wer if self.is_best else self.best

    def _record(self, name: str, evaluation: Evaluation) -> None:
        errors = evaluation.errors
        self.display.say(
            f"step {self.step}: {name}: WER {100 * errors.wer:.2f} % of {errors.words} words, "
            f"RTFx {evaluation.rtfx:.0f}, {len(evaluation.failures)} failed"
        )
        if self.world.is_main:
            line = {"step": self.step, "epoch": self.epoch, "set": name}
            self.directory.validation(line | evaluation.summary())
            save_evaluation(evaluation, self.directory.path / "evaluation" / name)

    def _handle(self, left_out: list[StepReport]) -> None:
        """Deal with steps without an update, for which all ranks look at their utterances."""
        if left_out:
            with whole(self.trainee, self.model):
                self.guard.handle(left_out, self.meter.in_a_row)

    @contextmanager
    def _weights_to_evaluate(self) -> Iterator[None]:
        """While in it, the model has the weights to evaluate and publish; all ranks enter it."""
        with averaged(self.trainee.average), whole(self.trainee, self.model):
            yield

    def _list_unreadable(self) -> None:
        """Write what all ranks could not read to unreadable.jsonl."""
        if self.config.data.on_bad_audio == "skip":
            lists = self.world.gather(self.unreadable)
            if self.world.is_main:
                self.directory.unreadable(line for lines in lists for line in lines)
            self.unreadable = []

    def _save(self) -> None:
        self.trainee.activity.begin("saving a checkpoint")
        self._list_unreadable()
        self._handle(self.meter.collect(leave=0))
        settle(self.trainee)
        average(self.trainee.statistics, self.world)
        blends = self.drawn.merge(self.world)
        if not self.world.is_main and not is_sharded(self.trainee):
            return
        with ranges.range("checkpoint"):
            state, tensors = state_of(self)
            staged = self.checkpoints.stage(tensors)
            what, prompt = (self.model, self.tokenizer, state, staged), self.corpus.prompt
            with self._weights_to_evaluate():
                self.checkpoints.save(self.step, *what, prompt, is_best=self.is_best)
        if blends and self.world.is_main:
            rows = [row for blend in blends for row in blend.mapping()]
            self.directory.blend(self.step, rows)

    def _find_checkpoint(self, *, restart: bool) -> Saved | None:
        """The newest checkpoint that is whole; rank 0 decides which."""
        found = None
        if self.world.is_main:
            self.directory.lock(self.start)
            if restart and (aside := self.directory.set_aside()):
                log.warning("what was in %s is now in %s", self.directory.path, aside)
            found = self.checkpoints.newest()
        path = self.world.broadcast(found and found[0])
        if path is None:
            return None
        return Saved(path, found[1] if found else self.checkpoints.read(path))

    def open(self) -> ProgressDisplay:
        """Begin to write the files of the run, and to talk to the user, if this rank is to."""
        if not self.world.is_main:
            return SilentDisplay()
        settings = self.config.training
        text = configuration.dump(self.config)
        self.directory.open(text, self.step, tensorboard=settings.tensorboard)
        self.directory.dropped(map(asdict, self.corpus.dropped))
        return ProgressDisplay(settings.max_steps, self.step, self.meter.ranks)
