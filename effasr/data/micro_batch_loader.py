"""Dataset of micro-batches, which worker processes load."""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from effasr.data.audio.augmentation.augmenter import Augmenter, Moment, UnreadableRecording
from effasr.data.audio.waveform import AudioError, audio_path
from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example, TextExample
from effasr.data.config import DataConfig
from effasr.data.conversation.collate import ConversationExample
from effasr.data.conversation.corpus import ConversationCorpus
from effasr.data.filters.rules import Dropped
from effasr.data.index.corpus import Corpus
from effasr.data.index.text_corpus import TextCorpus
from effasr.data.worker_processes import SharedMemoryError, share

EMPTY = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatchRef:
    """A micro-batch to be loaded; the first four fields name a rank's part of a global step.

    Attributes:
        epoch: Counted from 0.
        step: Counted from 0 in each epoch.
        rank: Rank that the part belongs to.
        number: Number by which the caller recognises the part.
        num_steps: Steps of the epoch.
        place: Index among the micro-batches of the global step.
        indices: int32 (m,), the utterances of the corpus, or the text pairs, that are in it.
        is_text: Whether it is text-only.
    """

    epoch: int
    step: int
    rank: int
    number: int = 0
    num_steps: int = 0
    place: int = 0
    indices: np.ndarray = field(default_factory=EMPTY.copy)
    is_text: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """A rank's part of a global step, or one micro-batch of it.

    Attributes:
        epoch: Counted from 0.
        step: Counted from 0 in each epoch.
        num_steps: Steps of this epoch.
        batches: This rank's micro-batches.
        skipped: Utterances left out of them because their audio could not be read.
        indices: int32 (m,), the utterances of the corpus that were to be in them.
        text_indices: int32 (m,), the text pairs that are in text-only ones.
        places: Number of each of the ``batches`` among the micro-batches of the global step.
        number: Number of the `MicroBatchRef`.
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

    def pin_memory(self) -> StepBatch:
        """Return the same in pinned memory; called by torch's DataLoader."""
        return replace(self, batches=[batch.pin_memory() for batch in self.batches])


class MicroBatchDataset(Dataset[StepBatch | AudioError | SharedMemoryError]):
    """Loads requested micro-batches; every worker process has a copy."""

    def __init__(
        self,
        corpus: Corpus | ConversationCorpus | TextCorpus,
        config: DataConfig,
        shape: StaticShape | None,
        reading: MutableSequence[int],
        augmenter: Augmenter,
    ) -> None:
        """Set up; in ``reading`` each worker publishes the utterance that it is reading, or -1."""
        self._augmenter = augmenter
        self._reading = reading
        self._corpus = corpus
        self._shape = shape
        self._padded = config.padded
        self._skip = config.on_bad_audio == "skip"

    def __getitem__(self, ref: MicroBatchRef) -> StepBatch | AudioError | SharedMemoryError:
        """Load one micro-batch; errors are returned, not raised, to arrive without a traceback."""
        part = self._load(ref)
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
    ) -> Example | ConversationExample | TextExample:
        """Load an utterance, augmented; unreadable recordings for it are added to ``skipped``."""
        example = self._corpus.example(index)
        if not self._augmenter or isinstance(example, TextExample):
            return example

        def augment(audio: np.ndarray) -> np.ndarray:
            augmented, unreadable = self._augmenter(audio, Moment(ref.epoch, ref.step, index))
            skipped.extend(unreadable)
            return augmented

        return example.map_audio(augment)

    def _dropped(self, index: int, error: AudioError) -> Dropped:
        corpus = self._corpus
        path = audio_path(corpus.audio(index)) or ""
        name, seconds = corpus.name(index), corpus.duration(index)
        return Dropped(name, error.problem, str(error), path, seconds)


def _tensors(batch: Batch) -> Iterator[Tensor]:
    """Yield every tensor of a batch that a worker hands over."""
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
