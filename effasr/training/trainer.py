"""A training run from its first step to its last, with any number of interruptions."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path

import torch

from effasr import ranges
from effasr.data.conversation.corpus import ConversationCorpus
from effasr.data.index.corpus import Corpus
from effasr.data.index.pair_corpus import PairCorpus
from effasr.data.loader import Loader
from effasr.data.micro_batch_loader import StepBatch
from effasr.data.sampling.cost import CostModel
from effasr.data.tokenizer import Tokenizer
from effasr.distributed.failures import TrainingFailed
from effasr.distributed.process_group import DistributedContext, distributed_context
from effasr.evaluation.result import merge
from effasr.model.cost import cost_model, text_cost_model
from effasr.nn.lora import merged
from effasr.training import build
from effasr.training.calibration.calibrate import settle as settle_budgets
from effasr.training.checkpointing.resume import Saved, check_resumable, check_same_plan, identity
from effasr.training.checkpointing.run_checkpoints import TENSORS, RunCheckpoints
from effasr.training.checkpointing.state import OptimizerState, RunProgress, Stateful
from effasr.training.config import ASYNCHRONOUS, TrainConfig
from effasr.training.diagnostics import examples
from effasr.training.diagnostics.build import build_diagnostics
from effasr.training.fault_tolerance.nonfinite_guard import NonFiniteGuard
from effasr.training.fault_tolerance.phase_tracker import WAITING
from effasr.training.fault_tolerance.stop import StopRequest, listening
from effasr.training.fault_tolerance.watchdog import Watchdog
from effasr.training.metrics import TrainingMetrics
from effasr.training.mixture_stats import MixtureStats
from effasr.training.profiler import PROFILE_FOLDER, StepProfiler
from effasr.training.run_dir.run_directory import RunDirectory
from effasr.training.run_dir.run_log import RunLog
from effasr.training.run_dir.summary import describe_alignment, describe_data, describe_model
from effasr.training.starting.corpus import load_corpus
from effasr.training.step import train_step
from effasr.training.strategies.asynchronous import make_strategy
from effasr.training.strategies.parallelism import average_over_ranks, full_weights, is_sharded
from effasr.training.untranscribed.loss_validator import LossResult, LossValidator
from effasr.training.validation import SetResult, Validator

log = logging.getLogger(__name__)


def run(config: TrainConfig) -> int:
    """Train, or continue to train, until the last step or a request to stop.

    Under torchrun, every process calls this. SIGTERM or SIGINT to any of them ends the run with a
    checkpoint, after the step that begins next. The same command continues from there. A second
    SIGINT interrupts at once.

    Returns:
        The exit code: 0 if done or stopped on request, 1 if training failed, with a message.

    Raises:
        ValueError: The configuration, the data or a checkpoint cannot be used.
    """
    settings = config.training
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    on_host = settings.strategy in ASYNCHRONOUS
    with (
        distributed_context(settings.device, settings.timeout_s, on_host=on_host) as context,
        listening() as stop,
    ):
        if not context.is_main:
            logging.getLogger("effasr").setLevel(logging.ERROR)
        with closing(RunDirectory(Path(config.output) / config.name)) as directory:
            trainer = Trainer(config, context, directory)
            try:
                with trainer.log.display, trainer.checkpoints:
                    trainer.train(stop)
            except TrainingFailed as error:
                trainer.log.show(f"failed: {error}")
                return 1
            except OSError:
                # Another training, which a file system without locks does not refuse, removes
                # checkpoints in progress.
                directory.check_lock()
                raise
    return 0


@dataclass(frozen=True, slots=True)
class RunData:
    """Data of a run: tokenizer, utterances, and the loader of its micro-batches."""

    tokenizer: Tokenizer
    corpus: Corpus | ConversationCorpus | PairCorpus
    loader: Loader


def _cost_model(config: TrainConfig, vocab_size: int) -> CostModel:
    """Return the cost of an utterance, or of a pair in a run of text alone."""
    of_text = text_cost_model(config.model, vocab_size) if config.data.text_alone else None
    return of_text or cost_model(config.model, vocab_size)


class Trainer:
    """One process of a run.

    Raises:
        ValueError: See `run`.
    """

    def __init__(
        self, config: TrainConfig, context: DistributedContext, directory: RunDirectory
    ) -> None:
        # All processes of this start of the run share the name in the lock, so that a rank that
        # replaces rank 0 recognizes it.
        self.log = RunLog(directory, context.broadcast(uuid.uuid4().hex))
        self.checkpoints = RunCheckpoints(
            directory.checkpoints, config.training.keep, background=config.training.async_save
        )
        saved = self._find_checkpoint(context, restart=config.training.restart)
        config = build.resolve(config, saved)
        if saved is not None:
            check_resumable(saved, config, context.size)
        tokenizer = build.find_tokenizer(config, saved)
        with self.log.listing_dropped(context):
            self.config = config = settle_budgets(config, tokenizer, context)
            self.data = self._load_data(tokenizer, saved, context)
        self.model = build.build_model(config, tokenizer.vocab_size, saved, context.device)
        self.strategy = make_strategy(config, context)
        group = self.strategy.group
        make_averager = self.strategy.make_averager
        self.state = build.build_train_state(config, self.model, group, make_averager)
        if is_sharded(self.state):
            self.checkpoints.share(context)
        self.validator = self._make_validator()
        self.metrics = TrainingMetrics(context.device, group.size)
        self.mixture_stats = MixtureStats(self.data.corpus)
        self.gauges = build.build_gauges(self.state)
        self.diagnostics = build_diagnostics(config, self.model, self.data.corpus)
        autocast, on_nan = self.state.config.autocast, config.training.on_nan
        self.guard = NonFiniteGuard(self.model, autocast, on_nan, group, self.log.skipped)
        limits = config.training.timeout_s, config.training.data_timeout_s
        calls = self.data.loader.reading, self.checkpoints.linger
        self.watchdog = Watchdog(context, self.state.phases, *limits, *calls)
        folder = directory.path / PROFILE_FOLDER
        self.profiler = StepProfiler(config.training.profile, context, folder)
        self.progress = RunProgress()
        if saved is not None:
            self._restore(saved)
        self._open_log()

    def train(self, stop: StopRequest) -> None:
        """Train until the last step, or until a rank was asked to stop.

        Raises:
            TrainingFailed: A loss or gradient is not finite, and the run is to stop there.
        """
        settings, strategy, progress = self.config.training, self.strategy, self.progress
        self._describe()
        if self._is_finished:
            self.log.show(
                f"all {settings.max_steps} steps have been made: raise training.max_steps for more"
            )
        elif progress.step:
            self.log.show(f"continuing from step {progress.step} of {settings.max_steps}")
        steps_of_rank = strategy.steps(self.data.loader, self.state, progress)
        with closing(self.profiler), steps_of_rank as steps, self.watchdog:
            if progress.must_validate:
                self._validate()
                self._save()
            while not self._is_finished and not strategy.is_stopping:
                made = strategy.steps_made(progress)
                with self.profiler.step(made), ranges.range("step", progress.step):
                    is_sync_point = self._advance(steps, stop)
                if not is_sync_point:
                    continue
                # A request to stop takes precedence; the validation follows when the run continues.
                if progress.must_validate and not strategy.is_stopping:
                    self._validate()
                must_save = self._is_due(settings.checkpoint_every)
                if progress.is_best or strategy.is_stopping or must_save:
                    self._save()
        self.checkpoints.wait()
        if not self._is_finished:
            self.log.show(f"stopped at step {progress.step}; the same command continues from there")
        else:
            self.log.show(f"done: {self.log.directory.path}")

    def _advance(self, steps: Iterator[StepBatch | None], stop: StopRequest) -> bool:
        """Make a step or synchronize; return whether all ranks are at the same step now."""
        self.checkpoints.check()
        strategy, progress, metrics = self.strategy, self.progress, self.metrics
        started = time.perf_counter()
        self.state.phases.begin(strategy.waiting_phase, progress.step + 1)
        with ranges.range("data"):
            data = next(steps)
        waited = time.perf_counter() - started
        if data is None:
            self._synchronize()
        else:
            self._train(data, stop)
        is_sync_point = strategy.is_sync_point(data)
        progress.is_best = False
        progress.must_validate = is_sync_point and self._is_due(self.config.training.validate_every)
        must_log = self._must_log(is_sync_point)
        self._handle_nonfinite(leave=0 if must_log else 1)
        if data is not None:
            metrics.time(time.perf_counter() - started, waited)
        self.log.display.advance(progress.step)
        if must_log:
            line = metrics.line(progress.step, progress.epoch)
            changes = [] if self.diagnostics is None else self.diagnostics.observe(line)
            line |= {} if self.diagnostics is None else self.diagnostics.flags()
            for gauge in self.gauges.values():
                line |= gauge.line()
            if is_sync_point:
                self._write_unreadable()
            if strategy.context.is_main:
                line |= strategy.metrics(progress, self.watchdog, data)
            self.log.metrics(line)
            self.log.changes(progress.step, progress.epoch, changes)
        return is_sync_point

    def _train(self, data: StepBatch, stop: StopRequest) -> None:
        number = self.strategy.step_number(data, self.progress)
        stopping = self.strategy.must_stop(stop, self.progress)
        self.state.phases.begin(WAITING, batches=data.batches)
        report = train_step(self.state, data.batches, number, stopping=stopping, places=data.places)
        self.log.unreadable(number + 1, data.skipped)
        self.metrics.add(report)
        self.mixture_stats.add(data)
        self.strategy.finish(data, self.progress, stopping=self.metrics.stopping)

    def _synchronize(self) -> None:
        """Synchronize ranks that have made different steps."""
        self._handle_nonfinite(leave=0)
        was_main = self.strategy.context.is_main
        if self.strategy.synchronize(self.state, self.progress):
            self.validator = self._make_validator()
            if self.strategy.context.is_main and not was_main:
                self._replace_rank_zero()
        self.log.write_skipped(self.strategy.context)
        self.metrics.merge(self.strategy.context, counts=self.strategy.group.is_main)

    def _replace_rank_zero(self) -> None:
        logging.getLogger("effasr").setLevel(logging.NOTSET)
        self.log.lock(succeeds=True)
        self._open_log()
        self.log.show(
            f"rank 0 is lost: from step {self.progress.step} on, another rank writes the files of "
            "the run"
        )

    def _is_due(self, every: int) -> bool:
        return self.progress.step % every == 0 or self._is_finished

    def _must_log(self, is_sync_point: bool) -> bool:
        every = self.config.training.log_every
        # A rank may skip over step numbers.
        is_due = self.progress.step // every > self.log.step // every or self._is_finished
        return is_due or (is_sync_point and self.strategy.logs_sync_points)

    @property
    def _is_finished(self) -> bool:
        """Return whether the last step was made; with AdaScale, enough reference steps.

        The gain of a step is available after the next one.
        """
        adascale, last = self.state.adascale, self.config.training.max_steps
        return self.progress.step >= last or (adascale is not None and adascale.progress >= last)

    def _handle_nonfinite(self, *, leave: int) -> None:
        """Read the reports but the newest ``leave`` and handle the skipped updates among them."""
        reports = self.metrics.collect(leave=leave)
        if self.metrics.oom_splits:
            self.log.warn_of_splits(self.progress.step)
        if reports:
            # All ranks take part, because each has its own utterances.
            with full_weights(self.state, self.model):
                self.guard.handle(reports, self.metrics.in_a_row)

    def _validate(self) -> None:
        """Validate and record whether the result is the best so far."""
        self.progress.must_validate = False
        if self.validator is None:
            return
        self.state.phases.begin("validating")
        average_over_ranks(self.state, self.strategy.context)
        with ranges.range("validation"), self._published_weights(), merged(self.model):
            results = self.validator()
        if isinstance(self.validator, LossValidator):
            self._record_losses(results)  # type: ignore[arg-type]
        else:
            self._record_transcripts(results)  # type: ignore[arg-type]

    def _record_losses(self, results: dict[str, LossResult]) -> None:
        for name, result in results.items():
            self.log.validation_loss(self.progress.step, self.progress.epoch, name, result)
        total = sum(result.total for result in results.values())
        frames = sum(result.frames for result in results.values())
        self.progress.record_error_rate(LossResult(total, frames).loss)

    def _record_transcripts(self, results: dict[str, SetResult]) -> None:
        evaluations = {name: result.evaluation for name, result in results.items()}
        settings = self.config.training.diagnostics
        step, epoch = self.progress.step, self.progress.epoch
        shown = {} if settings is None else examples.choose(evaluations, settings.examples)
        for name, result in results.items():
            self.log.validation(step, epoch, name, result, shown.get(name, ()))
        if self.diagnostics is not None:
            probe = reduce(add, (result.probe for result in results.values()))
            changes = self.diagnostics.validated(evaluations, probe, epoch)
            self.log.changes(step, epoch, changes)
        self.progress.record_error_rate(merge(list(evaluations.values())).wer)

    @contextmanager
    def _published_weights(self) -> Iterator[None]:
        """Give the model the weights to evaluate and publish; all ranks enter the block."""
        average = self.state.average
        with (
            nullcontext() if average is None else average.in_place(),
            full_weights(self.state, self.model),
        ):
            yield

    def _write_unreadable(self) -> None:
        if self.config.data.on_bad_audio == "skip":
            self.log.write_unreadable(self.strategy.context)

    def _save(self) -> None:
        context = self.strategy.context
        self.state.phases.begin("saving a checkpoint")
        self._write_unreadable()
        self._handle_nonfinite(leave=0)
        average_over_ranks(self.state, context)
        blends = self.mixture_stats.merge(context)
        if not context.is_main and not is_sharded(self.state):
            return
        self.log.directory.check_lock()
        with ranges.range("checkpoint"):
            optimizer, tensors = self._optimizer_state().split()
            state = self._identity() | self.progress.state_dict() | {"optimizer": optimizer}
            for name, component in self._components().items():
                state[name] = None if component is None else component.state_dict()
            staged = self.checkpoints.stage(tensors)
            with self._published_weights():
                self.checkpoints.save(
                    self.progress.step,
                    self.model,
                    self.data.tokenizer,
                    state,
                    staged,
                    self.data.corpus.prompt,
                    is_best=self.progress.is_best,
                )
        self.log.mixture(self.progress.step, blends)

    def _restore(self, saved: Saved) -> None:
        """Continue from a checkpoint; the model has its published weights already."""
        progress, state = self.progress, saved.state
        progress.load_state_dict(state)
        progress.must_validate = progress.must_validate and self.validator is not None
        if progress.is_best and self.strategy.context.is_main:
            # The run may have been killed between writing the checkpoint and marking it.
            self.checkpoints.mark_best(progress.step)
        self._optimizer_state().load(state["optimizer"], saved.path / TENSORS)
        for name, component in self._components().items():
            if component is not None and state.get(name) is not None:
                component.load_state_dict(state[name])
        if self.state.adascale is not None and state.get("adascale") is None:
            self.state.adascale.begin_at(progress.step)

    def _components(self) -> dict[str, Stateful | None]:
        """Return the stateful components by their names in a checkpoint."""
        return {
            "objective": self.state.objective,
            "meter": self.metrics,
            "blend": self.mixture_stats,
            "adascale": self.state.adascale,
            "diagnostics": self.diagnostics,
            "files": self.log.directory,
            **self.gauges,
        }

    def _optimizer_state(self) -> OptimizerState:
        state = self.state
        model = state.model if is_sharded(state) else self.model
        return OptimizerState(state.optimizer, model, has_average=state.average is not None)

    def _identity(self) -> dict:
        epoch, number = self.progress.position
        plan = self.data.loader.fingerprint(epoch) if number else None
        ranks = self.strategy.context.size
        return identity(self.config, self.data.corpus.fingerprint, plan, ranks)

    def _find_checkpoint(self, context: DistributedContext, *, restart: bool) -> Saved | None:
        """Find the newest complete checkpoint, on rank 0."""
        directory, found = self.log.directory, None
        if context.is_main:
            self.log.lock()
            if restart and (aside := directory.restart()):
                log.warning("renamed the earlier run %s to %s", directory.path, aside)
            found = self.checkpoints.newest()
        path = context.broadcast(found and found[0])
        if path is None:
            return None
        return Saved(path, found[1] if found else self.checkpoints.read(path))

    def _load_data(
        self, tokenizer: Tokenizer, saved: Saved | None, context: DistributedContext
    ) -> RunData:
        config = self.config
        corpus = load_corpus(config, tokenizer, saved)
        loader = Loader(
            corpus,
            config.data,
            seed=config.seed,
            rank=context.rank,
            world_size=context.size,
            pin_memory=context.device.type == "cuda",
            cost=_cost_model(config, tokenizer.vocab_size),
        )
        if saved is not None:
            check_same_plan(saved.state, loader.fingerprint)
        return RunData(tokenizer, corpus, loader)

    def _make_validator(self) -> Validator | LossValidator | None:
        if not self.config.data.validation:
            return None
        if self.config.model.best_rq is not None:
            return LossValidator(self.config, self.model, self.strategy.context)
        return Validator(self.config, self.model, self.data.tokenizer, self.strategy.context)

    def _open_log(self) -> None:
        is_main, step = self.strategy.context.is_main, self.progress.step
        dropped = self.data.corpus.dropped
        self.log.open(self.config, is_main, step, self.metrics.ranks, dropped)

    def _describe(self) -> None:
        """Report the data, the model and the ranks."""
        context, corpus = self.strategy.context, self.data.corpus
        self.log.show(
            f"{len(corpus)} utterances, {corpus.seconds / 3600:.2f} h, "
            f"{describe_model(self.model)}, {context.size} x {context.device}"
        )
        dropped = self.log.directory.path / "dropped.jsonl"
        epoch = self.progress.position[0]
        lines = describe_data(corpus, self.data.loader, self.config.data, epoch, dropped)
        fixed = self.config.init_from is not None
        aligned = describe_alignment(
            corpus, self.config.data, self.config.model, self.data.tokenizer, fixed=fixed
        )
        for line in (*self.strategy.describe(), *lines):
            self.log.show(line)
        if context.is_main:
            for line in aligned:
                self.log.show(line)
