"""Batching strategies at the memory of one micro-batch: batches, steps, hours and GPUs.

The first strategies are where most trainings begin: a number of utterances for all batches, as many
of the longest as memory holds. Buckets of short utterances then leave most of it empty.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from effasr.data.index.selection import Selection
from effasr.data.sampling.cost import CostModel
from effasr.evaluation.tables import to_text
from effasr.planning.report import Panel, draw, percent
from effasr.planning.study import LADDER, StrategyResult, StudyOptions, compare
from effasr.training.calibration.calibrate import LinearModel
from effasr.untrusted.documents import read_json

FIXED = ("random", "bucketed")  # strategies that are also planned with a number of utterances
_FIXED_SUFFIX = ", fixed size"
_BACKWARD = 3  # FLOPs of a training step, in those of its forward


@dataclass(frozen=True, slots=True)
class Device:
    """Budgets and speed of a GPU, as `effasr calibrate` measured them, or a speed as assumed."""

    frame_budget: int | None = None  # of the calibration
    token_budget: int | None = None
    speed: LinearModel | None = None  # seconds of a micro-batch
    flops: float | None = None  # sustained FLOP/s of training, without a calibration

    @classmethod
    def read(cls, path: Path) -> "Device":
        """Read a file of calibrations; raises ValueError for another."""
        content = read_json(path)
        try:
            speed = LinearModel(**content["speed_model"])
            return cls(content["frame_budget"], content["token_budget"], speed)
        except (KeyError, TypeError):
            raise ValueError(
                f"`--calibration` must be a file of `effasr calibrate`, but {path} is none: "
                "effasr calibrate RECIPE prints the path of its own."
            ) from None


def fixed_size(selection: Selection) -> int:
    """Return how many of the longest utterances fit in the memory of a micro-batch."""
    return max(1, selection.shape.frame_budget // int(selection.lengths.frames.max()))


@dataclass(frozen=True, slots=True)
class StrategySummary:
    """A strategy's figures; hours are None where nothing tells the speed of a GPU."""

    strategy: str
    batch_utterances: float
    batch_audio_seconds: float  # of a micro-batch, mean
    memory: float  # mean share of the frames of a micro-batch that its padded rows take
    padding_flops: float
    steps: int  # of an epoch
    relative_time: float  # of an epoch, in those of packed
    hours: float | None  # of an epoch
    gpu_hours: float | None
    gpus_for_batch: int  # that have packed's audio in a step, with a micro-batch each


def compute(
    selection: Selection,
    cost: CostModel,
    options: StudyOptions,
    device: Device,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[StrategySummary]:
    """Plan the corpus by each strategy within the memory of one micro-batch."""
    fixed = replace(options.strategy, batch_size=fixed_size(selection), batch_duration=None)
    results = [
        replace(result, strategy=result.strategy + _FIXED_SUFFIX)
        for result in compare(selection, FIXED, cost, replace(options, strategy=fixed))
    ]
    results += compare(selection, LADDER, cost, options, progress)
    return _summarise(results, selection, options, device)


def _summarise(
    results: Sequence[StrategyResult], selection: Selection, options: StudyOptions, device: Device
) -> list[StrategySummary]:
    rounds = math.ceil(options.micro_batches / options.world_size)
    corpus_s, seconds = float(selection.seconds.sum()), []
    shape = selection.shape
    rows = []
    for result in results:
        report = result.report
        if not report.batch_audio_seconds:
            raise ValueError(
                "`--what-if` must have utterances for a batch of each strategy, but "
                f"{len(selection)} make none of {result.strategy}: plan a larger corpus, or use "
                "`--strategy all`."
            )
        frames = report.batch_audio_seconds / shape.framing.seconds
        rows.append(frames / max(1 - report.padding_frames, 1e-9))
        if device.speed is not None:
            micro_batch_s = device.speed.predict(rows[-1])
        else:
            micro_batch_s = _BACKWARD * report.step_flops / options.micro_batches
            micro_batch_s /= device.flops or 1.0
        # A step ends with its slowest rank. Of an epoch, each strategy leaves another part.
        step_s = rounds * micro_batch_s * (1 + report.rank_imbalance_mean)
        audio_s = report.batch_audio_seconds * options.micro_batches
        seconds.append(step_s * corpus_s / audio_s)
    known = device.speed is not None or device.flops is not None
    best = results[-1].report.batch_audio_seconds
    return [
        StrategySummary(
            strategy=result.strategy,
            batch_utterances=result.report.batch_utterances,
            batch_audio_seconds=result.report.batch_audio_seconds,
            memory=row / shape.frame_budget,
            padding_flops=result.report.padding_flops,
            steps=math.ceil(corpus_s / (result.report.batch_audio_seconds * options.micro_batches)),
            relative_time=epoch_s / seconds[-1],
            hours=epoch_s / 3600 if known else None,
            gpu_hours=epoch_s / 3600 * options.world_size if known else None,
            gpus_for_batch=math.ceil(
                options.world_size * best / result.report.batch_audio_seconds - 1e-6
            ),
        )
        for result, row, epoch_s in zip(results, rows, seconds, strict=True)
    ]


def table(summaries: Sequence[StrategySummary]) -> str:
    known = summaries[-1].hours is not None
    grid = Table(box=box.MARKDOWN)
    grid.add_column("strategy")
    names = ["utts", "audio s", "memory %", "FLOPs %", "steps", "time", "GPUs"]
    for name in [*names, *(["h", "GPU h"] if known else [])]:
        grid.add_column(name, justify="right")
    for row in summaries:
        hours = [f"{row.hours:.3g}", f"{row.gpu_hours:.3g}"] if known else []
        grid.add_row(
            row.strategy,
            f"{row.batch_utterances:.1f}",
            f"{row.batch_audio_seconds:.0f}",
            percent(row.memory),
            percent(row.padding_flops),
            f"{row.steps:,}",
            f"{row.relative_time:.2f}",
            f"{row.gpus_for_batch:,}",
            *hours,
        )
    return (
        "Mean micro-batch, the share of its memory that is used, padding of FLOPs, steps of an "
        "epoch, time of an epoch in that of packed, and GPUs that have packed's audio in a step "
        f"with a micro-batch each{', hours of an epoch' if known else ''}.\n\n{to_text(grid)}"
    )


def claims(summaries: Sequence[StrategySummary]) -> str:
    packed = summaries[-1]
    lines = []
    for row in summaries[:-1]:
        batch = packed.batch_audio_seconds / row.batch_audio_seconds
        gpus = row.gpus_for_batch / packed.gpus_for_batch
        lines.append(
            f"packed against {row.strategy}: batches {batch:.1f} times as large, epochs "
            f"{row.relative_time:.1f} times as fast, the same batch on 1/{gpus:.1f} of the GPUs"
        )
    return "\n".join(lines)


def assumptions(selection: Selection, device: Device, options: StudyOptions) -> str:
    shape = selection.shape
    longest = int(selection.lengths.frames.max()) * shape.framing.seconds
    if device.speed is not None:
        speed = "time as calibrated, by padded frames"
    elif device.flops is not None:
        speed = f"time by FLOPs at {device.flops / 1e12:g} TFLOP/s a GPU (--tflops)"
    else:
        speed = "time by FLOPs; --tflops X or --calibration FILE gives hours"
    return (
        f"Assumed: memory is that of {shape.frame_budget:,} encoder frames a micro-batch, padding "
        f"included; a fixed size is what holds the longest utterance, {longest:.1f} s: "
        f"{fixed_size(selection)}; {speed}, each step as long as its slowest rank's; small "
        f"batches run at the speed of large ones; {options.world_size} GPUs."
    )


def to_json(summaries: Sequence[StrategySummary]) -> str:
    return json.dumps({row.strategy: asdict(row) for row in summaries}, indent=2)


def picture(summaries: Sequence[StrategySummary], title: str, subtitle: str) -> str:
    """Return bars of batch, time and GPUs of each strategy, as SVG."""
    columns: tuple[tuple[str, Callable[[StrategySummary], Any], str], ...] = (
        ("audio of a batch, s", lambda row: row.batch_audio_seconds, ".0f"),
        ("time of an epoch", lambda row: row.relative_time, ".2f"),
        ("GPUs for packed's batch", lambda row: row.gpus_for_batch, ",d"),
    )
    panels = [
        Panel(
            name, [float(value(x)) for x in summaries], [format(value(x), spec) for x in summaries]
        )
        for name, value, spec in columns
    ]
    return draw([row.strategy for row in summaries], panels, title=title, subtitle=subtitle)
