"""Plans the batches of other toolkits, by lhotse's samplers over lengths alone.

lhotse keeps ranks in step without communication: the sampler of every rank draws the batches of all
ranks, in the same order, and returns only its own. One sampler that returns all of them therefore
plans the whole run.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from lhotse import CutSet
from lhotse.dataset.sampling.base import CutSampler
from lhotse.dataset.sampling.dynamic_bucketing import (
    DynamicBucketingSampler,
    FixedBucketBatchSizeConstraint,
    estimate_duration_buckets,
)
from lhotse.dataset.sampling.simple import SimpleCutSampler

from effasr.checks import check
from effasr.data.batch import StaticShape
from effasr.data.sampling.bucket_table import BucketTable
from effasr.data.sampling.options import StrategyOptions
from effasr.data.sampling.plan import EpochPlan, UtteranceLengths, shuffled

_BUFFER = 20_000
"""Utterances buffered in buckets, lhotse's default."""
_ESTIMATED_FROM = 10_000
"""Utterances from which bucket limits are estimated, lhotse's default."""


class LhotsePlanner:
    """Plans ``random``, ``bucketed``, ``sync_bucketed`` and ``sync_bucketed_2d``.

    - ``random``: lhotse's `SimpleCutSampler`, batches of any utterances.
    - ``bucketed``: `DynamicBucketingSampler`, buckets by duration; ranks draw independently.
      Without ``sync_buckets`` lhotse ends the epoch at the first empty bucket that it draws once
      none is full, so that more is deferred.
    - ``sync_bucketed``: the same with ``sync_buckets``: all ranks draw the same bucket, as long
      as it has a batch for each.
    - ``sync_bucketed_2d``: the same, with buckets by duration and tokens and a
      `FixedBucketBatchSizeConstraint`.

    The samplers read the utterances in an order that depends on seed and epoch. An end of data
    that leaves some micro-batches of a step without utterances is deferred; an epoch without a
    full step keeps one partial step, in which micro-batches may be empty.
    """

    def __init__(
        self,
        strategy: str,
        lengths: UtteranceLengths,
        *,
        shape: StaticShape,
        micro_batches: int,
        world_size: int,
        seed: int,
        options: StrategyOptions,
    ) -> None:
        """Make the planner; `effasr.data.sampling.strategies.planner` checks the arguments."""
        check(len(lengths), "lengths", "hold at least one utterance", "empty")
        self._strategy = strategy
        self._lengths = lengths
        self._micro_batches = micro_batches
        self._world_size = world_size
        self._seed = seed
        self._padded, table = options.padded, options.table
        self._batch_size = options.batch_size
        self._batch_frames = None
        if self._batch_size is None and table is None:
            self._batch_frames = _batch_frames(lengths, shape, options.batch_duration)
        self._table = table
        self._edges: list[float] = []
        if strategy == "sync_bucketed_2d":
            self._table = table or BucketTable.derive(
                lengths, _scaled(shape, self._batch_frames), options.buckets
            )
            self.buckets = self._table.assign(lengths)
        elif strategy != "random":
            # At least one bucket limit, as lhotse estimates them.
            frames = lengths.frames
            rule = f"be at most the number of utterances, {len(frames)}"
            check(options.buckets <= len(frames), "buckets", rule, options.buckets)
            count = min(len(frames), max(_ESTIMATED_FROM, options.buckets))
            places = np.linspace(0, len(frames) - 1, count).astype(np.int64)
            sample = _Stream(places, np.sort(frames))
            # Equally long utterances give equal limits with nothing in between.
            edges = {float(edge) for edge in estimate_duration_buckets(sample, options.buckets)}  # type: ignore[arg-type]
            self._edges = sorted(edges) or [float(frames.max())]
            result = np.searchsorted(self._edges, lengths.frames, side="left")
            self.buckets = result.astype(np.int32)
        else:
            self.buckets = None

    @property
    def shape(self) -> None:
        """None: each batch has its own shape."""
        return None

    def plan(self, epoch: int) -> EpochPlan:
        """Plan an epoch; see `effasr.data.sampling.plan.Planner`."""
        check(epoch >= 0, "epoch", "be at least 0", epoch)
        batches = [[item.index for item in batch] for batch in self._sampler(epoch)]
        # Make the plan of lhotse's batches; batch i belongs to rank i modulo the world size.
        steps = max(1, len(batches) // self._micro_batches)
        selected = batches[: steps * self._micro_batches]
        # An epoch without a full step keeps a partial one, which ends with empty micro-batches.
        selected += [[]] * (steps * self._micro_batches - len(selected))
        sizes = np.array([len(batch) for batch in selected], dtype=np.int64)
        indices = np.array([index for batch in selected for index in batch], dtype=np.int32)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        planned = np.zeros(len(self._lengths), dtype=bool)
        planned[indices] = True
        padding = {"padding_frames": 0.0, "padding_tokens": 0.0}
        if self._padded:
            begins = offsets[:-1][sizes > 0]
            sizes = sizes[sizes > 0]
            padding = {
                "padding_frames": _padding(self._lengths.frames[indices], begins, sizes),
                "padding_tokens": _padding(self._lengths.tokens[indices], begins, sizes),
            }
        return EpochPlan(
            micro_batches=self._micro_batches,
            indices=indices,
            offsets=offsets,
            deferred=np.flatnonzero(~planned).astype(np.int32),
            **padding,
        )

    def _sampler(self, epoch: int) -> CutSampler:
        order = shuffled(len(self._lengths), self._seed, epoch)
        ranks: dict[str, Any] = {"world_size": self._world_size, "rank": 0}
        limits = {"max_duration": self._batch_frames, "max_cuts": self._batch_size}
        if self._strategy == "random":
            cuts: Any = _Stream(order, self._lengths.frames)
            return _RandomSampler(CutSet(cuts), **limits, **ranks)
        waiting = _BUFFER
        if self._table is None:
            measured, edges = self._lengths.frames, self._edges
            if self._batch_frames is not None:
                # A smaller buffer would leave buckets without full batches; lhotse warns of it.
                mean = max(1.0, sum(edges) / len(edges))
                needed = self._batch_frames * (len(edges) + 1) / mean
                waiting = max(waiting, int(needed) + 1)
        else:
            # lhotse's constraint compares one length: the bucket's number stands for both.
            measured, edges = self.buckets, [*map(float, range(len(self._table.bins) - 1))]
            sizes = list(self._table.batch_sizes)
            constraint = FixedBucketBatchSizeConstraint(list(range(len(sizes))), sizes)
            limits = {"constraint": constraint}
        assert measured is not None
        sampler = _BucketingSampler(
            _Stream(order, measured),
            **limits,
            **ranks,
            duration_bins=edges,
            buffer_size=waiting,
            seed=self._seed,
            sync_buckets=self._strategy != "bucketed",
        )
        sampler.set_epoch(epoch)
        return sampler


@dataclass(frozen=True, slots=True)
class _StandIn:
    """The attributes of a cut that a sampler reads."""

    index: int  # Index of the utterance
    duration: int  # Encoder frames, whose sums are exact, or the number of a bucket


@dataclass(frozen=True, slots=True, eq=False)
class _Stream:
    """Yields stand-ins for all utterances in a given order."""

    order: np.ndarray
    durations: np.ndarray

    def __iter__(self) -> Iterator[_StandIn]:
        for begin in range(0, len(self.order), _BUFFER):
            part = self.order[begin : begin + _BUFFER]
            yield from map(_StandIn, part.tolist(), self.durations[part].tolist())


class _AllRanks(CutSampler):
    """Returns the batches of all ranks in turn instead of those of one rank."""

    def __next__(self) -> CutSet:
        return self._next_batch()


class _RandomSampler(_AllRanks, SimpleCutSampler): ...


class _BucketingSampler(_AllRanks, DynamicBucketingSampler): ...


def _batch_frames(
    lengths: UtteranceLengths, shape: StaticShape, batch_duration: float | None
) -> int:
    longest = int(lengths.frames.max())
    if batch_duration is None:
        frames, name = shape.frame_budget, f"`frame_budget` = {shape.frame_budget}"
    else:
        frames = int(batch_duration / shape.framing.seconds + 1e-6)
        name = f"`batch_duration` = {batch_duration:g} s"
    if longest > frames:
        raise ValueError(
            f"every utterance must fit in {name}, but the longest has {longest} frames "
            f"({longest * shape.framing.seconds:.2f} s): drop it with data.max_duration, or "
            "raise the limit."
        )
    return frames


def _scaled(shape: StaticShape, frames: int | None) -> StaticShape:
    """Return a shape of this many frames, with tokens in proportion."""
    if frames is None or frames == shape.frame_budget:
        return shape
    tokens = max(1, shape.token_budget * frames // shape.frame_budget)
    return StaticShape(frames, tokens, shape.max_sequences, framing=shape.framing)


def _padding(values: np.ndarray, begins: np.ndarray, sizes: np.ndarray) -> float:
    """Return the share of padding where each batch is as wide as its longest utterance."""
    rows = int((np.maximum.reduceat(values, begins) * sizes).sum())
    return 1 - int(values.sum(dtype=np.int64)) / rows if rows else 0.0
