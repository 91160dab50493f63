"""Computes the figures of a run from the records of its processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from effasr.data.batch import Batch
from effasr.data.index.corpus import Corpus
from effasr.data.loader import Loader
from effasr.data.tokenizer import load_tokenizer
from effasr.model.asr import ASRModel
from effasr.training.config import TrainConfig
from straggler.corpus import held_out_data
from straggler.launch import Window
from straggler.settings import Settings


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps made by a rank.

    Attributes:
        began: Time at which the first of its steps began.
        times: float64 (n,), time at which each of its steps ended.
        samples: int64 (n,), utterances of each.
        micro_batches: int64 (n,), of each.
    """

    began: float
    times: np.ndarray
    samples: np.ndarray
    micro_batches: np.ndarray

    @classmethod
    def read(cls, path: Path) -> Steps:
        """Read the log of a rank."""
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        columns = ([line[name] for line in lines] for name in ("time", "samples", "micro_batches"))
        times, samples, micro_batches = map(np.array, columns)
        return cls(lines[0]["began"], times, samples, micro_batches)

    def rate(self, window: Window) -> float:
        """Return samples per second between the ends of two steps in a window.

        So that no part of a step counts: of a slow node, it may have but a few.
        """
        inside = (self.times >= window.begin) & (self.times <= window.end)
        times, samples = self.times[inside], self.samples[inside]
        if len(times) < 2:
            return float(samples.sum()) / (window.end - window.begin)
        return float(samples[1:].sum() / (times[-1] - times[0]))

    def count(self, window: Window) -> int:
        """Return the steps that ended in a window."""
        return int(((self.times >= window.begin) & (self.times <= window.end)).sum())

    def until(self, time: float) -> int:
        """Return the samples up to a time."""
        return int(self.samples[self.times <= time].sum())


@dataclass(frozen=True, slots=True)
class Point:
    """The learners at some time.

    Attributes:
        seconds: Time since all ranks had begun their first step, in seconds.
        samples: Utterances that all ranks have trained on since the run began.
        loss: Held-out loss of the learners' mean: cross-entropy per token, in nats.
        consensus: Root mean square distance of the learners from their mean, over its norm.
    """

    seconds: float
    samples: int
    loss: float
    consensus: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run.

    Attributes:
        samples_per_s: Utterances a second, of all ranks.
        micro_batch: Mean utterances of a micro-batch.
        node_steps: Steps of each node in the window: those of its first process.
        consensus: Mean of the values of `Point` in the window.
        staleness: Reported staleness: updates of the first learner between the copy of its weights
            from which a difference is computed and its addition; None if no run reports it.
        points: Points in order of time, from the beginning of the run.
        parameters: Number of parameters of the model.
    """

    samples_per_s: float
    micro_batch: float
    node_steps: list[int]
    consensus: float
    staleness: float | None
    points: list[Point]
    parameters: int


def outcome(settings: Settings, config: TrainConfig, window: Window) -> Outcome:
    """Read what the processes wrote, and evaluate their weights."""
    ranks = range(settings.nodes * settings.per_node)
    steps = [Steps.read(settings.log(rank)) for rank in ranks]
    samples = sum(int(one.samples.sum()) for one in steps)
    micro_batches = sum(int(one.micro_batches.sum()) for one in steps)
    judge = Judge(config)
    began = max(one.began for one in steps)
    points, inside = [], []
    for time, weights in _weights(settings):
        if time <= window.end:
            loss, consensus = judge(weights)
            seen = sum(one.until(time) for one in steps)
            points.append(Point(time - began, seen, loss, consensus))
            inside += [consensus] if time >= window.begin else []
    if not inside:
        raise RuntimeError(
            f"no rank wrote its weights within {window.end - window.begin:g} s: measure longer"
        )
    return Outcome(
        samples_per_s=sum(one.rate(window) for one in steps),
        micro_batch=samples / micro_batches,
        node_steps=[one.count(window) for one in steps[:: settings.per_node]],
        consensus=float(np.mean(inside)),
        staleness=_staleness(Path(config.output) / config.name / "metrics.jsonl"),
        points=points,
        parameters=judge.parameters,
    )


def _staleness(path: Path) -> float | None:
    """Return the mean over the metrics lines that have a value; a slow run may have none."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = [value for line in lines if (value := json.loads(line).get("staleness")) is not None]
    return float(np.mean(found)) if found else None


def _weights(settings: Settings) -> list[tuple[float, list[np.ndarray]]]:
    """Return the times of all ranks' weight reports with each rank's newest one, without gaps."""
    ranks = range(settings.nodes * settings.per_node)
    told = [sorted(Path(settings.folder).glob(f"weights_{rank}_*.npy")) for rank in ranks]
    numbers = [[int(path.stem.rsplit("_", 1)[1]) for path in paths] for paths in told]
    found = []
    for number in sorted({number for row in numbers for number in row}):
        newest = [int(np.searchsorted(row, number, side="right")) - 1 for row in numbers]
        if min(newest) < 0:
            continue
        # Ranks that go in step count only where all have told the same step.
        if settings.in_step and any(
            row[at] != number for row, at in zip(numbers, newest, strict=True)
        ):
            continue
        loaded = [np.load(paths[at]) for paths, at in zip(told, newest, strict=True)]
        found.append((max(float(one[0]) for one in loaded), [one[2:] for one in loaded]))
    return found


class Judge:
    """Evaluates the mean of several learners on what is held out.

    Args:
        config: Configuration of the run.
    """

    def __init__(self, config: TrainConfig) -> None:
        data = held_out_data(config.data)
        tokenizer = load_tokenizer(data.tokenizer)
        corpus = Corpus.load(list(data.train), tokenizer, data)
        self._model = ASRModel(config.model, tokenizer.vocab_size).eval()
        self._batches: Sequence[Batch] = next(iter(Loader(corpus, data).steps())).batches
        self._state = self._model.state_dict()
        self._is_weight = torch.cat(
            [
                torch.full((value.numel(),), name in dict(self._model.named_parameters()))
                for name, value in self._state.items()
            ]
        ).numpy()

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return int(self._is_weight.sum())

    @torch.no_grad()
    def __call__(self, learners: Sequence[np.ndarray]) -> tuple[float, float]:
        """Return the loss of the learners' mean, and their distance from it; see `Point`."""
        stacked = np.stack(learners)
        mean = stacked.mean(axis=0)
        weights, center = stacked[:, self._is_weight], mean[self._is_weight]
        apart = np.sqrt(((weights - center) ** 2).sum(axis=1).mean())
        pieces = torch.from_numpy(mean).split([value.numel() for value in self._state.values()])
        for value, piece in zip(self._state.values(), pieces, strict=True):
            value.copy_(piece.view_as(value))
        total = sum(float(self._model(batch).cross_entropy) for batch in self._batches)
        targets = sum(batch.num_targets for batch in self._batches)
        return total / targets, float(apart / np.linalg.norm(center))


def at_time(points: Sequence[Point], seconds: float) -> float | None:
    """Return the loss at some time, by straight lines between points; None outside of them."""
    return _between([point.seconds for point in points], points, seconds)


def at_samples(points: Sequence[Point], samples: float) -> float | None:
    """Return the loss after so many samples, likewise."""
    return _between([point.samples for point in points], points, samples)


def _between(where: Sequence[float], points: Sequence[Point], at: float) -> float | None:
    if not where or not where[0] <= at <= where[-1]:
        return None
    return float(np.interp(at, where, [point.loss for point in points]))
