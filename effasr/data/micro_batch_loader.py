"""Micro-batches on their way from the disk to the training, by worker processes or without."""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass, replace

import numpy as np
from torch.utils.data import Dataset, get_worker_info

from effasr.data.audio.augmentation.augmenter import Augmenter, Moment, UnreadableRecording
from effasr.data.audio.waveform import AudioError, AudioProblem, audio_path
from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example, collate
from effasr.data.config import DataConfig
from effasr.data.filters.rules import Dropped
from effasr.data.index.corpus import Corpus


@dataclass(frozen=True, slots=True)
class Turn:
    """Which part of which global step a rank is to train on.

    Attributes:
        epoch: Counted from 0.
        step: Counted from 0 in each epoch.
        rank: Whose part.
        number: By which the caller knows it again.
    """

    epoch: int
    step: int
    rank: int
    number: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A micro-batch to be loaded, and where it belongs."""

    turn: Turn
    num_steps: int
    indices: np.ndarray
    is_text: bool


@dataclass(frozen=True, slots=True)
class Loaded:
    """A micro-batch on its way from a worker."""

    place: Place
    batch: Batch
    skipped: list[Dropped]

    def pin_memory(self) -> Loaded:
        """Called by torch's DataLoader."""
        return Loaded(self.place, self.batch.pin_memory(), self.skipped)


@dataclass(frozen=True, slots=True)
class Failure:
    """An error on its way from a worker, without the worker's traceback."""

    problem: AudioProblem
    message: str
    remedy: str


class MicroBatches(Dataset[Loaded | Failure]):
    """Loads what it is asked for; lives in every worker."""

    def __init__(
        self,
        corpus: Corpus,
        config: DataConfig,
        shape: StaticShape | None,
        reading: MutableSequence[int],
        augmenter: Augmenter,
    ) -> None:
        """Nothing is loaded yet.

        Args:
            corpus: The utterances.
            config: What to do with bad audio, and whether to pad.
            shape: Of batches; None where each has its own.
            reading: Shared with all workers: the utterance that each is reading, or -1.
            augmenter: What changes their audio.
        """
        self._augmenter = augmenter
        self._reading = reading
        self._corpus = corpus
        self._shape = shape
        self._padded = config.padded
        self._skip = config.on_bad_audio == "skip"

    def __getitem__(self, place: Place) -> Loaded | Failure:
        corpus = self._corpus
        if place.is_text:
            assert corpus.text is not None
            return Loaded(place, corpus.text.batch(place.indices), [])
        examples, skipped = [], []
        worker = get_worker_info()
        slot = 0 if worker is None else worker.id
        for index in place.indices.tolist():
            self._reading[slot] = index
            try:
                examples.append(self._example(index, place.turn, skipped))
            except AudioError as error:
                if not self._skip:
                    self._reading[slot] = -1
                    return Failure(error.problem, str(error), _remedy(error))
                cut = corpus.cut(index)
                path, seconds = audio_path(cut) or "", corpus.duration(index)
                name = corpus.name(index)
                skipped.append(Dropped(name, error.problem, str(error), path, seconds))
        self._reading[slot] = -1
        batch = collate(
            examples,
            self._shape,
            eos_id=corpus.eos_id,
            pad_id=corpus.pad_id,
            padded=self._padded,
            framing=corpus.shape.framing,
        )
        return Loaded(place, batch, skipped)

    def _example(self, index: int, turn: Turn, skipped: list[Dropped]) -> Example:
        """An utterance; recordings that it would have been changed by are added to ``skipped``."""
        example = self._corpus.example(index)
        if not self._augmenter:
            return example
        audio, unreadable = self._augmenter(example.audio, Moment(turn.epoch, turn.step, index))
        skipped += unreadable
        return replace(example, audio=audio)


def _remedy(error: AudioError) -> str:
    if isinstance(error, UnreadableRecording):
        return "Mend it or remove it"
    return "Run `effasr prepare` to leave it out"


def checked(item: Loaded | Failure) -> Loaded:
    """What was loaded.

    Raises:
        AudioError: It was not.
    """
    if isinstance(item, Failure):
        raise AudioError(
            item.problem,
            f"{item.message} {item.remedy}, or set data.on_bad_audio=skip.",
        )
    return item
