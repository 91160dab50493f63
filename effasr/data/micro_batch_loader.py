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
from effasr.data.audio.waveform import AudioError, audio_path, prefetch_audio
from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example, TextExample
from effasr.data.config import DataConfig
from effasr.data.conversation.batch import ConversationExample
from effasr.data.conversation.corpus import ConversationCorpus
from effasr.data.features.frame_geometry import SAMPLE_RATE
from effasr.data.filters.rules import Dropped
from effasr.data.index.corpus import Corpus
from effasr.data.index.text_corpus import TextCorpus
from effasr.data.worker_processes import SharedMemoryError, share

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

    def pin_memory(self) -> StepBatch:
        """Called by torch's DataLoader."""
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
    ) -> Example | ConversationExample | TextExample:
        """Load an utterance, augmented; unreadable recordings for it are added to ``skipped``."""
        example = self._corpus.example(index)
        silence = self._corpus.silence(index)
        if isinstance(example, TextExample) or not (self._augmenter or silence):
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
