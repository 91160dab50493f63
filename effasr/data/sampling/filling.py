"""How one micro-batch after the other is filled from a queue of utterances."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from effasr.data.batch import StaticShape
from effasr.data.sampling.plan import UtteranceLengths

_POOL = 512
"""Waiting utterances, beyond those of two micro-batches, from which the last are chosen."""
_LOOKED_AT = 128
"""Of them, the oldest so many are looked at for each choice."""
_SWAPS = 12
"""Exchanges at most, to mend a micro-batch that the choices did not fill."""

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Aim:
    """What a micro-batch should hold.

    Attributes:
        shape: The budgets, never exceeded.
        frames: Frames aimed at: the budget, or, where tokens run out before, what goes with them.
        tokens: Likewise.
        frame_weight: How much a share of the frames counts against the same share of the tokens.
        token_weight: Likewise.
        expected: Utterances of a micro-batch, on average.
        spread: How far a single utterance strays from the proportion: mean absolute value of
            its ``tokens * aim.frames - frames * aim.tokens``.

    All sums are of integers: those of floats could differ between two ranks' processors.
    """

    shape: StaticShape
    frames: int
    tokens: int
    frame_weight: int
    token_weight: int
    expected: float
    spread: int

    @classmethod
    def of(cls, lengths: UtteranceLengths, shape: StaticShape) -> Aim:
        """The aim for a corpus with at least one utterance."""
        frames = max(1, int(lengths.frames.sum(dtype=np.int64)))
        tokens = max(1, int(lengths.tokens.sum(dtype=np.int64)))
        # The pool keeps the corpus's ratio of tokens to frames only if micro-batches have it:
        # of the dimension with rows to spare, no more is wanted than goes with the other.
        aim_frames = max(1, min(shape.frame_budget, shape.token_budget * frames // tokens))
        aim_tokens = max(1, min(shape.token_budget, shape.frame_budget * tokens // frames))
        # numpy 1 would leave the product of an int32 array and a scalar in int32.
        stray = lengths.tokens.astype(np.int64) * aim_frames
        stray -= lengths.frames.astype(np.int64) * aim_tokens
        return cls(
            shape,
            aim_frames,
            aim_tokens,
            frame_weight=8 if aim_tokens < 0.99 * shape.token_budget else 1,
            token_weight=8 if aim_frames < 0.99 * shape.frame_budget else 1,
            expected=min(aim_frames * len(lengths) / frames, shape.max_sequences),
            spread=int(np.abs(stray).sum()) // len(lengths),
        )

    def cost(self, frames: np.ndarray | np.int64, tokens: np.ndarray | np.int64) -> np.ndarray:
        """What it costs to close with these frames and tokens; int64, exact."""
        short_of_frames = np.abs(self.frames - frames) * (self.frame_weight * self.tokens)
        short_of_tokens = np.abs(self.tokens - tokens) * (self.token_weight * self.frames)
        return short_of_frames + short_of_tokens


class Queue:
    """Utterances in random order, and the micro-batches that leave it.

    Utterances are known by their place in that order. A pool holds the oldest that wait.
    """

    def __init__(self, frames: np.ndarray, tokens: np.ndarray, aim: Aim) -> None:
        """Queue utterances.

        Args:
            frames: int (n,), frames in the random order.
            tokens: int (n,), tokens in that order.
            aim: What a micro-batch should hold.
        """
        self._frames = frames.astype(np.int64)
        self._tokens = tokens.astype(np.int64)
        self._aim = aim
        self._pool = np.arange(0)
        self._pool_size = _POOL + 2 * math.ceil(aim.expected)
        self._head = 0

    @property
    def waiting(self) -> bool:
        """Whether an utterance is left."""
        return self._pool.size > 0 or self._head < len(self._frames)

    def next_micro_batch(self) -> np.ndarray:
        """Take the utterances of the next micro-batch: int64 (members,), at least one place."""
        end = min(len(self._frames), self._head + self._pool_size - self._pool.size)
        pool = np.concatenate([self._pool, np.arange(self._head, end)])
        self._head = end
        batch = _MicroBatch(self._frames[pool], self._tokens[pool], self._aim)
        batch.take_oldest()
        batch.steer()
        batch.finish()
        batch.swap()
        self._pool = pool[~batch.taken]
        return pool[batch.taken]


class _MicroBatch:
    """A micro-batch while it is filled from a pool, whose oldest come first."""

    def __init__(self, frames: np.ndarray, tokens: np.ndarray, aim: Aim) -> None:
        self.pool_frames = frames
        self.pool_tokens = tokens
        self.aim = aim
        self.taken = np.zeros(len(frames), dtype=bool)
        self.frames = 0
        self.tokens = 0
        self.room = aim.shape.max_sequences

    def take_oldest(self) -> None:
        """Take the oldest, at least one, until only those to be chosen are missing.

        The sum of n random utterances strays from the proportion by sqrt(n) times what one
        does, and each choice can take back what one strays.
        """
        aim = self.aim
        chosen = 3 + math.sqrt(aim.expected)
        share = max(0.0, 1 - chosen / aim.expected)
        frames = np.cumsum(self.pool_frames)
        tokens = np.cumsum(self.pool_tokens)
        inside = (frames <= share * aim.frames) & (tokens <= share * aim.tokens)
        count = max(1, min(int(inside.sum()), self.room - math.ceil(chosen)))
        self.taken[:count] = True
        self.frames = int(frames[count - 1])
        self.tokens = int(tokens[count - 1])
        self.room -= count

    def steer(self) -> None:
        """Choose utterances that bring frames and tokens back into proportion.

        Of those that do it well enough, the oldest is taken, so that the draw stays fair.
        """
        aim = self.aim
        mean = aim.frames / aim.expected
        while self.room > 2 and (left := (aim.frames - self.frames) / mean) > 2.5:
            free = self._candidates(_LOOKED_AT)
            if not free.size:
                return
            stray = self.pool_tokens[free] * aim.frames - self.pool_frames[free] * aim.tokens
            wanted = (self.frames * aim.tokens - self.tokens * aim.frames) / left
            miss = np.abs(stray - wanted)
            good = miss <= aim.spread / 3
            self._take(free[[good.argmax() if good.any() else miss.argmin()]])

    def finish(self) -> None:
        """Choose the last ones, two at a time, while that brings the sums nearer to the aim."""
        while self.room:
            free = self._candidates(_LOOKED_AT)
            if not free.size:
                return
            pair = self._best_pair(free)
            if not pair.size:
                return
            self._take(pair)

    def _best_pair(self, free: np.ndarray) -> np.ndarray:
        """The one or two candidates with which closing costs least; none if that is now."""
        # An extra candidate of no size stands for "none".
        frames = np.append(self.pool_frames[free], 0)
        tokens = np.append(self.pool_tokens[free], 0)
        sum_frames = self.frames + frames[:, None] + frames
        sum_tokens = self.tokens + tokens[:, None] + tokens
        cost = self.aim.cost(sum_frames, sum_tokens)
        shape = self.aim.shape
        cost[(sum_frames > shape.frame_budget) | (sum_tokens > shape.token_budget)] = _NEVER
        none = len(free)
        closing = cost[none, none]
        np.fill_diagonal(cost, _NEVER)
        if self.room == 1:
            cost[:none, :none] = _NEVER
        best = int(cost.argmin())
        if cost.flat[best] >= closing:
            return free[:0]
        chosen = np.array(divmod(best, none + 1))
        return free[chosen[chosen < none]]

    def swap(self) -> None:
        """Exchange single utterances with waiting ones while that helps; never the oldest."""
        for _ in range(_SWAPS):
            inside = np.flatnonzero(self.taken)[1:][-_LOOKED_AT:]
            free = np.flatnonzero(~self.taken)[:_LOOKED_AT]
            if not inside.size or not free.size:
                return
            frames = self.frames - self.pool_frames[inside, None] + self.pool_frames[free]
            tokens = self.tokens - self.pool_tokens[inside, None] + self.pool_tokens[free]
            cost = self.aim.cost(frames, tokens)
            shape = self.aim.shape
            cost[(frames > shape.frame_budget) | (tokens > shape.token_budget)] = _NEVER
            best = int(cost.argmin())
            now = self.aim.cost(np.int64(self.frames), np.int64(self.tokens))
            if cost.flat[best] >= now:
                return
            out, into = divmod(best, len(free))
            self.taken[inside[out]] = False
            self.taken[free[into]] = True
            self.frames = int(frames[out, into])
            self.tokens = int(tokens[out, into])

    def _candidates(self, count: int) -> np.ndarray:
        """The oldest of the pool that still fit."""
        shape = self.aim.shape
        free = ~self.taken
        free &= self.pool_frames <= shape.frame_budget - self.frames
        free &= self.pool_tokens <= shape.token_budget - self.tokens
        return np.flatnonzero(free)[:count]

    def _take(self, chosen: np.ndarray) -> None:
        self.taken[chosen] = True
        self.frames += int(self.pool_frames[chosen].sum())
        self.tokens += int(self.pool_tokens[chosen].sum())
        self.room -= len(chosen)
