"""A training run from its first step to its last, with any number of interruptions."""

import gc
import logging
import math
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from effasr import ranges
from effasr.checkpoint import read_description
from effasr.checks import check
from effasr.data.features.config import UNDERSTOOD_WINDOW_S
from effasr.data.loader import StepBatch
from effasr.data.prompt import Prompt
from effasr.data.worker_processes import check_open_files
from effasr.distributed.failures import TrainingFailed
from effasr.distributed.process_group import DistributedContext, distributed_context
from effasr.model.asr import Durations
from effasr.nn.lora import merged
from effasr.nn.parameters import matching
from effasr.training import build, cuda_graph
from effasr.training.checkpointing.resume import Saved, identity
from effasr.training.checkpointing.run_checkpoints import TENSORS, RunCheckpoints
from effasr.training.checkpointing.state import OptimizerState, RunProgress, Stateful
from effasr.training.config import (
    ASYNCHRONOUS,
    INTERVALS,
    LoopConfig,
    TrainConfig,
    interval_seconds,
    run_folder,
)
from effasr.training.diagnostics import examples
from effasr.training.diagnostics.monitor import build_diagnostics, ctc_baseline
from effasr.training.fault_tolerance.nonfinite_guard import NonFiniteGuard, is_finite
from effasr.training.fault_tolerance.phase_tracker import WAITING
from effasr.training.fault_tolerance.stop import StopInterrupt, StopRequest, listening
from effasr.training.fault_tolerance.watchdog import Watchdog
from effasr.training.metrics import MixtureStats, TrainingMetrics
from effasr.training.profiler import PROFILE_FOLDER, StepProfiler
from effasr.training.resolve import Resolved, resolve
from effasr.training.run_dir.remote_run import RemoteRun
from effasr.training.run_dir.run_directory import RunDirectory
from effasr.training.run_dir.run_log import RunLog
from effasr.training.run_dir.summary import describe_alignment, describe_data, describe_model
from effasr.training.step import train_step
from effasr.training.strategies.parallelism import average_over_ranks, full_weights, is_sharded
from effasr.training.weights import source_of_model
from effasr.untrusted.remote import is_url

if TYPE_CHECKING:
    from effasr.training.untranscribed.pretraining import LossResult, LossValidator
    from effasr.training.validation import SetResult, Validator

T = TypeVar("T")

log = logging.getLogger(__name__)


def run(config: TrainConfig) -> int:
    """Train, or continue to train, until the last step or a request to stop.

    Under torchrun, every process calls this. A signal of `stop.SIGNALS` to any of them ends the run
    with a checkpoint, after the step that begins next, or at once in a validation and before the
    first step. The same command continues from there. A second SIGINT interrupts at once. The exit
    code is 0 if done or stopped on request, else 1.
    """
    try:
        return _run(config)
    except StopInterrupt:
        return 0


def _run(config: TrainConfig) -> int:
    settings = config.training
    check_open_files(config.data.workers, config.data.prefetch)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    on_host = settings.strategy in ASYNCHRONOUS
    with (
        distributed_context(settings.device, settings.timeout_s, on_host=on_host) as context,
        listening(settings.max_time_s) as stop,
    ):
        if not context.is_main:
            logging.getLogger("effasr").setLevel(logging.ERROR)
        folder = run_folder(config.output, config.name)
        with closing(RunDirectory(folder)) as directory:
            # All processes of this start of the run share the name in the lock, so that a rank that
            # replaces rank 0 recognizes it.
            start = context.broadcast(uuid.uuid4().hex)
            run_log = RunLog(directory, start)
            if is_url(config.output) and context.is_main:
                url = f"{config.output}/{config.name}"
                directory.remote = RemoteRun(url, folder, settings.keep, start)
            checkpoints = RunCheckpoints(
                directory.checkpoints, settings.keep, background=settings.async_save
            )
            saved = _find_checkpoint(run_log, checkpoints, context, restart=settings.restart)
            try:
                with run_log.listing_dropped(context), stop.interrupting(context):
                    resolved = resolve(config, saved, context)
                    trainer = Trainer(resolved, context, run_log, checkpoints)
            except StopInterrupt:
                log.warning("stopped before a step was made; the same command begins again")
                raise
            try:
                while True:
                    with run_log.display, checkpoints:
                        step = trainer.train(stop)
                    if step is None:
                        break
                    path = checkpoints.path(step)
                    resolved = replace(resolved, saved=Saved(path, checkpoints.read(path)))
                    # There may not be memory for both models; cycles refer to the first.
                    del trainer
                    gc.collect()
                    trainer = Trainer(resolved, context, run_log, checkpoints)
            except TrainingFailed as error:
                run_log.show(f"failed: {error}")
                return 1
            except OSError:
                # Another training, which a file system without locks does not refuse, removes
                # checkpoints in progress.
                directory.check_lock()
                raise
    return 0


def _find_checkpoint(
    run_log: RunLog, checkpoints: RunCheckpoints, context: DistributedContext, *, restart: bool
) -> Saved | None:
    """Lock the run directory, and find the newest complete checkpoint, on rank 0."""
    directory, newest = run_log.directory, None
    if context.is_main:
        run_log.lock()
        # Nothing is renamed before everything was checked: `RunDirectory.open` does it.
        directory.must_restart = restart and directory.begins_anew()
        if directory.remote is not None:
            directory.remote.fetch(must_restart=directory.must_restart)
        newest = None if directory.must_restart else checkpoints.newest()
    path = context.broadcast(newest and newest[0])
    if path is None:
        return None
    return Saved(path, newest[1] if newest else checkpoints.read(path))


class IntervalClock:
    """Tells which of `INTERVALS` that are times are over; the clock of rank 0 decides for all."""

    now = staticmethod(time.monotonic)

    def __init__(self, settings: LoopConfig) -> None:
        values = {name: interval_seconds(name, getattr(settings, name)) for name in INTERVALS}
        self._seconds = {name: value for name, value in values.items() if value is not None}
        self._since: dict[str, float] = dict.fromkeys(INTERVALS, self.now())

    def due(self) -> int:
        """Return the sum of a power of two for each."""
        now = self.now()
        over = (name for name, limit in self._seconds.items() if now - self._since[name] >= limit)
        return sum(1 << INTERVALS.index(name) for name in over)

    def reset(self, name: str) -> None:
        self._since[name] = self.now()


class Trainer:
    """One process of a run."""

    def __init__(
        self,
        resolved: Resolved,
        context: DistributedContext,
        run_log: RunLog,
        checkpoints: RunCheckpoints,
    ) -> None:
        self.resolved, self.log, self.checkpoints = resolved, run_log, checkpoints
        self.config = config = resolved.config
        vocab_size = resolved.tokenizer.vocab_size
        self.model = build.build_model(config, vocab_size, resolved.saved, context.device)
        stamps, classes = resolved.tokenizer.timestamps, self.model.vocab_size
        if config.data.timestamps != "none" and stamps is not None:
            # A Whisper's tokenizer need not list its times; the model may have been cut to it.
            rule = f"be none for a model of {classes} classes, which lacks tokens of times"
            is_complete = stamps.first + stamps.count <= classes
            check(is_complete, "data.timestamps", rule, config.data.timestamps)
        durations = resolved.corpus.durations
        self.model.durations = None if durations is None else Durations(*durations)
        self.strategy = build.build_strategy(config, context)
        group = self.strategy.group
        make_averager, learners = self.strategy.make_averager, self.strategy.learners
        baseline = ctc_baseline(config, resolved.corpus)
        self.state = build.build_train_state(
            config, self.model, group, make_averager, learners, baseline
        )
        if context.rank == 0 and (reason := cuda_graph.missed(config, context.device)):
            log.warning("%s.", reason)
        if is_sharded(self.state):
            checkpoints.share(context)
        self.validate = self._make_validator()
        self.metrics = TrainingMetrics(context.device, group.size)
        self.mixture_stats = MixtureStats(resolved.corpus)
        self.gauges = build.build_gauges(self.state)
        self.diagnostics = build_diagnostics(config, self.model, resolved.corpus, baseline)
        autocast, on_nan = self.state.config.autocast, config.training.on_nan
        settings = self.model, autocast, on_nan, group, run_log.skipped
        is_scaled = self.state.loss_scale is not None
        self.guard = NonFiniteGuard(*settings, is_scaled=is_scaled)
        limits = config.training.timeout_s, config.training.data_timeout_s
        calls = resolved.loader.reading, checkpoints.linger
        self.watchdog = Watchdog(context, self.state.phases, *limits, *calls)
        folder = run_log.directory.path / PROFILE_FOLDER
        self.profiler = StepProfiler(config.training.profile, context, folder)
        self.progress = RunProgress()
        self._clock = IntervalClock(config.training)
        self._stop = StopRequest()
        self._shown_nonfinite = -1  # Last step of finite weights in the last message
        if resolved.saved is not None:
            self._restore(resolved.saved)
        elif self.validate is not None:
            first = config.training.validate_first
            self.progress.must_validate = config.init_from is not None if first == "auto" else first
        self._open_log()

    def train(self, stop: StopRequest) -> int | None:
        """Train until the last step, or until a rank was asked to stop.

        Return the step at which all is trained from now on, from the checkpoint there.
        """
        strategy, progress = self.strategy, self.progress
        self._stop = stop
        self._describe()
        steps = self.config.training.known_steps
        if self._has_no_progress:
            self.log.show(f"{self._patience_line}: raise training.patience for more")
        elif self._is_finished:
            self.log.show(f"all {steps} steps have been made: raise training.max_steps for more")
        elif progress.step:
            self.log.show(f"continuing from step {progress.step} of {steps}")
        steps_of_rank = strategy.steps(self.resolved.loader, self.state, progress)
        with closing(self.profiler), steps_of_rank as steps, self.watchdog:
            if progress.must_validate and self._run_validation():
                self._save()
            while not self._is_finished and not strategy.is_stopping:
                made = strategy.steps_made(progress)
                with self.profiler.step(made), ranges.range("step", progress.step):
                    is_sync_point = self._advance(steps, stop)
                if not is_sync_point:
                    continue
                must_save = self._is_due("checkpoint_every")
                # A request to stop takes precedence; the validation follows when the run continues.
                if progress.must_validate and not strategy.is_stopping:
                    if must_save:
                        # Before what takes long, during which the process may be killed.
                        self._save()
                    if not self._run_validation() and must_save:
                        break
                if progress.is_best or strategy.is_stopping or must_save or self._has_no_progress:
                    self._save()
        self.checkpoints.wait()
        settings, context = self.config.training, self.strategy.context
        if progress.step == settings.freeze_steps and not self._is_finished:
            asked = bool(stop) or progress.step == settings.stop_at
            if not any(context.all_gather(asked)):
                self.log.show(f"step {progress.step}: training.freeze ends")
                return progress.step
        count = self.metrics.skipped
        skipped = f"; {count} updates were skipped, see skipped.jsonl" if count else ""
        if not self._is_finished or progress.must_validate:
            reason = "training.max_time is over: " if stop.is_late else ""
            self.log.show(
                f"{reason}stopped at step {progress.step}; the same command continues from there"
                f"{skipped}"
            )
        else:
            reason = f"{self._patience_line}; " if self._has_no_progress else ""
            path = self.log.directory.path
            self._warn_if_worse(progress)
            self.log.show(f"{reason}done: {path}{skipped}")
            if self.config.model.best_rq is None:
                self.log.show(f"next: effasr evaluate {path} DEV")
        return None

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
        is_due = is_sync_point and self._is_due("validate_every")
        progress.must_validate = is_due and self.validate is not None
        must_log = self._is_due("log_every") or (is_sync_point and self.strategy.logs_sync_points)
        self._handle_nonfinite(keep_pending=0 if must_log else 1)
        if data is not None:
            metrics.time(time.perf_counter() - started, waited)
        self.log.display.advance(progress.step)
        if must_log:
            self._check_weights()
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
            self._clock.reset("log_every")
        return is_sync_point

    def _train(self, data: StepBatch, stop: StopRequest) -> None:
        number = self.strategy.step_number(data, self.progress)
        stopping = self.strategy.must_stop(stop, self.progress)
        self.state.phases.begin(WAITING, batches=data.batches)
        due = self._clock.due() if self.strategy.context.is_main else 0
        report = train_step(
            self.state, data.batches, number, stopping=stopping, due=due, places=data.places
        )
        self.log.unreadable(number + 1, data.skipped)
        self.metrics.add(report)
        self.mixture_stats.add(data)
        self.strategy.finish(data, self.progress, stopping=self.metrics.stopping)

    def _synchronize(self) -> None:
        """Synchronize ranks that have made different steps."""
        self._handle_nonfinite(keep_pending=0)
        was_main = self.strategy.context.is_main
        if self.strategy.synchronize(self.state, self.progress):
            self.validate = self._make_validator()
            if self.strategy.context.is_main and not was_main:
                self._replace_rank_zero()
        self.log.write_skipped(self.strategy.context)
        self.metrics.merge(self.strategy.context, counts=self.strategy.group.is_main)

    def _replace_rank_zero(self) -> None:
        logging.getLogger("effasr").setLevel(logging.NOTSET)
        self.log.lock(takeover=True)
        self._open_log()
        self.log.show(
            f"rank 0 is lost: from step {self.progress.step} on, another rank writes the files of "
            "the run"
        )

    def _is_due(self, name: str) -> bool:
        """Return whether one of `INTERVALS` is over, the same on all ranks."""
        interval = getattr(self.config.training, name)
        if isinstance(interval, str):
            is_due = bool(self.metrics.due & 1 << INTERVALS.index(name))
        elif name == "log_every":
            # A rank may skip over step numbers.
            is_due = self.progress.step // interval > self.log.step // interval
        else:
            is_due = self.progress.step % interval == 0
        return is_due or self._is_finished

    @property
    def _is_finished(self) -> bool:
        """Return whether the last step was made; with AdaScale, enough reference steps.

        The gain of a step is available after the next one.
        """
        is_last = self.progress.step >= self.config.training.known_steps
        return is_last or self.strategy.has_progress(self.state) or self._has_no_progress

    @property
    def _has_no_progress(self) -> bool:
        patience = self.config.training.patience
        return patience is not None and self.progress.validations_since_best >= patience

    @property
    def _patience_line(self) -> str:
        count, best = self.progress.validations_since_best, self.progress.best
        by = self.config.evaluation.best_by if self.validate is None else self.validate.metric.name
        return f"no better {by} than {best:.4g} in {count} validations (training.patience)"

    def _handle_nonfinite(self, *, keep_pending: int) -> None:
        """Read the reports but the newest ``leave`` and handle the skipped updates among them."""
        reports = self.metrics.collect(keep_pending=keep_pending)
        if self.metrics.oom_splits:
            self.log.warn_of_splits(self.progress.step)
        if reports:
            # All ranks take part, because each has its own utterances.
            with full_weights(self.state, self.model):
                self.guard.handle(reports, self.metrics.consecutive_skips)

    def _check_weights(self) -> bool:
        """Return whether this rank's weights are finite; say so at the first that are not."""
        progress, before = self.progress, self.progress.finite_step
        if is_finite(self.state.model):
            progress.finite_step = progress.step
            return True
        if self._shown_nonfinite != before:
            self._shown_nonfinite = before
            self.log.show(
                f"step {progress.step}: the weights are not finite; they were at step {before}. "
                "Begin anew with a lower optimizer.lr, or from a checkpoint up to that step."
            )
        return False

    def _run_validation(self) -> bool:
        """Validate and record whether the result is the best so far; False if stopped in it."""
        assert self.validate is not None
        self.state.phases.begin("validating")
        average_over_ranks(self.state, self.strategy.context)
        began = time.perf_counter()
        are_finite = all(self.strategy.context.all_gather(self._check_weights()))
        try:
            with ranges.range("validation"), self._published_weights(), merged(self.model):
                window = self._window_of_source()
                results = self.validate(
                    self._stop, **({} if window is None else {"window": window})
                )
        except StopInterrupt:
            self.strategy.is_stopping = True
            return False
        seconds = time.perf_counter() - began
        self.log.display.validated_s += seconds
        if window is None:  # silence takes several times as long
            self.log.display.validation_s = seconds
        self.progress.must_validate = False
        if self.config.model.best_rq is not None:
            metric = self._record_losses(cast("Mapping[str, LossResult]", results))
        else:
            metric = self._record_transcripts(cast("Mapping[str, SetResult]", results))
        if window is not None:
            self.progress.before = metric
        else:
            self.progress.validation = self.validate.fingerprint
            value = metric if are_finite else math.nan
            self.progress.record_metric(value, self.validate.metric)
        self._clock.reset("validate_every")
        return True

    def _warn_if_worse(self, progress: RunProgress) -> None:
        before, metric = progress.before, self.validate and self.validate.metric
        if before is None or metric is None or metric.is_better(progress.best, before):
            return
        remedies = "search with --beam 4, which repeats less; train longer (training.max_steps)"
        data, features = self.config.data, self.config.model.features
        if features.minimum_s < UNDERSTOOD_WINDOW_S:
            budget = data.frame_budget
            frames = "" if budget == "auto" else f"data.frame_budget={max(2500, budget)} "
            remedies += (
                "; or, which takes far fewer steps, begin anew with more silence "
                f"(model.features.minimum_s={UNDERSTOOD_WINDOW_S:g} {frames}"
                f"name={self.config.name}2)"
            )
        log.warning(
            "no validation was better than the %s of %s that the model had before, with its "
            "silence: %s.",
            *(metric.label, metric.text(before), remedies),
        )

    def _window_of_source(self) -> float | None:
        """Return the silence that an imported Whisper is used to, where training has another.

        It is how good the model was before; without its silence it repeats itself.
        """
        if self.progress.step or self.config.model.features.kind != "whisper":
            return None
        # Only the beginning of a run needs the folder, which may be gone later.
        source = source_of_model(self.config, None)
        if source is None:
            return None
        before = read_description(source).model.features
        if before.kind != "whisper" or before.minimum_s == self.config.model.features.minimum_s:
            return None
        self.log.show(
            f"step 0 is validated with silence up to {before.minimum_s:g} s, as the model was "
            f"trained; training has model.features.minimum_s="
            f"{self.config.model.features.minimum_s:g}"
        )
        return before.minimum_s

    def _record_losses(self, results: "Mapping[str, LossResult]") -> float:
        for name, result in results.items():
            self.log.validation_loss(self.progress.step, self.progress.epoch, name, result)
        chosen = self._choosing(results)
        total = sum(result.total for result in chosen)
        frames = sum(result.frames for result in chosen)
        return total / frames if frames else float("nan")

    def _record_transcripts(self, results: "Mapping[str, SetResult]") -> float:
        evaluations = {name: result.evaluation for name, result in results.items()}
        settings = self.config.training.diagnostics
        step, epoch = self.progress.step, self.progress.epoch
        chosen = {} if settings is None else examples.choose(evaluations, settings.examples)
        for name, result in results.items():
            self.log.validation(step, epoch, name, result, chosen.get(name, ()))
        probe = reduce(add, (result.probe for result in results.values()))
        if self.diagnostics is not None:
            changes = self.diagnostics.validated(evaluations, probe, epoch)
            self.log.changes(step, epoch, changes)
        if not all(map(math.isfinite, probe.summary().values())):
            self.log.show(f"step {step}: the validation loss is not finite: this is never the best")
            return math.nan
        # Imported here, as only a run that validates needs it.
        from effasr.evaluation.result import merge

        results_of_best = self._choosing(results)
        assert self.validate is not None
        by = self.validate.metric.name
        if by == "loss":
            sums = reduce(add, (result.probe for result in results_of_best))
            return math.nan if sums.loss is None else sums.loss
        return merge([result.evaluation for result in results_of_best]).value(by)

    def _choosing(self, results: Mapping[str, T]) -> list[T]:
        """Return the results of the sets that choose the best checkpoint."""
        names = self.config.evaluation.best_sets or results
        return [results[name] for name in names]

    @contextmanager
    def _published_weights(self) -> Iterator[None]:
        """Give the model the weights to evaluate and publish; all ranks enter the block."""
        average = self.state.average
        in_place = nullcontext() if average is None else average.in_place()
        with in_place, full_weights(self.state, self.model):
            yield

    def _write_unreadable(self) -> None:
        if self.config.data.on_bad_audio == "skip":
            self.log.write_unreadable(self.strategy.context)

    def _save(self) -> None:
        context = self.strategy.context
        self.state.phases.begin("saving a checkpoint")
        self._write_unreadable()
        self._handle_nonfinite(keep_pending=0)
        average_over_ranks(self.state, context)
        self._clock.reset("checkpoint_every")
        mixtures = self.mixture_stats.merge(context)
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
                    self.resolved.tokenizer,
                    state,
                    staged,
                    self.resolved.corpus.prompt,
                    is_best=self.progress.is_best,
                )
        self.log.mixture(self.progress.step, mixtures)

    def _restore(self, saved: Saved) -> None:
        """Continue from a checkpoint; the model has its published weights already."""
        progress, state = self.progress, saved.state
        progress.load_state_dict(state)
        progress.must_validate = progress.must_validate and self.validate is not None
        if progress.is_best and self.strategy.context.is_main:
            # The run may have been killed between writing the checkpoint and marking it.
            self.checkpoints.mark_best(progress.step)
        names, frozen = dict(self.model.named_parameters()), self.config.training.freeze
        before = matching(names, frozen, "training.freeze")
        self._optimizer_state().load(state["optimizer"], saved.path / TENSORS, before)
        for name, component in self._components().items():
            if component is not None and state.get(name) is not None:
                component.load_state_dict(state[name])
        if self.state.adascale is not None and state.get("adascale") is None:
            self.state.adascale.begin_at(progress.step)
        if self.validate is not None and progress.validation not in ("", self.validate.fingerprint):
            log.warning("other validation sets or settings: `best` is chosen anew from here on")
            progress.best, progress.is_best = math.inf, False
            progress.validations_since_best = 0
            if self.diagnostics is not None:
                self.diagnostics.forget_validations()

    def _components(self) -> dict[str, Stateful | None]:
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

    def _identity(self) -> dict[str, Any]:
        epoch, number = self.progress.position
        plan = self.resolved.loader.fingerprint(epoch) if number else None
        ranks = self.strategy.context.size
        same = identity(self.config, self.resolved.corpus.fingerprint, plan, ranks)
        return same | {"division": self.resolved.division}

    def _make_validator(self) -> "LossValidator | Validator | None":
        """Return what validates the model with its current weights; called again after a loss."""
        if not self.config.data.validation:
            return None
        context = self.strategy.context
        # Imported here, as only a run that validates needs searches.
        if self.config.model.best_rq is not None:
            from effasr.training.untranscribed.pretraining import LossValidator

            return LossValidator(self.config, self.model, context)
        from effasr.training.validation import Validator

        prompt, language = self.resolved.corpus.prompt, self.config.data.assumed_language
        if self.config.model.language_model is not None:
            prompt = Prompt(language, language)  # conversations have none
        validator = Validator(self.config, self.model, self.resolved.tokenizer, context, prompt)
        validator.progress = lambda *counts: self.log.display.validating(*counts)
        return validator

    def _open_log(self) -> None:
        is_main, step = self.strategy.context.is_main, self.progress.step
        dropped = self.resolved.corpus.dropped
        self.log.open(self.config, is_main, step, self.metrics.ranks, dropped)

    def _describe(self) -> None:
        """Report the data, the model and the ranks."""
        context, corpus = self.strategy.context, self.resolved.corpus
        for line in self.resolved.lines:
            self.log.show(line)
        self.log.show(
            f"{len(corpus)} utterances, {corpus.seconds / 3600:.2f} h, "
            f"{describe_model(self.model)}, {context.size} x {context.device}"
        )
        dropped = self.log.directory.path / "dropped.jsonl"
        epoch = self.progress.position[0]
        lines = describe_data(corpus, self.resolved.loader, self.config.data, epoch, dropped)
        fixed = self.config.init_from is not None
        aligned = describe_alignment(
            corpus, self.config.data, self.config.model, self.resolved.tokenizer, fixed=fixed
        )
        for line in (*self.strategy.describe(), *lines):
            self.log.show(line)
        if context.is_main:
            for line in aligned:
                self.log.show(line)
