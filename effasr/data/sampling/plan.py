"""Input and output of planners: lengths of utterances, and the plan of an epoch."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from effasr.data.batch import StaticShape


@dataclass(frozen=True, slots=True, eq=False)
class UtteranceLengths:
    """Lengths of utterances."""

    frames: np.ndarray  # int32 (n,), encoder frames
    tokens: np.ndarray  # int32 (n,), decoder tokens: prompt and text

    def __post_init__(self) -> None:
        for name in ("frames", "tokens"):
            array = getattr(self, name)
            if array.ndim != 1 or array.dtype != np.int32:
                raise ValueError(
                    f"`{name}` must be int32 (n,), but is {array.dtype} {array.shape}."
                )
            if array.size and array.min() < 0:
                worst = int(array.argmin())
                raise ValueError(f"`{name}[{worst}]` must be at least 0, but is {array[worst]}.")
        if self.frames.shape != self.tokens.shape:
            raise ValueError(
                f"`tokens` must have {len(self.frames)} entries, as `frames` has, "
                f"but has {len(self.tokens)}."
            )

    def __len__(self) -> int:
        return len(self.frames)

    def take(self, rows: np.ndarray | slice) -> "UtteranceLengths":
        return UtteranceLengths(self.frames[rows], self.tokens[rows])


@dataclass(frozen=True, slots=True, eq=False)
class EpochPlan:
    """Utterances of each micro-batch of an epoch, equal on every rank."""

    micro_batches: int  # Micro-batches of a global step, over all ranks
    indices: np.ndarray  # int32, the planned utterances, micro-batch by micro-batch
    # int64 (num_steps * micro_batches + 1,); micro-batch m is ``indices[offsets[m]:offsets[m +
    # 1]]``
    offsets: np.ndarray
    deferred: np.ndarray  # int32, the utterances left for the next epoch, in ascending order
    padding_frames: float  # Share of all frame rows that no utterance fills
    padding_tokens: float  # Share of all token rows that no utterance fills

    @property
    def num_steps(self) -> int:
        return (len(self.offsets) - 1) // self.micro_batches

    def step(self, step: int) -> list[np.ndarray]:
        """Return the micro-batches of a global step, each an array of utterance indices."""
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} of an epoch of {self.num_steps} steps")
        first = step * self.micro_batches
        bounds = self.offsets[first : first + self.micro_batches + 1]
        return [self.indices[begin:end] for begin, end in pairwise(bounds)]


class Planner(Protocol):
    """Plans epochs; each plan is a pure function of the planner's arguments and the epoch."""

    @property
    def shape(self) -> StaticShape | None:
        """The static shape of every batch; None if each batch has its own."""
        ...

    @property
    def buckets(self) -> np.ndarray | None:
        """int32 (n,), the bucket of each utterance; None without buckets that all epochs share."""
        ...

    def plan(self, epoch: int) -> EpochPlan:
        """Plan an epoch: each utterance is in one micro-batch or deferred."""
        ...


# Random permutations that do not depend on the machine or the version of numpy.


def shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation of ``0 .. count - 1`` that depends on the arguments alone, int64.

    Every index is hashed together with seed and epoch, and the hashes are sorted.
    """
    return np.argsort(hashes(count, seed, epoch), kind="stable")


def hashes(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return uniform random numbers for ``0 .. count - 1`` by the arguments alone, uint64.

    The hash is SplitMix64's: Steele et al., 2014, https://doi.org/10.1145/2714064.2660195.
    """
    key = _mix(_mix(np.array([seed % 2**64], np.uint64)) + np.uint64(epoch))
    values = np.arange(count, dtype=np.uint64)
    values *= np.uint64(0x9E3779B97F4A7C15)
    values += key
    return _mix(values)


def _mix(values: np.ndarray) -> np.ndarray:
    values = values ^ (values >> np.uint64(30))
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
