"""Finds, by a few trials, the budget that trains fastest, or the largest that fits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from effasr.data.sampling.bucket_table import BucketTable
from effasr.model.config import ModelConfig
from effasr.training.calibration.models import Load, MemoryModel, SpeedModel, whole_waves
from effasr.training.calibration.settings import CalibrationConfig
from effasr.training.calibration.trial import Measurement
from effasr.training.calibration.workload import Population, Workload, cells
from effasr.training.fault_tolerance.oom_recovery import OutOfMemory
from effasr.training.memory import gib

LimitedBy = Literal["memory", "throughput", "corpus"]
Measure = Callable[[Workload], Measurement]

_FIRST = 512
"""Frames of the first trial, if the corpus allows; the second has `_GROWTH` times as many."""
_GROWTH = 4
_TIMED = 3
_STEP = 16
"""Budgets are multiples of this, where the longest utterance allows."""
_MOST_TRIALS = 12
_LEAST_STEPS = 10
"""Least steps of an epoch: with fewer, the unfilled part of its last one weighs too much."""
_BACK_OFF = 0.85
"""Factor applied to a budget that did not fit although it was predicted to."""
_NEAR = 1.05
"""Budgets within this factor of a measured one are not measured again."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A measurement."""

    load: Load  # Quantities that determine its memory
    purpose: str  # Purpose of the trial
    measured: Measurement  # The result
    predicted_bytes: int | None = None  # Predicted peak; None without a prediction

    @property
    def error(self) -> float | None:
        """Relative error of the prediction: 0.01 is 1 % too much."""
        if self.predicted_bytes is None or not self.measured.fits:
            return None
        return self.predicted_bytes / self.measured.peak_bytes - 1


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search."""

    frame_budget: int  # Budget to train with
    largest: int  # Largest budget that is predicted to fit
    limited_by: LimitedBy  # Constraint that keeps ``frame_budget`` from being larger
    memory: MemoryModel  # Memory model
    speed: SpeedModel  # Speed model
    trials: tuple[Trial, ...]  # Trials in order

    @property
    def replay(self) -> Trial:
        """The trial of the chosen budget."""
        *_, last = (
            trial
            for trial in self.trials
            if trial.load.frames == self.frame_budget and trial.predicted_bytes is not None
        )
        return last


@dataclass(slots=True)
class Search:
    """Searches for a frame budget."""

    population: Population  # Lengths of the corpus
    model: ModelConfig  # Architecture
    settings: CalibrationConfig  # Objective and margins
    target: int  # Bytes that must not be exceeded
    micro_batches: int  # Micro-batches of a global step, which limits the budget on small corpora
    measure: Measure  # Runs a trial
    note: Callable[[str], None] = lambda text: None  # Called with a description of each trial
    # Multiprocessors of the GPU, for whole waves of tiles; None for a CPU
    multiprocessors: int | None = None
    trials: list[Trial] = field(default_factory=list)

    @property
    def limit(self) -> float:
        """Largest predicted peak that is allowed, in bytes."""
        return self.target * (1 - self.settings.margin)

    def run(self) -> Found:
        """Search."""
        self._first_trials()
        while True:
            memory, speed = self._memory(), self._speed()
            largest = self._largest(memory)
            wanted, reason = self._choose(speed, largest)
            replay = self._replayed(wanted)
            if replay is None and len(self.trials) < _MOST_TRIALS:
                self._try(wanted, "replay", predicted=True)
                continue
            # Timings may vary too much to converge; the replayed budget fits all the same.
            replay = self._best_replay() if replay is None else replay
            if replay is None:
                raise OutOfMemory(
                    f"{_MOST_TRIALS} trials found no budget that stays below {gib(self.target)}: "
                    "give data.frame_budget a number, or training more memory."
                )
            return Found(replay.load.frames, largest, reason, memory, speed, tuple(self.trials))

    def memory_model(self) -> MemoryModel:
        """Return the memory model of the first trials, without a search for a budget."""
        self._first_trials()
        return self._memory()

    def _first_trials(self) -> None:
        """Run the trials that determine the coefficients."""
        longest = self.population.longest
        frames = self._rounded(min(max(_FIRST, 2 * longest), self._cap))
        while not self._try(frames, "small").measured.fits:
            if frames == longest:
                tokens = self.population.shape(frames).token_budget
                raise OutOfMemory(
                    f"a micro-batch of {frames} frames, as many as the longest utterance has, and "
                    f"{tokens} tokens does not fit in {gib(self.target)} "
                    f"({self.trials[-1].measured.reason}): lower data.max_duration, give training "
                    "more memory, or train a smaller model."
                )
            frames = self._rounded(max(longest, frames // 2))
        larger = self._rounded(min(_GROWTH * frames, self._cap))
        while larger > frames and not self._try(larger, "larger").measured.fits:
            middle = math.isqrt(larger * frames)
            larger = self._rounded(middle) if middle > 1.2 * frames else frames
        self._try(larger, "more tokens", tokens=2.0)
        self._try(larger, "shortest utterances", kind="shortest")

    def _try(
        self,
        frames: int,
        purpose: str,
        *,
        predicted: bool = False,
        tokens: float = 1.0,
        kind: Literal["longest", "shortest"] = "longest",
    ) -> Trial:
        work = self.population.workload(frames, batches=_TIMED, kind=kind, tokens=tokens)
        load = load_of(work, self.model)
        expected = self._memory().predict(load) if predicted else None
        trial = Trial(load, purpose, self.measure(work), expected)
        self.trials.append(trial)
        self.note(describe(trial))
        return trial

    def _memory(self) -> MemoryModel:
        fitting = [trial for trial in self.trials if trial.measured.fits]
        return MemoryModel.fit(
            [trial.load for trial in fitting], [trial.measured.peak_bytes for trial in fitting]
        )

    def _speed(self) -> SpeedModel:
        usual = [trial for trial in self.trials if trial.measured.fits and _is_usual(trial)]
        return SpeedModel.fit(
            [trial.load.frames for trial in usual], [trial.measured.seconds for trial in usual]
        )

    @property
    def _cap(self) -> int:
        """Largest frame budget with which an epoch has `_LEAST_STEPS` steps."""
        total = self.population.total_frames
        return max(self.population.longest, total // (_LEAST_STEPS * self.micro_batches))

    def _largest(self, memory: MemoryModel) -> int:
        """Return the largest budget whose longest utterances together are predicted to fit."""
        failed = [trial.load.frames for trial in self.trials if self._failed(trial)]
        low, high = self.population.longest, self._cap
        if failed:
            high = max(low, min(high, round(_BACK_OFF * min(failed))))
        while low < high:
            middle = (low + high + 1) // 2
            if self._predict(memory, middle) <= self.limit:
                low = middle
            else:
                high = middle - 1
        return self._rounded(low)

    def _failed(self, trial: Trial) -> bool:
        """Return whether a replayed or training-like budget proved too large."""
        if not _is_usual(trial):
            return False
        return not trial.measured.fits or trial.measured.peak_bytes > self.target

    def _predict(self, memory: MemoryModel, frames: int) -> int:
        """Return the predicted peak of the longest utterances together."""
        shape = self.population.shape(frames)
        usual = [trial for trial in self.trials if _is_usual(trial)][-1]
        scores = round(usual.load.cells * frames / usual.load.frames)
        return memory.predict(Load(frames, shape.token_budget, scores))

    def _choose(self, speed: SpeedModel, largest: int) -> tuple[int, LimitedBy]:
        """Return the budget that the settings ask for, and what limits it."""
        reason: LimitedBy = "corpus" if largest >= self._rounded(self._cap) else "memory"
        if self.settings.objective == "memory":
            return largest, reason
        rates = {
            frames: filled * frames / speed.predict(frames)
            for frames, filled in self._candidates(largest).items()
        }
        enough = (1 - self.settings.tolerance) * max(rates.values())
        fast = [frames for frames, rate in rates.items() if rate >= enough]
        # The time of a trial depends on its waves, but the model of speed does not know them.
        chosen = min(filter(self._is_whole_waves, fast), default=min(fast))
        return chosen, reason if chosen == largest else "throughput"

    def _candidates(self, largest: int) -> dict[int, float]:
        """Return budgets up to the largest, and the share of each that utterances fill."""
        count = max(2, math.ceil(math.log(largest / self.population.longest, 1.1)) + 1)
        ratio = (largest / self.population.longest) ** (1 / (count - 1))
        budgets = {self._rounded(round(self.population.longest * ratio**n)) for n in range(count)}
        if self._wave is not None:
            first = -(-self.population.longest // self._wave) * self._wave
            budgets |= set(range(first, largest + 1, self._wave))
        filled, found = 0.0, {}
        for budget in sorted(budgets | {largest}):
            # A large budget is filled anyway; planning for it would take long.
            filled = filled if filled > 0.995 else self._fill(budget)
            found[budget] = filled
        return found

    @property
    def _wave(self) -> int | None:
        """Frames of a whole wave; see `effasr.training.calibration.waves`."""
        if self.multiprocessors is None:
            return None
        return whole_waves(self.model.encoder.width, self.multiprocessors)

    def _is_whole_waves(self, frames: int) -> bool:
        return self._wave is not None and frames % self._wave == 0

    def _fill(self, budget: int) -> float:
        planned = self.population.planned(self.population.shape(budget))
        return sum(f for lengths in planned for f, _ in lengths) / (budget * len(planned))

    def _replayed(self, wanted: int) -> Trial | None:
        """Return a replay that fits, of a similar budget; of whole waves, of the same budget."""
        for trial in reversed(self._replays()):
            frames = trial.load.frames
            if self._is_whole_waves(wanted) and frames != wanted:
                continue
            if max(frames, wanted) <= _NEAR * min(frames, wanted):
                return trial
        return None

    def _best_replay(self) -> Trial | None:
        is_fastest = self.settings.objective == "throughput"
        return max(
            self._replays(),
            key=lambda trial: trial.measured.speed if is_fastest else trial.load.frames,
            default=None,
        )

    def _replays(self) -> list[Trial]:
        """Return the replays that fit."""
        return [t for t in self.trials if t.purpose == "replay" and not self._failed(t)]

    def _rounded(self, frames: int) -> int:
        return max(frames - frames % _STEP, min(frames, self.population.longest))


def load_of(work: Workload, model: ModelConfig) -> Load:
    """Return what the peak memory of a trial depends on."""
    largest = max(cells(lengths, model, work.clips) for lengths in [*work.timed, work.extreme])
    return Load(work.shape.frame_budget, work.shape.token_budget, largest)


def bucket_sizes(
    table: BucketTable, memory: MemoryModel, model: ModelConfig, limit: float
) -> BucketTable:
    """Return the table with the largest batches that fit, computed as padded to the longest."""
    sizes = []
    for frames, tokens in table.bins:
        one = Load(frames, tokens, cells([(frames, tokens)], model))
        sizes.append(max(1, memory.batch_size(one, limit)))
    return BucketTable(table.bins, tuple(sizes))


def describe(trial: Trial) -> str:
    """Describe a trial in one line."""
    text = f"{trial.load.frames} frames, {trial.load.tokens} tokens ({trial.purpose}): "
    if not trial.measured.fits:
        return f"{text}does not fit"
    text += f"{gib(trial.measured.peak_bytes)}"
    if trial.error is not None:
        text += f" (predicted {100 * trial.error:+.1f} %)"
    return f"{text}, {trial.measured.speed:.0f} s of audio per second"


def _is_usual(trial: Trial) -> bool:
    return trial.purpose in ("small", "larger", "replay")
