"""A calibration from beginning to end, for the command and for training."""

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, TypeVar

import numpy as np
import torch

from effasr import config as configuration
from effasr.checks import check
from effasr.data.batch import StaticShape
from effasr.data.sampling.bucket_table import BucketTable
from effasr.data.tokenizer import Tokenizer
from effasr.distributed.process_group import DistributedContext
from effasr.training.calibration import store
from effasr.training.calibration.settings import CalibrationConfig
from effasr.training.calibration.store import Calibration
from effasr.training.calibration.trial import Measurement, Request, measure
from effasr.training.calibration.workload import Conversations, Population, Texts, Workload
from effasr.training.config import TrainConfig
from effasr.training.corpus import load_corpus, text_costs
from effasr.training.fault_tolerance.oom_recovery import OutOfMemory
from effasr.training.memory import gib, total_bytes

# Finds, by a few trials, the budget that trains fastest, or the largest that fits.


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
class LinearModel:
    """``fixed + per_frame * frames``: bytes or seconds of a micro-batch; neither is negative.

    The token budget grows with the frame budget, and so do the scores of the longest utterances.
    """

    fixed: float
    per_frame: float

    @classmethod
    def fit(cls, frames: Sequence[int], values: Sequence[float]) -> "LinearModel":
        """Fit the model to trials by least squares of relative errors."""
        check(frames, "frames", "hold at least one trial", "empty")
        x, y = np.array(frames, dtype=np.float64), np.array(values, dtype=np.float64)
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

    def frames_within(self, limit: float) -> float:
        """Return the most frames whose value is at most ``limit``."""
        return (limit - self.fixed) / self.per_frame if self.per_frame else math.inf


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
    frames: int  # Frame budget
    tokens: int  # Token budget
    is_replay: bool  # Whether it checks a budget that was chosen
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
    replay: Trial  # Trial of the budget to train with
    largest: int  # Largest budget that is predicted to fit
    limited_by: LimitedBy  # Constraint that keeps the budget from being larger
    memory: LinearModel  # Peak bytes
    speed: LinearModel  # Seconds of a micro-batch
    trials: tuple[Trial, ...]  # Trials in order

    @property
    def frame_budget(self) -> int:
        return self.replay.frames


@dataclass(slots=True)
class Search:
    population: Population  # Lengths of the corpus
    settings: CalibrationConfig  # Objective and margins
    target: int  # Bytes that must not be exceeded
    micro_batches: int  # Micro-batches of a global step, which limits the budget on small corpora
    measure: Measure  # Runs a trial
    note: Callable[[str], None] = lambda text: None  # Called with a description of each trial
    wave: int = 0  # Frames of a whole wave, see `frames_per_full_wave`; 0 for a CPU
    trials: list[Trial] = field(default_factory=list)

    def run(self) -> SearchResult:
        self._first_trials()
        while True:
            fitting = [trial for trial in self.trials if trial.measured.fits]
            frames = [trial.frames for trial in fitting]
            memory = LinearModel.fit(frames, [trial.measured.peak_bytes for trial in fitting])
            speed = LinearModel.fit(frames, [trial.measured.seconds for trial in fitting])
            # The largest budget whose longest utterances together are predicted to fit.
            most = min(self._cap, memory.frames_within(self.target * (1 - self.settings.margin)))
            failed = [trial.frames for trial in self.trials if self._failed(trial)]
            most = min(most, _BACK_OFF * min(failed, default=math.inf))
            largest = self._rounded(max(self.population.longest, int(most)))
            budget, reason = self._choose(speed, largest)
            replay = self._replayed(budget)
            if replay is None and len(self.trials) < _MOST_TRIALS:
                self._try(budget, round(memory.predict(budget)))
                continue
            # Timings may vary too much to converge; the replayed budget fits all the same.
            replay = self._best_replay() if replay is None else replay
            if replay is None:
                raise OutOfMemory(
                    f"{_MOST_TRIALS} trials found no budget that stays below {gib(self.target)}: "
                    "give data.frame_budget a number, or training more memory."
                )
            return SearchResult(replay, largest, reason, memory, speed, tuple(self.trials))

    def _first_trials(self) -> None:
        longest = self.population.longest
        frames = self._rounded(min(max(_FIRST, 2 * longest), self._cap))
        while not (trial := self._try(frames)).measured.fits:
            if frames == longest:
                raise OutOfMemory(
                    f"a micro-batch of {frames} frames, as many as the longest utterance has, and "
                    f"{trial.tokens} tokens does not fit in {gib(self.target)} "
                    f"({trial.measured.reason}): lower data.max_duration, give training more "
                    "memory, or train a smaller model."
                )
            frames = self._rounded(max(longest, frames // 2))
        larger = self._rounded(min(_GROWTH * frames, self._cap))
        while larger > frames and not self._try(larger).measured.fits:
            middle = math.isqrt(larger * frames)
            larger = self._rounded(middle) if middle > 1.2 * frames else frames

    def _try(self, frames: int, predicted_bytes: int | None = None) -> Trial:
        work = self.population.workload(frames, batches=_TIMED)
        is_replay = predicted_bytes is not None
        measured, tokens = self.measure(work), work.shape.token_budget
        trial = Trial(frames, tokens, is_replay, measured, predicted_bytes)
        self.trials.append(trial)
        self.note(describe(trial))
        return trial

    @property
    def _cap(self) -> int:
        """Largest frame budget with which an epoch has `_LEAST_STEPS` steps."""
        total = self.population.total_frames
        return max(self.population.longest, total // (_LEAST_STEPS * self.micro_batches))

    def _failed(self, trial: Trial) -> bool:
        return not trial.measured.fits or trial.measured.peak_bytes > self.target

    def _choose(self, speed: LinearModel, largest: int) -> tuple[int, LimitedBy]:
        reason: LimitedBy = "corpus" if largest >= self._rounded(self._cap) else "memory"
        if self.settings.objective == "memory":
            return largest, reason
        # The smallest budget F with F / (fixed + per_frame * F) >= rate.
        rate = (1 - self.settings.tolerance) * largest / speed.predict(largest)
        least = 0
        if speed.fixed:
            least = math.ceil(rate * speed.fixed / (1 - rate * speed.per_frame))
        least = min(largest, max(self.population.longest, -(-least // _STEP) * _STEP))
        # The time of a trial depends on its waves, but the model of speed does not know them.
        waves = -(-least // self.wave) * self.wave if self.wave else least
        chosen = waves if waves <= largest else least
        return chosen, reason if chosen == largest else "throughput"

    def _replayed(self, budget: int) -> Trial | None:
        """Return a replay that fits, of a similar budget; of whole waves, of the same budget."""
        is_whole = self.wave and budget % self.wave == 0
        for trial in reversed(self._replays()):
            ratio = max(trial.frames, budget) / min(trial.frames, budget)
            if ratio <= (1.0 if is_whole else _NEAR):
                return trial
        return None

    def _best_replay(self) -> Trial | None:
        is_fastest = self.settings.objective == "throughput"
        return max(
            self._replays(),
            key=lambda trial: trial.measured.speed if is_fastest else trial.frames,
            default=None,
        )

    def _replays(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.is_replay and not self._failed(trial)]

    def _rounded(self, frames: int) -> int:
        return max(frames - frames % _STEP, min(frames, self.population.longest))


def bucket_sizes(table: BucketTable, shape: StaticShape) -> BucketTable:
    """Return the table with the largest batches whose longest are within a shape that fits."""
    sizes = (
        min(shape.frame_budget // max(1, frames), shape.token_budget // max(1, tokens))
        for frames, tokens in table.bins
    )
    return BucketTable(table.bins, tuple(max(1, size) for size in sizes))


def describe(trial: Trial) -> str:
    text = f"{trial.frames} frames, {trial.tokens} tokens: "
    if not trial.measured.fits:
        return f"{text}does not fit"
    text += f"{gib(trial.measured.peak_bytes)}"
    if trial.error is not None:
        text += f" (predicted {100 * trial.error:+.1f} %)"
    text += f", {trial.measured.speed:.0f} s of audio per second"
    if trial.measured.text_seconds:
        share = trial.measured.text_seconds / trial.measured.seconds
        text += f"; a micro-batch of text takes {share:.2f} times as long as one of speech"
    return text


T = TypeVar("T")

log = logging.getLogger(__name__)

_UNLIMITED_FRAMES = 1_000_000
"""A frame budget that holds every utterance of a corpus with all of its tokens."""


def resolve_auto_frame_budget(
    config: TrainConfig, tokenizer: Tokenizer, context: DistributedContext
) -> TrainConfig:
    """Replace ``data.frame_budget: auto`` by the result of an earlier calibration, or of a new one.

    Rank 0 calibrates, and the others wait for it. All ranks call this.
    """
    if config.data.frame_budget != "auto":
        return config
    population = read_population(config, tokenizer)

    def find(alive: Callable[[], None]) -> tuple[Calibration, bool]:
        target = target_bytes(config.calibration, context.device, os.environ)
        described = store.describe(config, tokenizer.vocab_size, population, context.device, target)
        earlier = store.find(store.fingerprint(described))
        if earlier is not None:
            return earlier, False
        log.warning(
            "data.frame_budget is auto, and there is no calibration for this machine, model and "
            "corpus yet: trying budgets"
        )
        return (
            calibrate(
                config, tokenizer.vocab_size, population, context.device, target,
                note=lambda text: log.warning("%s", text), alive=alive,
            ),
            True,
        )  # fmt: skip

    found, is_new = on_rank_zero(find, context, config.training.timeout_s / 4)
    log.warning(
        "data.frame_budget is %d, data.token_budget %d%s",
        found.frame_budget,
        found.token_budget,
        "" if is_new else f", as calibrated before ({store.path_of(found.fingerprint)})",
    )
    return with_budgets(config, found)


def with_budgets(config: TrainConfig, found: Calibration) -> TrainConfig:
    data = replace(
        config.data,
        frame_budget=found.frame_budget,
        token_budget=found.token_budget,
        max_sequences=found.max_sequences,
    )
    return replace(config, data=data)


def calibrate(
    config: TrainConfig,
    vocab_size: int,
    population: Population,
    device: torch.device,
    target: int,
    *,
    note: Callable[[str], None] = lambda text: None,
    alive: Callable[[], None] = lambda: None,
) -> Calibration:
    """Find the budgets for a run, and save them; ``target``: bytes that training may take."""
    started = time.monotonic()
    described = store.describe(config, vocab_size, population, device, target)
    mapping = configuration.to_mapping(_without_weights(config))

    def trial(work: Workload) -> Measurement:
        # With two micro-batches, the gradients of the first occupy memory during the second, as the
        # buckets of a gradient all-reduce do.
        count = min(2, config.data.micro_batches)
        request = Request(mapping, vocab_size, str(device), target, count, work)
        return measure(request, alive=alive)

    wave = 0
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        wave = frames_per_full_wave(config.model.encoder.width, multiprocessors)
    search = Search(
        population, config.calibration, target, config.data.micro_batches, trial, note, wave
    )
    return _record(search.run(), search, described, config, time.monotonic() - started)


def _without_weights(config: TrainConfig) -> TrainConfig:
    """Trials use random weights; memory and time do not depend on them."""
    settings = config.model.language_model
    if settings is not None:
        settings = replace(settings, weights="random")
        config = replace(config, model=replace(config.model, language_model=settings))
    if config.training.freeze_steps is not None:
        # The budget is that of the steps that train everything.
        config = replace(config, training=replace(config.training, freeze=(), freeze_steps=None))
    return replace(config, init_from=None)


def _record(
    result: SearchResult, search: Search, described: dict, config: TrainConfig, seconds: float
) -> Calibration:
    shape = search.population.shape(result.frame_budget)
    table = None
    if search.population.conversations is None:
        bins = BucketTable.derive(search.population.lengths, shape, config.data.buckets)
        table = bucket_sizes(bins, search.population.shape(result.largest))
    replay = result.replay
    assert replay.predicted_bytes is not None
    assert replay.error is not None
    calibration = Calibration(
        fingerprint=store.fingerprint(described),
        made_for=described,
        frame_budget=result.frame_budget,
        token_budget=shape.token_budget,
        max_sequences=shape.max_sequences,
        limited_by=result.limited_by,
        largest_frame_budget=result.largest,
        target_bytes=search.target,
        margin=config.calibration.margin,
        predicted_bytes=replay.predicted_bytes,
        measured_bytes=replay.measured.peak_bytes,
        prediction_error=replay.error,
        audio_seconds_per_second=replay.measured.speed,
        memory_model=asdict(result.memory),
        speed_model=asdict(result.speed),
        bucket_batch_sizes=[
            [round(frames * shape.framing.seconds, 2), tokens, size]
            for (frames, tokens), size in zip(table.bins, table.batch_sizes, strict=True)
        ]
        if table is not None
        else [],
        trials=[asdict(trial) for trial in result.trials],
        seconds=seconds,
    )
    store.save(calibration, table, shape.framing)
    return calibration


def read_population(config: TrainConfig, tokenizer: Tokenizer) -> Population:
    """Return the lengths of the corpus, in budgets that drop nothing."""
    data = replace(config.data, frame_budget=_UNLIMITED_FRAMES)
    corpus = load_corpus(replace(config, data=data), tokenizer, None)
    # Imported here so that a model can be trained without the packages that read data.
    from effasr.data.conversation.corpus import ConversationCorpus

    conversations = None
    if isinstance(corpus, ConversationCorpus):
        conversations = Conversations.of(corpus, config.data.mix, config.model)
    texts = None
    if corpus.text is not None:
        texts = Texts(corpus.text, data.text_token_budget, text_costs(config, tokenizer))
    return Population.of(
        corpus.lengths,
        config.data.token_budget,
        config.data.max_sequences,
        config.model.features.framing,
        transducer=config.model.transducer is not None,
        conversations=conversations,
        texts=texts,
    )


def target_bytes(
    settings: CalibrationConfig, device: torch.device, environment: Mapping[str, str]
) -> int:
    """Return the bytes that this process may take: of a GPU, or its share of the host."""
    if settings.target_bytes is not None:
        return settings.target_bytes
    sharing = 1 if device.type == "cuda" else int(environment.get("LOCAL_WORLD_SIZE", 1))
    return int(settings.target_share * total_bytes(device) / sharing)


def on_rank_zero(
    work: Callable[[Callable[[], None]], T], context: DistributedContext, every_s: float
) -> T:
    """Call ``work`` on rank 0 alone, and return its result on all ranks, which call this.

    A collective must not wait longer than its timeout: ``work`` gets a function to call regularly,
    which broadcasts every ``every_s`` seconds that it is still running. An error on rank 0 ends it.
    """
    if context.size > 1 and not context.is_main:
        while True:
            done, value = context.broadcast((False, None))
            if done:
                return value  # type: ignore[return-value]
    last = time.monotonic()

    def alive() -> None:
        nonlocal last
        if context.size > 1 and time.monotonic() - last >= every_s:
            context.broadcast((False, None))
            last = time.monotonic()

    value = work(alive)
    context.broadcast((True, value))
    return value
