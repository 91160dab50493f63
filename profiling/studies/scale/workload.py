"""The cost of a step on one GPU, and sources of slowness."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BUCKET_BYTES = 25 * 2**20
"""Gradients that `DistributedDataParallel` sends at once, by default."""
COUNTS_BYTES = 1024
"""About what the sums of a step hold: `effasr.training.step_stats.StepCounts` and the losses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A step of one GPU.

    Attributes:
        step_s: Seconds of forward, backward and update, without communication and slowdown.
        samples: Samples of the step of one GPU, in any unit: utterances, or seconds of audio.
        parameters: Number of parameters of the model.
        layers: Number of layers, which fsdp2 gathers one at a time.
        backward: Part of ``step_s`` that is backward.
        overlap: Last part of the backward, as a fraction, during which gradients can be sent.
        gradient_bytes: Bytes per parameter that ddp exchanges for gradients.
        gathered_bytes: Bytes per parameter that fsdp2 gathers.
        weight_bytes: Bytes per parameter that averaging and gossip exchange.
        overhead_s: Seconds of a step in addition to ``step_s``, the same on a slow node.
    """

    step_s: float
    samples: float
    parameters: float
    layers: int = 24
    backward: float = 2 / 3
    overlap: float = 0.9
    gradient_bytes: float = 4.0
    gathered_bytes: float = 2.0
    weight_bytes: float = 4.0
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("step_s", "samples", "parameters", "layers"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"`{name}` must be positive, but is {getattr(self, name)}.")
        for name in ("backward", "overlap"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"`{name}` must be a part, from 0 to 1, but is {getattr(self, name)}."
                )
        if self.overhead_s < 0:
            raise ValueError(f"`overhead_s` must be at least 0, but is {self.overhead_s}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stragglers:
    """Causes of differences in speed between GPUs.

    Attributes:
        slow_nodes: Factors by which the first nodes compute more slowly, one for each; the others
            have the speed of `Workload`.
        slow_link: Factor by which the network of the first slow node is slower, if there are
            several.
        jitter: Standard deviation of the time of a step over its mean, drawn anew for each GPU and
            step from a lognormal distribution.
        pauses_per_hour: Number of pauses of each node per hour, each with all of its GPUs.
        pause_s: Mean length of a pause, exponentially distributed.
    """

    slow_nodes: tuple[float, ...] = ()
    slow_link: float = 1.0
    jitter: float = 0.0
    pauses_per_hour: float = 0.0
    pause_s: float = 0.0

    def __post_init__(self) -> None:
        for factor in (*self.slow_nodes, self.slow_link):
            if not 1 <= factor < math.inf:
                raise ValueError(
                    f"`slow_nodes` and `slow_link` must be factors of at least 1, but one is "
                    f"{factor}."
                )
        for name in ("jitter", "pauses_per_hour", "pause_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"`{name}` must be at least 0, but is {getattr(self, name)}.")

    def factor(self, node: int) -> float:
        """Return the factor by which a node computes more slowly."""
        return self.slow_nodes[node] if node < len(self.slow_nodes) else 1.0

    @property
    def most(self) -> float:
        """The factor of the slowest node."""
        return max(self.slow_nodes, default=1.0)


def draw(
    workload: Workload,
    stragglers: Stragglers,
    nodes: Sequence[int],
    steps: int,
    random: np.random.Generator,
) -> np.ndarray:
    """Return the computing time of steps.

    Args:
        workload: Workload of each GPU.
        stragglers: Sources of slowness.
        nodes: Node of each of the GPUs, in ascending order.
        steps: Number of steps.
        random: Random generator of the jitter.

    Returns:
        float64 (steps, GPUs), seconds.
    """
    ids = np.asarray(nodes)
    base = workload.step_s * np.array([stragglers.factor(int(node)) for node in ids])
    seconds = np.broadcast_to(base, (steps, len(ids)))
    if stragglers.jitter:
        sigma = math.sqrt(math.log1p(stragglers.jitter**2))
        seconds = seconds * random.lognormal(-(sigma**2) / 2, sigma, seconds.shape)
    if stragglers.pauses_per_hour and stragglers.pause_s:
        distinct, of_gpu = np.unique(ids, return_inverse=True)
        mean = np.array([workload.step_s * stragglers.factor(int(node)) for node in distinct])
        counts = random.poisson(stragglers.pauses_per_hour / 3600 * mean, (steps, len(distinct)))
        # A sum of exponential lengths; of none it is 0.
        lengths = random.standard_gamma(np.maximum(counts, 1)) * stragglers.pause_s
        seconds = seconds + np.where(counts > 0, lengths, 0.0)[:, of_gpu]
    return seconds


@dataclass(frozen=True, slots=True)
class Observed:
    """Measurements of a run.

    Attributes:
        step_s: Mean step without waiting for data.
        jitter: Standard deviation of a step over its mean.
        audio_seconds: Mean audio of a step, over all of its ranks.
    """

    step_s: float
    jitter: float
    audio_seconds: float


def observe(path: Path) -> Observed:
    """Read the metrics.jsonl of a run, of one GPU if communication is not to count twice.

    The first line is left out: it holds what is done but once. A line is the mean of the steps
    since the line before, so the deviation of a step is that of the lines times the root of how
    many they hold, as if steps were independent.

    Raises:
        ValueError: There are fewer than two lines, or one is not of this version.
    """
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = json.loads(text)
            own = line["step_s"] - line["data_wait_s"]
            lines.append((int(line["step"]), float(own), float(line["audio_seconds"])))
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: not a line of metrics ({error}).") from error
    if len(lines) < 2:
        raise ValueError(f"{path}: must have two lines of metrics, but has {len(lines)}.")
    at, seconds, audio = (np.array(column, dtype=np.float64) for column in zip(*lines, strict=True))
    weights, seconds, audio = np.diff(at), seconds[1:], audio[1:]
    if (weights <= 0).any():
        raise ValueError(f"{path}: the steps of its lines must ascend.")
    mean = float(np.average(seconds, weights=weights))
    spread = np.sqrt(np.average((seconds - mean) ** 2 * weights, weights=weights))
    return Observed(mean, float(spread) / mean, float(np.average(audio, weights=weights)))


def count_parameters(name: str) -> tuple[int, int]:
    """Return parameters and layers of a published model, or of a recipe.

    Raises:
        ValueError: There is no such model.
    """
    # Here, since nothing else needs torch.
    import torch

    from effasr import config
    from effasr.model.asr import ASRModel
    from effasr.model.presets import PRESET_VOCABULARIES, PRESETS
    from effasr.training.config import TrainConfig

    model = PRESETS[name] if name in PRESETS else config.load(TrainConfig, name).model
    with torch.device("meta"):
        built = ASRModel(model, PRESET_VOCABULARIES.get(name, 1024))
    layers = model.encoder.layers + (model.decoder.layers if model.decoder is not None else 0)
    return sum(parameter.numel() for parameter in built.parameters()), layers
