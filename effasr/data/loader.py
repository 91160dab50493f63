"""Data loader: yields the micro-batches of global steps, from any position of a run.

The plan of an epoch is a pure function, so a run resumes at (epoch, step) without looking at
what came before, and every rank finds its own part of a step without asking the others.
"""

import hashlib
import logging
import os
import warnings
from collections.abc import Generator, Iterable, Iterator, MutableSequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from effasr.checks import check
from effasr.data import worker_processes
from effasr.data.audio.augmentation.augmenter import Augmenter, Moment, UnreadableRecording
from effasr.data.audio.waveform import AudioError, audio_path, prefetch_audio
from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example
from effasr.data.config import DataConfig
from effasr.data.conversation.batch import ConversationExample
from effasr.data.conversation.corpus import ConversationCorpus
from effasr.data.features.frame_geometry import SAMPLE_RATE
from effasr.data.filters.rules import Dropped
from effasr.data.index.corpus import Corpus
from effasr.data.sampling.cost import CANARY_180M_FLASH, CostModel
from effasr.data.sampling.plan import EpochPlan
from effasr.data.sampling.strategies import planner
from effasr.data.worker_processes import SharedMemoryError, share

# Dataset of micro-batches, which worker processes load.


EMPTY = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatchRef:
    """A micro-batch to be loaded; the first four fields name a rank's part of a global step."""

    epoch: int
    step: int
    rank: int
    number: int = 0  # by which the caller recognises the part
    num_steps: int = 0  # of the epoch
    place: int = 0  # index among the micro-batches of the global step
    # int32 (m,), of the corpus, or of the text pairs
    indices: np.ndarray = field(default_factory=EMPTY.copy)
    is_text: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """A rank's part of a global step, or one micro-batch of it."""

    epoch: int
    step: int
    num_steps: int  # of the epoch
    batches: list[Batch]  # this rank's micro-batches
    skipped: tuple[Dropped, ...]  # their audio could not be read
    indices: np.ndarray  # int32 (m,), of the corpus
    text_indices: np.ndarray  # int32 (m,), of the text pairs
    places: range  # of `batches` among the micro-batches of the global step
    number: int = 0  # of the `MicroBatchRef`

    @property
    def next_position(self) -> tuple[int, int]:
        """Epoch and step that follow; what a checkpoint after this step holds."""
        last = self.step + 1 == self.num_steps
        return (self.epoch + 1, 0) if last else (self.epoch, self.step + 1)

    def pin_memory(self) -> "StepBatch":
        """Called by torch's DataLoader."""
        return replace(self, batches=[batch.pin_memory() for batch in self.batches])


class MicroBatchDataset(Dataset[StepBatch | AudioError | SharedMemoryError]):
    """Loads requested micro-batches; every worker process has a copy."""

    def __init__(
        self,
        corpus: Corpus | ConversationCorpus,
        config: DataConfig,
        shape: StaticShape | None,
        reading: MutableSequence[int],
        augmenter: Augmenter,
        *,
        narrows: bool = False,
    ) -> None:
        """Set up; in ``reading`` each worker publishes the utterance that it is reading, or -1.

        ``narrows``: whether audio of 16 bits stays int16, for a transfer to a GPU.
        """
        self._narrows = narrows
        self._augmenter = augmenter
        self._reading = reading
        self._corpus = corpus
        self._shape = shape
        self._padded = config.padded
        self._skip = config.on_bad_audio == "skip"

    def __getitem__(self, ref: MicroBatchRef) -> StepBatch | AudioError | SharedMemoryError:
        """Load one micro-batch; errors are returned, not raised, to arrive without a traceback."""
        part = self._load(ref)
        if self._narrows and isinstance(part, StepBatch):
            part = replace(part, batches=[batch.narrowed() for batch in part.batches])
        if get_worker_info() is not None and isinstance(part, StepBatch):
            try:
                share(chain.from_iterable(map(_tensors, part.batches)))
            except SharedMemoryError as error:
                return error
        return part

    def _load(self, ref: MicroBatchRef) -> StepBatch | AudioError:
        corpus = self._corpus
        if ref.is_text:
            assert corpus.text is not None
            return _part(ref, corpus.text.batch(ref.indices), [])
        examples: list[Any] = []
        skipped: list[Dropped] = []
        prefetch_audio(corpus.audio(index) for index in ref.indices.tolist())
        worker = get_worker_info()
        slot = 0 if worker is None else worker.id
        try:
            for index in ref.indices.tolist():
                self._reading[slot] = index
                try:
                    examples.append(self._example(index, ref, skipped))
                except AudioError as error:
                    if not self._skip:
                        return _with_remedy(error)
                    skipped.append(self._dropped(index, error))
        finally:
            self._reading[slot] = -1
        batch = corpus.collate(examples, self._shape, padded=self._padded)
        return _part(ref, batch, skipped)

    def _example(
        self, index: int, ref: MicroBatchRef, skipped: list[Dropped]
    ) -> Example | ConversationExample:
        """Load an utterance, augmented; unreadable recordings for it are added to ``skipped``."""
        example = self._corpus.example(index)
        silence = self._corpus.silence(index)
        if not (self._augmenter or silence):
            return example
        delay = 0

        def augment(audio: np.ndarray) -> np.ndarray:
            moment = Moment(ref.epoch, ref.step, index)
            nonlocal delay
            augmented, delay, unreadable = self._augmenter(audio, moment, silence)
            skipped.extend(unreadable)
            return augmented

        augmented = example.map_audio(augment)
        if delay and isinstance(augmented, Example) and isinstance(self._corpus, Corpus):
            return self._corpus.timed(augmented, index, delay / SAMPLE_RATE)
        return augmented

    def _dropped(self, index: int, error: AudioError) -> Dropped:
        corpus = self._corpus
        path = audio_path(corpus.audio(index)) or ""
        name, seconds = corpus.name(index), corpus.duration(index)
        return Dropped(name, error.problem, str(error), path, seconds)


def _tensors(batch: Batch) -> Iterator[Tensor]:
    yield from batch.tensors()
    if batch.label_room is not None:
        yield batch.label_room


def _part(ref: MicroBatchRef, batch: Batch, skipped: list[Dropped]) -> StepBatch:
    return StepBatch(
        epoch=ref.epoch,
        step=ref.step,
        num_steps=ref.num_steps,
        batches=[batch],
        skipped=tuple(skipped),
        indices=EMPTY if ref.is_text else ref.indices,
        text_indices=ref.indices if ref.is_text else EMPTY,
        places=range(ref.place, ref.place + 1),
        number=ref.number,
    )


def _with_remedy(error: AudioError) -> AudioError:
    remedy = "Run `effasr prepare` to leave it out"
    if isinstance(error, UnreadableRecording):
        remedy = "Mend it or remove it"
    return AudioError(error.problem, f"{error} {remedy}, or set data.on_bad_audio=skip.")


log = logging.getLogger(__name__)

_PLANS = 2  # epochs whose plans are kept: that which a late learner is in, and the next


class Loader:
    """Loads a corpus by the plans of ``data.strategy``, without end.

    Micro-batch m of a global step belongs to rank m modulo the number of ranks. By the packed
    plan the utterances of a step are the same on any number of ranks; where these cannot share
    the micro-batches evenly, some get an empty one in the last round of each step.
    """

    def __init__(
        self,
        corpus: Corpus | ConversationCorpus,
        config: DataConfig,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        pin_memory: bool | None = None,
        cost: CostModel = CANARY_180M_FLASH,
        text_cost: CostModel = CANARY_180M_FLASH,
    ) -> None:
        """Set up; nothing is loaded before `steps` is iterated.

        ``pin_memory`` is by default whether there is a GPU; ``cost`` balances the ranks' work,
        ``text_cost`` that on text-only micro-batches beside speech.
        """
        check(0 <= rank < world_size, "rank", f"be in 0 .. {world_size - 1}", rank)
        self._corpus = corpus
        self._config = config
        self._seed, self._text_cost = seed, text_cost
        self._rank = rank
        self._world_size = world_size
        self._pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._planner = planner(
            config.strategy,
            corpus.lengths,
            shape=corpus.shape,
            micro_batches=config.corpus_micro_batches,
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
        """Return the plan of an epoch; the latest are kept."""
        return self._both_plans(epoch)[0]

    def count_steps(self, epochs: Iterable[int]) -> int:
        return sum(self._planner.plan(epoch).num_steps for epoch in epochs)

    def text_plan(self, epoch: int) -> EpochPlan | None:
        """Return the plan of the text-only micro-batches that go with an epoch; None without any.

        It may have a step less or more than the epoch: its steps are used from the first on again
        where there are too few, and left out where there are too many.
        """
        return self._both_plans(epoch)[1]

    def _both_plans(self, epoch: int) -> tuple[EpochPlan, EpochPlan | None]:
        if epoch not in self._plans:
            plan, text = self._planner.plan(epoch), None
            corpus, config = self._corpus, self._config
            if corpus.text is not None:
                text = corpus.text.plan(
                    epoch,
                    steps=corpus.steps(config.corpus_micro_batches),
                    micro_batches=config.text_micro_batches,
                    seed=self._seed,
                    cost=self._text_cost,
                )
            for old in list(self._plans)[: 1 - _PLANS]:
                del self._plans[old]
            self._plans[epoch] = (plan, text)
            digest = hashlib.sha256(self._augmenter.fingerprint.encode())
            for each in (plan,) if text is None else (plan, text):
                for values in (each.offsets, each.indices):
                    digest.update(np.ascontiguousarray(values).data)
            self._fingerprints[epoch] = digest.hexdigest()
        return self._plans[epoch]

    @property
    def augmentation(self) -> str:
        """Description of the audio augmentation for the user; empty without any."""
        return str(self._augmenter)

    @property
    def shape(self) -> StaticShape | None:
        """The shape of every batch; None where each has its own."""
        return self._planner.shape

    def fingerprint(self, epoch: int) -> str:
        """Return a hash of an epoch's plan and augmentation, which a resumed run compares."""
        if epoch not in self._fingerprints:
            self.plan(epoch)
        return self._fingerprints[epoch]

    def steps(self, epoch: int = 0, step: int = 0) -> Generator[StepBatch, None, None]:
        """Return an endless iterator of this rank's part of each global step from a position on.

        Closing the iterator ends its worker processes.
        """
        if not 0 <= step < self.plan(epoch).num_steps:
            raise ValueError(
                f"`step` must be in 0 .. {self.plan(epoch).num_steps - 1}, the steps of epoch "
                f"{epoch}, but is {step}: corpus or budgets are not those of the saved position."
            )
        return self.take(self._own_parts(epoch, step))

    def take(self, parts: Iterable[MicroBatchRef]) -> Generator[StepBatch, None, None]:
        """Yield the requested parts of global steps, in any order.

        ``parts`` is endless and asked a little ahead of what is yielded. Closing the iterator ends
        its worker processes.
        """
        with warnings.catch_warnings():
            # More workers than processors are what the configuration asks for: they wait for files.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            loaded = worker_processes.start(self._data_loader(parts))
        try:
            while True:
                yield self._joined(
                    [worker_processes.next_item(loaded) for _ in range(self._rounds)]
                )
        finally:
            # An error keeps this frame, but must not keep the workers.
            del loaded

    def load(self, part: MicroBatchRef) -> StepBatch:
        """Load one part of a global step at once, in this process."""
        data = self._dataset()
        step = self._joined([data[ref] for ref in self._refs([part])])
        return step.pin_memory() if self._pin_memory else step

    def reading(self) -> list[str]:
        """Return the utterances that are being read at this moment, each with its file."""
        corpus = self._corpus
        reading = [index for index in self._reading[:] if index >= 0]
        return [f"{corpus.name(i)} ({audio_path(corpus.audio(i)) or 'no file'})" for i in reading]

    def _own_parts(self, epoch: int, step: int) -> Iterator[MicroBatchRef]:
        while True:
            for number in range(step, self.plan(epoch).num_steps):
                yield MicroBatchRef(epoch, number, self._rank)
            epoch, step = epoch + 1, 0

    def _refs(self, parts: Iterable[MicroBatchRef]) -> Iterator[MicroBatchRef]:
        for part in parts:
            plan, text = self._both_plans(part.epoch)
            members = [(indices, False) for indices in plan.step(part.step)]
            if text is not None:
                members += [(indices, True) for indices in text.step(part.step % text.num_steps)]
                # Rotated, so that the batch norms of every rank see speech now and then.
                first = (part.step + part.epoch) % len(members)
                members = members[first:] + members[:first]
            local = members[part.rank :: self._world_size]
            # A rank without a micro-batch in a round would keep the others waiting.
            local += [(EMPTY, False)] * (self._rounds - len(local))
            for round_, (indices, is_text) in enumerate(local):
                yield replace(
                    part,
                    num_steps=plan.num_steps,
                    place=part.rank + round_ * self._world_size,
                    indices=indices,
                    is_text=is_text,
                )

    def _joined(self, items: list[StepBatch | AudioError | SharedMemoryError]) -> StepBatch:
        """Return a rank's micro-batches of a step together; an error among them is raised."""
        parts: list[StepBatch] = []
        for item in items:
            if isinstance(item, Exception):
                raise item
            parts.append(item)
        count = self._world_size
        return replace(
            parts[0],
            batches=[batch for part in parts for batch in part.batches],
            skipped=tuple(drop for part in parts for drop in part.skipped),
            indices=np.concatenate([part.indices for part in parts]),
            text_indices=np.concatenate([part.text_indices for part in parts]),
            places=range(parts[0].places.start, self._rounds * count, count),
        )

    def _dataset(self) -> MicroBatchDataset:
        shape = self._planner.shape
        parts = self._corpus, self._config, shape, self._reading, self._augmenter
        return MicroBatchDataset(*parts, narrows=self._pin_memory)

    def _data_loader(self, parts: Iterable[MicroBatchRef]) -> DataLoader[Any]:
        workers = self._config.workers
        return DataLoader(
            self._dataset(),
            batch_size=None,
            sampler=self._refs(parts),
            collate_fn=_identity,
            num_workers=workers,
            prefetch_factor=self._config.prefetch if workers else None,
            pin_memory=self._pin_memory,
            # The default would draw from torch's global generator, and a resumed run would differ.
            generator=torch.Generator(),
            worker_init_fn=partial(worker_processes.end_with_parent, os.getpid()),
            multiprocessing_context=worker_processes.context() if workers else None,
        )


def _uneven(micro_batches: int, world_size: int) -> str:
    rounds = -(-micro_batches // world_size)
    idle = rounds * world_size - micro_batches
    return (
        f"`micro_batches` = {micro_batches} is no multiple of the number of ranks, {world_size}: "
        f"in each step {idle} of {rounds * world_size} places stay empty, "
        f"{100 * idle / (rounds * world_size):.0f} % of the time of all; a run of "
        f"{f'{whole} or ' if (whole := (rounds - 1) * world_size) else ''}{rounds * world_size} "
        "micro-batches would lose nothing."
    )


def _identity(item: Any) -> Any:
    return item
