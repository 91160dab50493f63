"""The ladder of sampling strategies, predicted and measured on the CPU in one run.

    python profiling/studies/ladder.py LIST [--csv FILE] [--picture FILE.svg] [--seconds 100]

Predicted: padding, mean batch, imbalance of the ranks and FLOPs of an hour of audio, for the list
as it is, the ranks of --world-size and a large model. Measured: CPU seconds for an hour of audio,
with a small model, of `effasr.training.step.train_step` on noise. For that all lengths and budgets
are shortened (--scale), so that steps hold as many utterances as those that are predicted; the
steps of all strategies take turns, in a random order, until --seconds are spent.

`calibrated` is sync_bucketed_2d with the batch sizes of `effasr calibrate`: as many utterances of a
bucket as the memory holds which packed takes for its budget, by a model of memory that is fitted to
trials of the small model.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import rows as csv_rows

from effasr import config
from effasr.data.atomic_files import write_atomically
from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example, collate
from effasr.data.features.frame_geometry import Framing
from effasr.data.sampling.bucket_table import BucketTable
from effasr.data.sampling.cost import CostModel
from effasr.data.sampling.plan import UtteranceLengths
from effasr.distributed.process_group import DistributedContext
from effasr.planning.picture import Panel, draw
from effasr.planning.request import Request
from effasr.planning.selection import Selection
from effasr.planning.study import LADDER, Outcome, Planned, StudyOptions, compare, plan_by
from effasr.planning.text import percent
from effasr.training.build import build_model, build_train_state
from effasr.training.calibration.search import Search, bucket_sizes, load_of
from effasr.training.calibration.settings import CalibrationConfig
from effasr.training.calibration.trial import Measurement, measure
from effasr.training.calibration.trial import Request as TrialRequest
from effasr.training.calibration.workload import Population
from effasr.training.calibration.workload import Workload as CalibrationWorkload
from effasr.training.config import TrainConfig, resolve_losses
from effasr.training.memory import total_bytes
from effasr.training.step import TrainState, train_step

_VOCABULARY = 512
_MODEL = "small"
_BY_BUCKETS, _CALIBRATED = "sync_bucketed_2d", "calibrated"
RUNGS = (*LADDER[:-1], _CALIBRATED, LADDER[-1])
"""All that is compared, each a step better than the one before."""


@dataclass(slots=True)
class Measured:
    """Cost of the steps of a strategy.

    Attributes:
        cpu_seconds: CPU seconds of this process, in forward, backward and update.
        audio_seconds: Audio seconds of their utterances, shortened.
        steps: Number of measured steps.
        of_steps: Number of steps of an epoch.
    """

    of_steps: int
    cpu_seconds: float = 0.0
    audio_seconds: float = 0.0
    steps: int = 0

    @property
    def per_hour(self) -> float:
        """CPU seconds for an hour of (shortened) audio."""
        return 3600 * self.cpu_seconds / self.audio_seconds


@dataclass(frozen=True, slots=True)
class Rung:
    """A strategy: predicted on the list, measured on the shortened list."""

    outcome: Outcome
    measured: Measured


def shorten(selection: Selection, scale: float) -> Selection:
    """Return the utterances and budgets, at a part of their length."""

    def part(values: np.ndarray) -> np.ndarray:
        return np.maximum(1, np.rint(values * scale)).astype(np.int32)

    # A prompt of one token is left of an empty text.
    tokens = np.maximum(2, part(selection.lengths.tokens)).astype(np.int32)
    lengths = UtteranceLengths(part(selection.lengths.frames), tokens)
    shape, (frames, budget) = selection.shape, (int(lengths.frames.sum()), int(tokens.sum()))
    frame_budget = round(shape.frame_budget * scale)
    return replace(
        selection,
        lengths=lengths,
        seconds=lengths.frames * Framing().seconds,
        shape=StaticShape(
            frame_budget,
            # In proportion to the texts as they were rounded.
            max(int(tokens.max()), -(-frame_budget * budget // frames)),
            shape.max_sequences,
            longest_frames=int(lengths.frames.max()),
            longest_tokens=int(tokens.max()),
        ),
    )


@dataclass(slots=True)
class Workload:
    """Batches of noise, of the lengths of a plan.

    Attributes:
        selection: Lengths of the utterances.
        planned: Plan of one strategy.
        order: Steps in the order of execution.
    """

    selection: Selection
    planned: Planned
    order: Iterator[int] = field(init=False)

    def __post_init__(self) -> None:
        steps = self.planned.plans[0].num_steps
        self.order = iter(np.random.default_rng(0).permutation(steps).tolist())

    def next_step(self) -> list[Batch] | None:
        """Return the micro-batches of the next step; None after the last."""
        number = next(self.order, None)
        if number is None:
            return None
        return self.step(number)

    def step(self, number: int) -> list[Batch]:
        """Return the micro-batches of a step."""
        plan, shape = self.planned.plans[0], self.planned.shape
        if shape is not None:
            # The CPU goes from one sequence to the next, and takes its time even for empty ones.
            shape = replace(shape, max_sequences=int(np.diff(plan.offsets).max()))
        return [
            collate(
                [self._example(index) for index in micro_batch.tolist()],
                shape,
                eos_id=1,
                pad_id=0,
                padded=shape is None,
            )
            for micro_batch in plan.step(number)
        ]

    def _example(self, index: int) -> Example:
        random = np.random.default_rng(index)
        lengths = self.selection.lengths
        # As many samples as make these frames, and none beyond.
        samples = int(lengths.frames[index]) * Framing().samples
        text = random.integers(2, _VOCABULARY, int(lengths.tokens[index]) - 1)
        audio = random.standard_normal(samples, dtype=np.float32)
        return Example(str(index), 0.1 * audio, [2], text.tolist(), monotonic=True)


def calibrated(selection: Selection, buckets: int) -> BucketTable:
    """Return batches by bucket that need as much memory as packed ones of the frame budget.

    Args:
        selection: Whose lengths the small model is tried with.
        buckets: Ranges of durations.
    """
    settings = _settings()
    population = Population.of(selection.lengths)
    mapping, device = config.to_mapping(settings), torch.device("cpu")
    memory_bytes = total_bytes(device)

    def trial(work: CalibrationWorkload) -> Measurement:
        return measure(TrialRequest(mapping, _VOCABULARY, "cpu", memory_bytes, 1, work))

    search = Search(population, settings.model, CalibrationConfig(), memory_bytes, 1, trial)
    memory = search.memory_model()
    packed = population.workload(selection.shape.frame_budget, batches=1)
    limit = memory.predict(load_of(packed, settings.model))
    bins = BucketTable.derive(selection.lengths, selection.shape, buckets)
    return bucket_sizes(bins, memory, settings.model, limit)


def lengthen(table: BucketTable, selection: Selection, scale: float) -> BucketTable:
    """Return a table of shortened lengths, for the lengths as they are."""
    bins = [(math.ceil(frames / scale), math.ceil(tokens / scale)) for frames, tokens in table.bins]
    lengths = selection.lengths
    frames, tokens = bins[-1]
    bins[-1] = max(frames, int(lengths.frames.max())), max(tokens, int(lengths.tokens.max()))
    return BucketTable(tuple(bins), table.batch_sizes)


def plan_rung(
    name: str, selection: Selection, cost: CostModel, options: StudyOptions, table: BucketTable
) -> Planned:
    """Plan by a strategy, or by the one with calibrated batches."""
    if name == _CALIBRATED:
        return plan_by(_BY_BUCKETS, selection, cost, replace(options, table=table))
    return plan_by(name, selection, cost, options)


def measure_all(
    selection: Selection,
    cost: CostModel,
    options: StudyOptions,
    table: BucketTable,
    seconds: float,
) -> dict[str, Measured]:
    """Run steps of all rungs in turn, until the time is spent or all steps are done."""
    train_state = _train_state()
    loads = {
        name: Workload(selection, plan_rung(name, selection, cost, options, table))
        for name in RUNGS
    }
    found = {name: Measured(load.planned.plans[0].num_steps) for name, load in loads.items()}
    # So that no strategy pays for what is done but once.
    _timed(train_state, loads["packed"].step(0)[:1], 0)
    ends = time.process_time() + seconds
    for step in itertools.count():
        done = True
        for name, load in loads.items():
            if (batches := load.next_step()) is None:
                continue
            done = False
            found[name].cpu_seconds += _timed(train_state, batches, step)
            found[name].audio_seconds += sum(batch.audio_seconds for batch in batches)
            found[name].steps += 1
        if done or time.process_time() > ends:
            return found
    raise AssertionError("unreachable")


def _settings() -> TrainConfig:
    """Return the configuration of a small encoder and decoder, on one core."""
    # Noise has no alignment for CTC to find; lengths of lists are in frames of 80 ms.
    changes = ["model.ctc=false", "loss={ctc_weight: 0.0}", "model.encoder.subsampling=8"]
    settings = config.load(
        TrainConfig, _MODEL, [*changes, "training.precision=float32", "training.threads=1"]
    )
    return replace(settings, loss=resolve_losses(settings.loss, settings.model))


def _train_state() -> TrainState:
    torch.set_num_threads(1)
    settings = _settings()
    context = DistributedContext(0, 1, torch.device("cpu"))
    return build_train_state(
        settings, build_model(settings, _VOCABULARY, None, context.device), context
    )


def _timed(train_state: TrainState, batches: list[Batch], step: int) -> float:
    """CPU seconds: what others do on this machine at the same time does not count."""
    started = time.process_time()
    train_step(train_state, batches, step).values.read()
    return time.process_time() - started


def rungs(
    paths: Sequence[Path], options: StudyOptions, *, budget: int, scale: float, seconds: float
) -> tuple[Selection, list[Rung]]:
    """Predict and measure all strategies on a list."""
    request = Request.of(manifests=paths, frame_budget=budget)
    _, selection = request.read()
    short = shorten(selection, scale)
    table = calibrated(short, options.buckets)
    predicted = compare(selection, LADDER, request.cost, options)
    by_table = replace(options, table=lengthen(table, selection, scale))
    (rung,) = compare(selection, [_BY_BUCKETS], request.cost, by_table)
    predicted.insert(RUNGS.index(_CALIBRATED), replace(rung, strategy=_CALIBRATED))
    found = measure_all(short, request.cost, options, table, seconds)
    return selection, [Rung(outcome, found[outcome.strategy]) for outcome in predicted]


def table(found: Sequence[Rung]) -> str:
    """Markdown."""
    lines = [
        "| strategy | padding: frames / tokens / FLOPs % | mean batch: utterances / audio s | "
        "imbalance p99 % | TFLOP / audio h | CPU s / audio h |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for rung in found:
        report = rung.outcome.report
        padding = (report.padding_frames, report.padding_tokens, report.padding_flops)
        lines.append(
            f"| {rung.outcome.strategy} | {' / '.join(map(percent, padding))} | "
            f"{report.batch_utterances:.0f} / {report.batch_audio_seconds:.0f} | "
            f"{percent(report.rank_imbalance_p99)} | {report.flops_per_audio_hour / 1e12:.1f} | "
            f"{rung.measured.per_hour:.1f} |"
        )
    return "\n".join(lines) + "\n"


def write_csv(path: Path, name: str, scale: float, found: Sequence[Rung]) -> None:
    """Write a row for each strategy."""
    rows = [
        {
            "lengths": name,
            "strategy": rung.outcome.strategy,
            **{key: _rounded(value) for key, value in asdict(rung.outcome.report).items()},
            "measured_scale": scale,
            "measured_steps": rung.measured.steps,
            "measured_of_steps": rung.measured.of_steps,
            "measured_audio_seconds": _rounded(rung.measured.audio_seconds),
            "measured_cpu_seconds": _rounded(rung.measured.cpu_seconds),
            "cpu_seconds_per_audio_hour": _rounded(rung.measured.per_hour),
        }
        for rung in found
    ]
    csv_rows.write(path, list(rows[0]), rows)


def write_picture(path: Path, title: str, subtitle: str, found: Sequence[Rung]) -> None:
    """Padding, mean batch, predicted and measured work, side by side."""
    reports = [rung.outcome.report for rung in found]
    padding = [report.padding_flops for report in reports]
    batch = [report.batch_audio_seconds for report in reports]
    work = [report.flops_per_audio_hour / 1e12 for report in reports]
    measured = [rung.measured.per_hour for rung in found]
    panels = [
        Panel("padding, % of FLOPs", [1 - p for p in padding], [*map(percent, padding)], padding),
        Panel("mean batch, s of audio", batch, [f"{value:.0f}" for value in batch]),
        Panel("predicted, TFLOP / audio h", work, [f"{value:.1f}" for value in work]),
        Panel("measured, CPU s / audio h", measured, [f"{value:.1f}" for value in measured]),
    ]
    names = [rung.outcome.strategy for rung in found]
    legend = ("utterances", "padding")
    picture = draw(names, panels, title=title, subtitle=subtitle, legend=legend)
    write_atomically(path, picture.encode())


def _rounded(value: object) -> object:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lists", nargs="+", type=Path, metavar="LIST", help="one corpus")
    parser.add_argument("--frame-budget", type=int, default=8000, metavar="FRAMES")
    parser.add_argument("--world-size", type=int, default=8, metavar="N")
    parser.add_argument("--scale", type=float, default=0.5, help="of the lengths that are measured")
    parser.add_argument("--seconds", type=float, default=100.0, help="of CPU time, about")
    parser.add_argument("--csv", type=Path, metavar="FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg")
    given = parser.parse_args(arguments)
    selection, found = rungs(
        given.lists,
        StudyOptions(world_size=given.world_size),
        budget=given.frame_budget,
        scale=given.scale,
        seconds=given.seconds,
    )
    name = "+".join(path.stem for path in given.lists)
    sys.stdout.write(table(found))
    if given.csv is not None:
        write_csv(given.csv, name, given.scale, found)
    if given.picture is not None:
        setting = (
            f"{len(selection):,} utterances, {given.world_size} ranks, {given.frame_budget:,} "
            "encoder frames a micro-batch"
        )
        write_picture(given.picture, f"The same audio, {name}", setting, found)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"ladder: {error}")
