"""Finds, by a few trials, the budget that trains fastest, or the largest that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from itertools import product
from typing import Literal

import numpy as np

from effasr.checks import check
from effasr.data.sampling.bucket_table import BucketTable
from effasr.model.config import ModelConfig
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
_STEP = 16  # Budgets are multiples of this, where the longest utterance allows
_MOST_TRIALS = 12
_LEAST_STEPS = 10
"""Least steps of an epoch: with fewer, the unfilled part of its last one weighs too much."""
_BACK_OFF = 0.85  # Factor applied to a budget that did not fit although it was predicted to
_NEAR = 1.05  # Budgets within this factor of a measured one are not measured again


@dataclass(frozen=True, slots=True)
class Load:
    frames: int  # Encoder rows, padding included
    tokens: int  # Decoder rows, padding included
    cells: int  # Scores of all attentions and lattices; see `workload.cells`


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """``peak = fixed + per_frame * frames + per_token * tokens + per_cell * cells``, in bytes.

    No coefficient is negative. ``per_cell`` is 0 where no operation materialises its scores, as
    with fused kernels; ``fixed`` is the memory of weights, moments, libraries and the process.
    """

    fixed: float
    per_frame: float
    per_token: float
    per_cell: float

    @classmethod
    def fit(cls, loads: Sequence[Load], peaks: Sequence[int]) -> MemoryModel:
        """Fit the model to the peaks (bytes) of trials by non-negative least squares."""
        check(loads, "loads", "hold at least one trial", "empty")
        matrix = np.array([(1, *astuple(load)) for load in loads], dtype=np.float64)
        scale = np.maximum(matrix.max(axis=0), 1.0)
        values = np.array(peaks, dtype=np.float64)
        best: tuple[float, np.ndarray] | None = None
        # Four coefficients have sixteen subsets: the exact solution is that of one of them.
        for used in product((True, False), repeat=4):
            columns = np.flatnonzero(used)
            result = np.zeros(4)
            if columns.size:
                scaled = matrix[:, columns] / scale[columns]
                result[columns] = np.linalg.lstsq(scaled, values, rcond=1e-9)[0]
            if (result < 0).any():
                continue
            residual = float(np.square(matrix / scale @ result - values).sum())
            # On a tie prefer fewer coefficients: the others are not determined by the trials.
            if best is None or residual <= best[0] * (1 + 1e-9):
                best = residual, result / scale
        assert best is not None
        return cls(*best[1].tolist())

    def predict(self, load: Load) -> int:
        return round(
            self.fixed
            + self.per_frame * load.frames
            + self.per_token * load.tokens
            + self.per_cell * load.cells
        )

    def batch_size(self, one: Load, limit: float) -> int:
        """Return how many utterances of this load each stay within ``limit`` bytes; at least 0."""
        each = self.predict(one) - self.predict(Load(0, 0, 0))
        return max(0, int((limit - self.fixed) // max(each, 1)))


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """``seconds = fixed + per_frame * frames``, neither of them negative."""

    fixed: float
    per_frame: float

    @classmethod
    def fit(cls, frames: Sequence[int], seconds: Sequence[float]) -> SpeedModel:
        """Fit the model to the seconds of micro-batches by least squares of relative errors."""
        check(frames, "frames", "hold at least one trial", "empty")
        x, y = np.array(frames, dtype=np.float64), np.array(seconds)
        alone = float((x / y).sum() / np.square(x / y).sum())
        if len(set(frames)) < 2:
            return cls(0.0, alone)
        matrix = np.stack([1 / y, x / y], axis=1)
        fixed, per_frame = np.linalg.lstsq(matrix, np.ones(len(x)), rcond=None)[0].tolist()
        if fixed < 0:
            return cls(0.0, alone)
        if per_frame < 0:
            return cls(float((1 / y).sum() / np.square(1 / y).sum()), 0.0)
        return cls(fixed, per_frame)

    def predict(self, frames: int) -> float:
        return self.fixed + self.per_frame * frames


# Frame budgets whose matrix products fill every multiprocessor of a GPU.
#
# A product computes its result in tiles, one on a multiprocessor at a time. Where the number of
# tiles is no multiple of the number of multiprocessors, some wait for the last tiles: 6,000 frames
# of 1,024 channels are 188 tiles, which take 132 multiprocessors as long as 264.

_TILE_ROWS, _TILE_COLUMNS = 128, 256  # The usual tile of a 16-bit product of cuBLAS on Hopper


def frames_per_full_wave(width: int, multiprocessors: int) -> int:
    """Return the least number of frames whose products fill all multiprocessors evenly.

    Its multiples do, too, and so do products to a multiple of the width, such as those of feed
    forward layers.
    """
    for name, value in (("width", width), ("multiprocessors", multiprocessors)):
        check(value >= 1, name, "be at least 1", value)
    columns = math.ceil(width / _TILE_COLUMNS)
    return _TILE_ROWS * (multiprocessors // math.gcd(multiprocessors, columns))


@dataclass(frozen=True, slots=True)
class Trial:
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
class SearchResult:
    frame_budget: int  # Budget to train with
    largest: int  # Largest budget that is predicted to fit
    limited_by: LimitedBy  # Constraint that keeps ``frame_budget`` from being larger
    memory: MemoryModel  # Memory model
    speed: SpeedModel  # Speed model
    trials: tuple[Trial, ...]  # Trials in order

    @property
    def replay(self) -> Trial:
        *_, last = (
            trial
            for trial in self.trials
            if trial.load.frames == self.frame_budget and trial.predicted_bytes is not None
        )
        return last


@dataclass(slots=True)
class Search:
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

    def run(self) -> SearchResult:
        self._first_trials()
        while True:
            memory, speed = self._memory(), self._speed()
            largest = self._largest(memory)
            budget, reason = self._choose(speed, largest)
            replay = self._replayed(budget)
            if replay is None and len(self.trials) < _MOST_TRIALS:
                self._try(budget, "replay", predicted=True)
                continue
            # Timings may vary too much to converge; the replayed budget fits all the same.
            replay = self._best_replay() if replay is None else replay
            if replay is None:
                raise OutOfMemory(
                    f"{_MOST_TRIALS} trials found no budget that stays below {gib(self.target)}: "
                    "give data.frame_budget a number, or training more memory."
                )
            return SearchResult(
                replay.load.frames, largest, reason, memory, speed, tuple(self.trials)
            )

    def _first_trials(self) -> None:
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
        filled, result = 0.0, {}
        for budget in sorted(budgets | {largest}):
            # A large budget is filled anyway; planning for it would take long.
            filled = filled if filled > 0.995 else self._fill(budget)
            result[budget] = filled
        return result

    @property
    def _wave(self) -> int | None:
        """Frames of a whole wave; see `frames_per_full_wave`."""
        if self.multiprocessors is None:
            return None
        return frames_per_full_wave(self.model.encoder.width, self.multiprocessors)

    def _is_whole_waves(self, frames: int) -> bool:
        return self._wave is not None and frames % self._wave == 0

    def _fill(self, budget: int) -> float:
        planned = self.population.planned(self.population.shape(budget))
        return sum(f for lengths in planned for f, _ in lengths) / (budget * len(planned))

    def _replayed(self, budget: int) -> Trial | None:
        """Return a replay that fits, of a similar budget; of whole waves, of the same budget."""
        for trial in reversed(self._replays()):
            frames = trial.load.frames
            if self._is_whole_waves(budget) and frames != budget:
                continue
            if max(frames, budget) <= _NEAR * min(frames, budget):
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
    largest = max(cells(lengths, model, work.clips) for lengths in [*work.timed, work.extreme])
    return Load(work.shape.frame_budget, work.shape.token_budget, largest)


def bucket_sizes(
    table: BucketTable, memory: MemoryModel, model: ModelConfig, limit: float
) -> BucketTable:
    """Return the table with the largest batches that fit, computed as padded to the longest."""
    sizes = []
    for frames, tokens in table.bins:
        item = Load(frames, tokens, cells([(frames, tokens)], model))
        sizes.append(max(1, memory.batch_size(item, limit)))
    return BucketTable(table.bins, tuple(sizes))


def describe(trial: Trial) -> str:
    text = f"{trial.load.frames} frames, {trial.load.tokens} tokens ({trial.purpose}): "
    if not trial.measured.fits:
        return f"{text}does not fit"
    text += f"{gib(trial.measured.peak_bytes)}"
    if trial.error is not None:
        text += f" (predicted {100 * trial.error:+.1f} %)"
    return f"{text}, {trial.measured.speed:.0f} s of audio per second"


def _is_usual(trial: Trial) -> bool:
    return trial.purpose in ("small", "larger", "replay")
