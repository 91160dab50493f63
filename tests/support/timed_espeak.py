"""Synthesised speech with the times of its words."""

import ctypes
import itertools
import re
from typing import Any, NamedTuple

import numpy as np

from effasr.data.demo.acoustics import Espeak

_LIST_END, _WORD, _PHONEME = 0, 1, 7  # espeak_EVENT_TYPE


class _Event(ctypes.Structure):
    """``espeak_EVENT``, as in speak_lib.h."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("phoneme", ctypes.c_char * 8),
    )


class SpokenWords(NamedTuple):
    """A word with its place in the audio, or several that the library says as one ("on the")."""

    text: str
    start: float  # s
    end: float  # s, where the next word begins, or a pause


class TimedEspeak(Espeak):
    options = Espeak.options | 1  # espeakINITIALIZE_PHONEME_EVENTS: changes no sample

    def __init__(self) -> None:
        self._events: list[tuple[int, int, int, bytes]] = []
        super().__init__()

    def speak(self, text: str, *, rate: int, pitch: int) -> np.ndarray:
        self._events.clear()
        return super().speak(text, rate=rate, pitch=pitch)

    def words(self, text: str) -> list[SpokenWords]:
        """Return the times of the words, after `speak`."""
        # Positions count characters from 1. An event inside a word, after a hyphen, begins none.
        begins = {match.start() + 1 for match in re.finditer(r"\S+", text)}
        starts: list[tuple[int, int]] = []
        ends: list[int] = []
        for kind, position, sample, phoneme in self._events:
            begun = kind == _WORD and position in begins
            # Of one "_" and colons; "_!" is a glottal stop, "_^_" a change of language.
            pause = phoneme.startswith(b"_") and not phoneme.strip(b"_:")
            if len(ends) < len(starts) and (begun or pause):
                ends.append(sample)
            if begun:
                starts.append((position, sample))
        ends += [sum(map(len, self._chunks)) // 2] * (len(starts) - len(ends))
        stops = [position for position, _ in starts[1:]] + [len(text) + 1]
        return [
            SpokenWords(
                text[position - 1 : stop - 1].strip(),
                sample / self.sample_rate,
                end / self.sample_rate,
            )
            for (position, sample), stop, end in zip(starts, stops, ends, strict=True)
        ]

    def _collect(self, samples: Any, count: int, events: Any) -> int:
        events = ctypes.cast(events, ctypes.POINTER(_Event))
        for event in map(events.__getitem__, itertools.count()):
            if event.type == _LIST_END:
                break
            phoneme = event.phoneme if event.type == _PHONEME else b""
            self._events.append((event.type, event.text_position, event.sample, phoneme))
        return super()._collect(samples, count, events)
