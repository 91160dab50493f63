"""Augments the audio of an utterance, as a function of seed, epoch, step and utterance."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from effasr.data.audio.augmentation.clips import Clips
from effasr.data.audio.augmentation.config import AudioAugmentationConfig
from effasr.data.audio.augmentation.effects import (
    ImpulseResponse,
    add_noise,
    looped,
    reverberate,
    simulated_room,
    telephone,
)
from effasr.data.audio.silence import with_silence
from effasr.data.audio.waveform import AudioError, audio_path
from effasr.data.filters.rules import Dropped

_REVERBERATION, _NOISE, _TELEPHONE, _SILENCE = range(4)
"""Each kind has a separate random stream, so its effect does not depend on the others."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Moment:
    """Position of an utterance in a run."""

    epoch: int  # Counted from 0
    step: int  # Counted from 0 in each epoch; an utterance may come more than once in an epoch
    index: int  # Index of the utterance in its corpus


class UnreadableRecording(AudioError):
    """A recording for augmentation cannot be used; the utterance itself is intact."""


class Augmenter:
    """Changes audio as configured."""

    def __init__(
        self, config: AudioAugmentationConfig, *, seed: int, skip_unreadable: bool
    ) -> None:
        """List recordings and check them.

        With ``skip_unreadable``, an utterance stays as it is where its recording cannot be read.
        """
        self._config = config
        self._seed = seed
        self._skip = skip_unreadable
        noise, room = config.noise, config.reverberation
        self._noises = None
        if noise is not None:
            self._noises = Clips.load(noise.manifests, "data.audio_augmentation.noise.manifests")
        self._responses = None
        if room is not None and room.manifests:
            where = "data.audio_augmentation.reverberation.manifests"
            self._responses = Clips.load(room.manifests, where)
        steps = (
            (_REVERBERATION, config.reverberation, self._reverberate),
            (_NOISE, config.noise, self._add_noise),
            (_TELEPHONE, config.telephone, self._telephone),
        )
        self._steps = [(kind, apply) for kind, section, apply in steps if section is not None]

    def __bool__(self) -> bool:
        """Return whether there is anything to do."""
        return bool(self._steps)

    def __str__(self) -> str:
        """Describe the augmentations and their shares of the utterances for the user."""
        room, noise = self._config.reverberation, self._config.noise
        parts = []
        if room is not None:
            rooms = "simulated" if self._responses is None else f"{len(self._responses)} recorded"
            parts.append(f"{100 * room.probability:g} % in {rooms} rooms")
        if noise is not None and self._noises is not None:
            low, high = noise.snr
            share = f"{100 * noise.probability:g} % with noise at {low:g} to {high:g} dB"
            parts.append(f"{share} from {len(self._noises)} recordings")
        if (telephone := self._config.telephone) is not None:
            parts.append(f"{100 * telephone.probability:g} % over the telephone")
        return ", ".join(parts)

    @property
    def fingerprint(self) -> str:
        """Changes if the number, order or length of a recording does; empty without any."""
        used = [clips.fingerprint for clips in (self._noises, self._responses) if clips]
        return hashlib.sha256(" ".join(used).encode()).hexdigest() if used else ""

    def __call__(
        self, audio: np.ndarray, moment: Moment, silence: int = 0
    ) -> tuple[np.ndarray, list[Dropped]]:
        """Change the audio of an utterance, after adding so many samples of silence to it."""
        unreadable: list[Dropped] = []
        place = self._seed, moment.epoch, moment.step, moment.index
        if silence:
            audio = with_silence(audio, silence, np.random.default_rng((*place, _SILENCE)))
        for kind, apply in self._steps:
            audio = apply(audio, np.random.default_rng((*place, kind)), unreadable)
        return audio, unreadable

    def _reverberate(
        self, audio: np.ndarray, rng: np.random.Generator, unreadable: list[Dropped]
    ) -> np.ndarray:
        config, responses = self._config.reverberation, self._responses
        if config is None or rng.random() >= config.probability:
            return audio
        if responses is None:
            return reverberate(audio, simulated_room(rng, config.decay_time))
        index = int(rng.integers(len(responses)))
        response = self._tried(
            responses, index, lambda: ImpulseResponse.of(responses.read(index)), unreadable
        )
        return audio if response is None else reverberate(audio, response)

    def _add_noise(
        self, audio: np.ndarray, rng: np.random.Generator, unreadable: list[Dropped]
    ) -> np.ndarray:
        config, noises = self._config.noise, self._noises
        if config is None or noises is None or rng.random() >= config.probability:
            return audio
        snr = rng.uniform(*config.snr)
        index = int(rng.integers(len(noises)))
        length = int(noises.samples[index])
        spare = length - len(audio)
        # Of a long clip a stretch; a short one is repeated from anywhere in it.
        start = int(rng.integers(spare + 1 if spare >= 0 else length))
        if spare >= 0:
            read = lambda: noises.read(index, start, len(audio))
        else:
            read = lambda: looped(noises.read(index), len(audio), start)
        noise = self._tried(noises, index, read, unreadable)
        return audio if noise is None else add_noise(audio, noise, snr)

    def _telephone(
        self, audio: np.ndarray, rng: np.random.Generator, unreadable: list[Dropped]
    ) -> np.ndarray:
        config = self._config.telephone
        if config is None or rng.random() >= config.probability:
            return audio
        return telephone(audio)

    def _tried(
        self, clips: Clips, index: int, read: Callable[[], T], unreadable: list[Dropped]
    ) -> T | None:
        """Return the result of ``read``, or list the clip as unreadable and return None."""
        try:
            return read()
        except AudioError as error:
            cut = clips.cut(index)
            path = audio_path(cut) or ""
            details = str(error) if path in str(error) else f"{path}: {error}"
            details = f"`data.audio_augmentation`: {details}"
            if not self._skip:
                raise UnreadableRecording(error.problem, details) from error
            unreadable.append(Dropped(cut.id, error.problem, details, path, cut.duration))
            return None
