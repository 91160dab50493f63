"""Global steps of packed micro-batches, from any position of a run.

The plan of an epoch is a pure function, so a run resumes at (epoch, step) without looking at
what came before, and every rank finds its own part of a step without asking the others.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from effasr.data.audio import AudioError, AudioProblem, audio_path
from effasr.data.batch import Batch, collate
from effasr.data.config import DataConfig
from effasr.data.corpus import Corpus
from effasr.data.filters import Dropped
from effasr.data.sampling.packing import plan_epoch
from effasr.data.sampling.plan import EpochPlan

__all__ = ["Corpus", "DataConfig", "Loader", "Step"]

_SIGNAL_PATIENCE_S = 1.0

_PR_SET_PDEATHSIG = 1
"""From Linux's <sys/prctl.h>."""


@dataclass(frozen=True, slots=True)
class Step:
    """A rank's part of a global step.

    Attributes:
        epoch: Counted from 0.
        step: Counted from 0 in each epoch.
        num_steps: Steps of this epoch.
        batches: This rank's micro-batches.
        skipped: Utterances left out of them because their audio could not be read.
    """

    epoch: int
    step: int
    num_steps: int
    batches: list[Batch]
    skipped: tuple[Dropped, ...]

    @property
    def next_position(self) -> tuple[int, int]:
        """Epoch and step that follow; what a checkpoint after this step holds."""
        last = self.step + 1 == self.num_steps
        return (self.epoch + 1, 0) if last else (self.epoch, self.step + 1)


class Loader:
    """Loads a corpus by the packed plan, without end.

    Micro-batch m of a global step belongs to rank m modulo the number of ranks: the utterances of
    a step are the same on any number of ranks.
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
    ) -> None:
        """Set up; nothing is loaded before `steps` is iterated.

        Args:
            corpus: The utterances.
            config: Micro-batches per step, workers, and what to do with bad audio.
            seed: Seed of the plans.
            rank: Of this process.
            world_size: Number of processes that share a step.
            pin_memory: Whether batches are put into pinned memory; by default if there is a GPU.

        Raises:
            ValueError: The ranks cannot share the micro-batches evenly.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"`rank` must be in 0 .. {world_size - 1}, but is {rank}.")
        if config.micro_batches % world_size:
            lower = config.micro_batches // world_size * world_size
            nearest = " or ".join(str(n) for n in (lower, lower + world_size) if n)
            raise ValueError(
                f"`micro_batches` must be a multiple of the number of ranks, {world_size}, "
                f"but is {config.micro_batches}: use {nearest}."
            )
        self._corpus = corpus
        self._config = config
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self._pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._plan: tuple[int, EpochPlan] | None = None

    def plan(self, epoch: int) -> EpochPlan:
        """The plan of an epoch; the latest is kept."""
        if self._plan is None or self._plan[0] != epoch:
            plan = plan_epoch(
                self._corpus.lengths,
                shape=self._corpus.shape,
                micro_batches=self._config.micro_batches,
                seed=self._seed,
                epoch=epoch,
            )
            self._plan = (epoch, plan)
        return self._plan[1]

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
        return self._steps(epoch, step)

    def _steps(self, epoch: int, step: int) -> Generator[Step, None, None]:
        loaded = iter(self._data_loader(epoch, step))
        try:
            while True:
                count = self._config.micro_batches // self._world_size
                parts = [_checked(_next(loaded)) for _ in range(count)]
                place = parts[0].place
                yield Step(
                    epoch=place.epoch,
                    step=place.step,
                    num_steps=place.num_steps,
                    batches=[part.batch for part in parts],
                    skipped=tuple(drop for part in parts for drop in part.skipped),
                )
        finally:
            # An error keeps this frame, but must not keep the workers.
            del loaded

    def _places(self, epoch: int, step: int) -> Iterator[_Place]:
        """What to load, in order; the data loader asks a little ahead of the training."""
        while True:
            plan = self.plan(epoch)
            for number in range(step, plan.num_steps):
                own = plan.step(number)[self._rank :: self._world_size]
                for indices in own:
                    yield _Place(epoch, number, plan.num_steps, indices)
            epoch, step = epoch + 1, 0

    def _data_loader(self, epoch: int, step: int) -> DataLoader[Any]:
        workers = self._config.workers
        return DataLoader(
            _MicroBatches(self._corpus, self._config.on_bad_audio),
            batch_size=None,
            sampler=_Iterable(self._places(epoch, step)),
            collate_fn=_as_it_is,
            num_workers=workers,
            prefetch_factor=self._config.prefetch if workers else None,
            pin_memory=self._pin_memory,
            # The default would draw from torch's global generator, and a resumed run would differ.
            generator=torch.Generator(),
            worker_init_fn=partial(_end_with_parent, os.getpid()),
            multiprocessing_context=_forking() if workers else None,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A micro-batch to be loaded, and where it belongs."""

    epoch: int
    step: int
    num_steps: int
    indices: np.ndarray


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A micro-batch on its way from a worker."""

    place: _Place
    batch: Batch
    skipped: list[Dropped]

    def pin_memory(self) -> _Loaded:
        """Called by torch's DataLoader."""
        return _Loaded(self.place, self.batch.pin_memory(), self.skipped)


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error on its way from a worker, without the worker's traceback."""

    problem: AudioProblem
    message: str


class _MicroBatches(Dataset[_Loaded | _Failure]):
    """Loads what it is asked for; lives in every worker."""

    def __init__(self, corpus: Corpus, on_bad_audio: str) -> None:
        self._corpus = corpus
        self._skip = on_bad_audio == "skip"

    def __getitem__(self, place: _Place) -> _Loaded | _Failure:
        corpus = self._corpus
        examples, skipped = [], []
        for index in place.indices.tolist():
            try:
                examples.append(corpus.example(index))
            except AudioError as error:
                if not self._skip:
                    return _Failure(error.problem, str(error))
                cut = corpus.cut(index)
                path = audio_path(cut) or ""
                skipped.append(Dropped(cut.id, error.problem, str(error), path, cut.duration))
        batch = collate(examples, corpus.shape, eos_id=corpus.eos_id, pad_id=corpus.pad_id)
        return _Loaded(place, batch, skipped)


class _Iterable:
    """An iterator in the shape that DataLoader wants of a sampler."""

    def __init__(self, items: Iterator[_Place]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[_Place]:
        return self._items


def _as_it_is(item: Any) -> Any:
    return item


def _next(loaded: Iterator[_Loaded | _Failure]) -> _Loaded | _Failure:
    try:
        try:
            return next(loaded)
        except (EOFError, ConnectionError):
            # The pipe of a dead worker can break before the signal comes by which torch learns of
            # its death: waiting for that gives one error, with the worker's name, and not two.
            time.sleep(_SIGNAL_PATIENCE_S)
            raise
    except (RuntimeError, EOFError, ConnectionError) as error:
        if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
            raise
        what = " ".join(str(error).split()) or "its pipe broke"
        raise RuntimeError(
            f"a loading process died ({what}): if memory or shared memory (/dev/shm; docker's "
            "--shm-size) ran out, lower `workers` or `prefetch`."
        ) from error


def _checked(item: _Loaded | _Failure) -> _Loaded:
    if isinstance(item, _Failure):
        raise AudioError(
            item.problem,
            f"{item.message} Run `effasr prepare` to leave it out, or set data.on_bad_audio=skip.",
        )
    return item


def _forking() -> BaseContext | None:
    """Forked workers share the corpus's memory; where there is no safe fork, torch's default."""
    if sys.platform == "linux":
        return multiprocessing.get_context("fork")
    return None


def _end_with_parent(parent: int, worker: int) -> None:
    """Let this worker end with the training process: at once when that dies, and not before.

    A batch system or a terminal sends its signal to all processes; the training process finishes
    its step on SIGTERM and SIGINT, and for that it needs its workers.
    """
    del worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            # It died between the fork and the line above, of which the kernel then says nothing.
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_obey_parent_alone, daemon=True).start()


def _obey_parent_alone() -> None:
    """End on the SIGTERM of the training process, with which multiprocessing ends leftovers."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
