"""Global steps of micro-batches, from any position of a run.

The plan of an epoch is a pure function, so a run resumes at (epoch, step) without looking at
what came before, and every rank finds its own part of a step without asking the others.
"""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from effasr.data import worker_processes
from effasr.data.audio.augmentation.augmenter import Augmenter
from effasr.data.audio.waveform import audio_path
from effasr.data.batch import Batch, StaticShape
from effasr.data.config import DataConfig
from effasr.data.filters.rules import Dropped
from effasr.data.index.corpus import Corpus
from effasr.data.micro_batch_loader import Failure, Loaded, MicroBatches, Place, Turn, checked
from effasr.data.sampling.cost import CANARY_180M_FLASH, CostModel
from effasr.data.sampling.plan import EpochPlan
from effasr.data.sampling.strategies import planner

__all__ = ["Corpus", "DataConfig", "Loader", "Step", "Turn"]

log = logging.getLogger(__name__)

_NOBODY = np.zeros(0, dtype=np.int32)


# Of so many epochs the plans are kept: that which a late learner is in, and that after it.
_PLANS = 2


@dataclass(frozen=True, slots=True)
class Step:
    """A rank's part of a global step.

    Attributes:
        epoch: Counted from 0.
        step: Counted from 0 in each epoch.
        num_steps: Steps of this epoch.
        batches: This rank's micro-batches.
        skipped: Utterances left out of them because their audio could not be read.
        indices: int (m,), the utterances of the corpus that were to be in them.
        text_indices: int (m,), the text pairs that are in text-only ones.
        places: Number of each of the ``batches`` among the micro-batches of the global step.
        number: That of the `Turn`.
    """

    epoch: int
    step: int
    num_steps: int
    batches: list[Batch]
    skipped: tuple[Dropped, ...]
    indices: np.ndarray
    text_indices: np.ndarray
    places: range
    number: int = 0

    @property
    def next_position(self) -> tuple[int, int]:
        """Epoch and step that follow; what a checkpoint after this step holds."""
        last = self.step + 1 == self.num_steps
        return (self.epoch + 1, 0) if last else (self.epoch, self.step + 1)


class Loader:
    """Loads a corpus by the plans of ``data.strategy``, without end.

    Micro-batch m of a global step belongs to rank m modulo the number of ranks. By the packed
    plan the utterances of a step are the same on any number of ranks; where these cannot share
    the micro-batches evenly, some get an empty one in the last round of each step.
    """

    def __init__(
        self,
        corpus: Corpus,
        config: DataConfig,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        pin_memory: bool | None = None,
        cost: CostModel = CANARY_180M_FLASH,
    ) -> None:
        """Set up; nothing is loaded before `steps` is iterated.

        Args:
            corpus: The utterances.
            config: Strategy, micro-batches per step, workers, and what to do with bad audio.
            seed: Seed of the plans and of augmentation.
            rank: Of this process.
            world_size: Number of processes that share a step.
            pin_memory: Whether batches are put into pinned memory; by default if there is a GPU.
            cost: Of an utterance to the model, by which the ranks' work is balanced.

        Raises:
            ValueError: ``rank`` is out of range, there are more ranks than micro-batches, noise
                cannot be read, or see `effasr.data.sampling.strategies.planner`.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"`rank` must be in 0 .. {world_size - 1}, but is {rank}.")
        if config.micro_batches < world_size:
            raise ValueError(
                f"`micro_batches` must be at least the number of ranks, {world_size}, so that each "
                f"has something to do, but is {config.micro_batches}: start fewer ranks."
            )
        self._corpus = corpus
        self._config = config
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self._pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._planner = planner(
            config.strategy,
            corpus.lengths,
            shape=corpus.shape,
            micro_batches=config.speech_micro_batches,
            # With text, a rank may have no micro-batch of speech.
            world_size=max(1, world_size - config.text_micro_batches),
            seed=seed,
            options=config.strategy_options(corpus.shape.framing),
            population=corpus.populations(seed),
            cost=cost,
            epoch_end=config.epoch_end,
        )
        skip = config.on_bad_audio == "skip"
        self._augmenter = Augmenter(config.audio_augmentation, seed=seed, skip_unreadable=skip)
        self._rounds = -(-config.micro_batches // world_size)
        # What each worker is at, in memory that all see: for the message where one never returns.
        self._reading = RawArray("q", [-1] * max(1, config.workers))
        self._plans: dict[int, tuple[EpochPlan, EpochPlan | None]] = {}
        self._fingerprints: dict[int, str] = {}
        if rank == 0 and config.micro_batches % world_size:
            log.warning("%s", _uneven(config.micro_batches, world_size))

    def plan(self, epoch: int) -> EpochPlan:
        """The plan of an epoch; the latest are kept."""
        return self._both_plans(epoch)[0]

    def text_plan(self, epoch: int) -> EpochPlan | None:
        """The plan of the text-only micro-batches that go with an epoch; None without any.

        It may have a step less or more than the epoch: its steps are used from the first on again
        where there are too few, and left out where there are too many.
        """
        return self._both_plans(epoch)[1]

    def _both_plans(self, epoch: int) -> tuple[EpochPlan, EpochPlan | None]:
        """The plans of speech and of text."""
        if epoch not in self._plans:
            plan, text = self._planner.plan(epoch), None
            corpus, config = self._corpus, self._config
            if corpus.text is not None:
                text = corpus.text.plan(
                    epoch,
                    steps=corpus.steps(config.speech_micro_batches),
                    micro_batches=config.text_micro_batches,
                    seed=self._seed,
                )
            for old in list(self._plans)[: 1 - _PLANS]:
                del self._plans[old]
            self._plans[epoch] = (plan, text)
            self._fingerprints[epoch] = _fingerprint(plan, self._augmenter.fingerprint)
        return self._plans[epoch]

    @property
    def augmentation(self) -> str:
        """What is done to audio, for people; empty where nothing is."""
        return str(self._augmenter)

    @property
    def shape(self) -> StaticShape | None:
        """The shape of every batch; None where each has its own."""
        return self._planner.shape

    def fingerprint(self, epoch: int) -> str:
        """Changes if the plan of an epoch, or what it is augmented with, does.

        A resumed run compares it.
        """
        if epoch not in self._fingerprints:
            self.plan(epoch)
        return self._fingerprints[epoch]

    def steps(self, epoch: int = 0, step: int = 0) -> Generator[Step, None, None]:
        """This rank's part of every global step from a position on, without end.

        Closing the iterator ends its worker processes.

        Args:
            epoch: Where to begin.
            step: Where to begin in that epoch.

        Raises:
            ValueError: The epoch has no such step.
            AudioError: Audio cannot be read, and ``on_bad_audio`` is ``raise``.
            RuntimeError: A worker process was killed.
        """
        if not 0 <= step < self.plan(epoch).num_steps:
            raise ValueError(
                f"`step` must be in 0 .. {self.plan(epoch).num_steps - 1}, the steps of epoch "
                f"{epoch}, but is {step}: corpus or budgets are not those of the saved position."
            )
        return self.take(self._turns(epoch, step))

    def take(self, turns: Iterable[Turn]) -> Generator[Step, None, None]:
        """The parts of global steps that are asked for, in any order.

        Closing the iterator ends its worker processes.

        Args:
            turns: Without end; asked for a little ahead of what is yielded.

        Raises:
            AudioError: As `steps`.
            RuntimeError: As `steps`.
        """
        with warnings.catch_warnings():
            # Of more workers than processors: they wait for files, and are as many as configured.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            loaded = iter(self._data_loader(turns))
        try:
            while True:
                yield self._step([worker_processes.next_item(loaded) for _ in range(self._rounds)])
        finally:
            # An error keeps this frame, but must not keep the workers.
            del loaded

    def reading(self) -> list[str]:
        """The utterances that are being read at this moment, each with its file."""
        corpus = self._corpus
        reading = [index for index in self._reading[:] if index >= 0]
        return [f"{corpus.name(i)} ({audio_path(corpus.cut(i)) or 'no file'})" for i in reading]

    def load(self, turn: Turn) -> Step:
        """One part of a global step, at once and in this process.

        Raises:
            AudioError: As `steps`.
        """
        data = self._micro_batches()
        step = self._step([data[place] for place in self._places([turn])])
        if self._pin_memory:
            return replace(step, batches=[batch.pin_memory() for batch in step.batches])
        return step

    def _step(self, items: list[Loaded | Failure]) -> Step:
        parts = [checked(item) for item in items]
        place = parts[0].place
        return Step(
            epoch=place.turn.epoch,
            step=place.turn.step,
            num_steps=place.num_steps,
            batches=[part.batch for part in parts],
            skipped=tuple(drop for part in parts for drop in part.skipped),
            indices=_members(parts, text=False),
            text_indices=_members(parts, text=True),
            places=range(self._rounds * self._world_size)[place.turn.rank :: self._world_size],
            number=place.turn.number,
        )

    def _turns(self, epoch: int, step: int) -> Iterator[Turn]:
        """This rank's own, in the order of the plans."""
        while True:
            for number in range(step, self.plan(epoch).num_steps):
                yield Turn(epoch, number, self._rank)
            epoch, step = epoch + 1, 0

    def _places(self, turns: Iterable[Turn]) -> Iterator[Place]:
        """What to load, in order; the data loader asks a little ahead of the training."""
        for turn in turns:
            plan, text = self._both_plans(turn.epoch)
            members = [(indices, False) for indices in plan.step(turn.step)]
            if text is not None:
                members += [(indices, True) for indices in text.step(turn.step % text.num_steps)]
                # By turns on every rank, whose batch norms must see speech now and then.
                first = turn.step % len(members)
                members = members[first:] + members[:first]
            own = members[turn.rank :: self._world_size]
            # A rank that stayed away from a round would keep the others waiting.
            own += [(_NOBODY, False)] * (self._rounds - len(own))
            for indices, is_text in own:
                yield Place(turn, plan.num_steps, indices, is_text)

    def _micro_batches(self) -> MicroBatches:
        shape = self._planner.shape
        return MicroBatches(self._corpus, self._config, shape, self._reading, self._augmenter)

    def _data_loader(self, turns: Iterable[Turn]) -> DataLoader[Any]:
        workers = self._config.workers
        return DataLoader(
            self._micro_batches(),
            batch_size=None,
            sampler=_Iterable(self._places(turns)),
            collate_fn=_as_it_is,
            num_workers=workers,
            prefetch_factor=self._config.prefetch if workers else None,
            pin_memory=self._pin_memory,
            # The default would draw from torch's global generator, and a resumed run would differ.
            generator=torch.Generator(),
            worker_init_fn=partial(worker_processes.end_with_parent, os.getpid()),
            multiprocessing_context=worker_processes.context() if workers else None,
        )


class _Iterable:
    """An iterator in the shape that DataLoader wants of a sampler."""

    def __init__(self, items: Iterator[Place]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Place]:
        return self._items


def _members(parts: list[Loaded], *, text: bool) -> np.ndarray:
    """What was to be in the micro-batches of a kind."""
    members = [part.place.indices for part in parts if part.place.is_text == text]
    return np.concatenate([_NOBODY, *members])


def _uneven(micro_batches: int, world_size: int) -> str:
    """What it costs that ranks cannot share the micro-batches of a step."""
    rounds = -(-micro_batches // world_size)
    idle = rounds * world_size - micro_batches
    return (
        f"`micro_batches` = {micro_batches} is no multiple of the number of ranks, {world_size}: "
        f"in each step {idle} of {rounds * world_size} places stay empty, "
        f"{100 * idle / (rounds * world_size):.0f} % of the time of all; a run of "
        f"{(rounds - 1) * world_size} or {rounds * world_size} micro-batches would lose nothing."
    )


def _fingerprint(plan: EpochPlan, augmentation: str) -> str:
    digest = hashlib.sha256(augmentation.encode())
    for values in (plan.offsets, plan.indices):
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()


def _as_it_is(item: Any) -> Any:
    return item
