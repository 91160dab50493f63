"""A corpus that exists only as lengths, and its batches as different systems make them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from bench.workload import LISTED, read_durations
from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example, collate
from effasr.data.features.frame_geometry import FASTCONFORMER, Framing
from effasr.data.sampling.packing import plan_epoch, suggest_token_budget
from effasr.data.sampling.plan import UtteranceLengths
from effasr.data.sampling.shuffle import shuffled

TOKENS_PER_SECOND = 3.6
PROMPT = (7, 4, 16, 5)
EOS, PAD = 3, 2
_NOISE_STARTS = 1_000_000
"""Samples of the noise where an utterance may begin."""


@dataclass(frozen=True)
class Workload:
    """A corpus that exists only as lengths.

    Attributes:
        seconds: Duration of each utterance, in seconds.
        lengths: Lengths of the utterances in frames and tokens.
        classes: Vocabulary size.
        framing: Mapping of samples to encoder frames.
    """

    seconds: list[float]
    lengths: UtteranceLengths
    classes: int
    framing: Framing = FASTCONFORMER

    @classmethod
    def of(
        cls, count: int, classes: int, longest: float, framing: Framing = FASTCONFORMER
    ) -> Workload:
        """Return utterances with the list's durations, in a fixed random order."""
        rng = np.random.default_rng(0)
        listed = np.minimum(np.array(read_durations(LISTED)), longest)
        seconds = rng.choice(listed, count)
        frames = [framing.frames(round(x * 16_000)) for x in seconds]
        tokens = [len(PROMPT) + max(1, round(TOKENS_PER_SECOND * x)) for x in seconds]
        lengths = UtteranceLengths(np.array(frames, np.int32), np.array(tokens, np.int32))
        return cls(seconds.tolist(), lengths, classes, framing)

    def example(self, index: int) -> Example:
        """Return a stretch of the noise, and random tokens."""
        rng = np.random.default_rng(index)
        begin = int(rng.integers(_NOISE_STARTS))
        noise = _noise(_NOISE_STARTS + round(max(self.seconds) * 16_000))
        audio = noise[begin : begin + round(self.seconds[index] * 16_000)]
        count = int(self.lengths.tokens[index]) - len(PROMPT)
        text = rng.integers(20, self.classes, count).tolist()
        return Example(str(index), audio, list(PROMPT), text, True)

    def shape(self, frame_budget: int) -> StaticShape:
        """Return the static shape of a budget."""
        return StaticShape(
            frame_budget,
            suggest_token_budget(self.lengths, frame_budget),
            max(8, frame_budget * self.framing.subsampling // 64),
            longest_frames=int(self.lengths.frames.max()),
            longest_tokens=int(self.lengths.tokens.max()),
            framing=self.framing,
        )


@cache
def _noise(samples: int) -> np.ndarray:
    """Drawn once: to draw the minutes of each batch takes longer than to train on them."""
    return 0.1 * np.random.default_rng(0).standard_normal(samples, dtype=np.float32)


def plan_of(system: str, workload: Workload, shape: StaticShape) -> list[list[int]]:
    """Return an epoch of a system: the utterances of each micro-batch, of which a step has one."""
    lengths = workload.lengths
    if system in ("random", "transformers"):
        return random_batches(lengths.frames, shape.frame_budget)
    if system.startswith("packed"):
        plan = plan_epoch(lengths, shape=shape, micro_batches=1, seed=0, epoch=0)
    else:
        from effasr.data.sampling.options import StrategyOptions
        from effasr.data.sampling.strategies import planner

        options = StrategyOptions(padded=True)
        plan = planner(system, lengths, shape=shape, micro_batches=1, options=options).plan(0)
    return [plan.step(step)[0].tolist() for step in range(plan.num_steps)]


def random_batches(frames: np.ndarray, budget: int) -> list[list[int]]:
    """Return batches of random utterances, as many as fit padded: the plan of ``random``.

    That one asks lhotse; this one is for where it is not installed. A test compares them.

    Args:
        frames: Frames of each utterance, (n,), none above the budget.
        budget: Frames of a padded batch, at most.
    """
    batches: list[list[int]] = [[]]
    longest = 0
    for index in shuffled(len(frames), 0, 0).tolist():
        wide = max(longest, int(frames[index]))
        if (len(batches[-1]) + 1) * wide > budget:
            batches.append([])
            wide = int(frames[index])
        batches[-1].append(index)
        longest = wide
    return batches


def representative(plan: list[list[int]], frames: np.ndarray, count: int) -> list[list[int]]:
    """Return micro-batches that stand for an epoch: spread over its micro-batches by their length.

    The first ones need not be typical. A sampler with buckets keeps long utterances back at first,
    and the throughput of a system depends on the length of the utterances.

    Args:
        plan: The utterances of each micro-batch of the epoch; empty ones are left out.
        frames: Frames of each utterance.
        count: How many to return; more than the epoch has begin again.
    """
    plan = [chosen for chosen in plan if chosen]
    if count >= len(plan):
        return [plan[number % len(plan)] for number in range(count)]
    ordered = sorted(plan, key=lambda chosen: float(frames[chosen].mean()))
    return [ordered[(2 * number + 1) * len(plan) // (2 * count)] for number in range(count)]


def batches_of(system: str, workload: Workload, shape: StaticShape, steps: int) -> Iterator[Batch]:
    """Yield as many micro-batches of an epoch, on the host; see `representative`."""
    plan = plan_of(system, workload, shape)
    for chosen in representative(plan, workload.lengths.frames, steps):
        examples = [workload.example(index) for index in chosen]
        static = shape if system == "packed_static" else None
        padded = not system.startswith("packed")
        yield collate(
            examples,
            static,
            eos_id=EOS,
            pad_id=PAD,
            padded=padded,
            framing=workload.framing,
        )
