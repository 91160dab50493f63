"""Makes synthetic speech sound recorded: level, background noise, 16 bits."""

import ctypes
import importlib
import os
from typing import Any

import numpy as np
import soxr

SAMPLE_RATE = 16_000
REFERENCE_LEVEL_DB = -24.0
"""Mean power of the speech at a gain of 0 dB, relative to full scale."""
_CEILING = 0.95


def record(
    speech: np.ndarray,  # float32 (samples,) in [-1, 1]
    speech_rate: int,
    *,
    gain_db: float,  # relative to `REFERENCE_LEVEL_DB`
    snr_db: float,
    noise_slope: float,
    lead_s: float,  # of noise alone before the speech
    tail_s: float,
    seed: int,  # of the noise
) -> np.ndarray:
    """Resamples, sets the level, adds noise, and quantises without clipping."""
    resampled = soxr.resample(speech, speech_rate, SAMPLE_RATE)
    level = 10 ** ((REFERENCE_LEVEL_DB + gain_db) / 20)
    resampled = resampled * (level / np.sqrt(np.mean(resampled**2)))
    mixed = np.pad(resampled, (round(lead_s * SAMPLE_RATE), round(tail_s * SAMPLE_RATE)))
    mixed += coloured_noise(len(mixed), noise_slope, seed) * (level * 10 ** (-snr_db / 20))
    mixed *= min(1.0, _CEILING / np.abs(mixed).max())
    return np.round(mixed * 32767).astype(np.int16)


def coloured_noise(samples: int, slope: float, seed: int) -> np.ndarray:
    """Gaussian noise of unit power whose spectrum falls as 1 / f^slope above 50 Hz."""
    rng = np.random.default_rng(seed)
    # A power of two keeps the transform fast at any length; the surplus is cut off.
    length = 1 << max(samples - 1, 1).bit_length()
    bins = length // 2 + 1
    spectrum = rng.standard_normal(2 * bins, dtype=np.float32).view(np.complex64)
    frequency = np.linspace(0, SAMPLE_RATE / 2, bins, dtype=np.float32)
    spectrum *= np.maximum(frequency, 50.0) ** (-slope / 2)
    spectrum[0] = 0
    noise = np.fft.irfft(spectrum, length)[:samples].astype(np.float32)
    return noise / np.sqrt(np.mean(noise**2))


# eSpeak NG through ctypes, from the shared library that the package espeakng-loader carries.
#
# The library is global to its process and keeps state between sentences (echo, flutter, noise), so
# equal bytes need a fresh process that says the same sentences in the same order.

_SYNCHRONOUS = 2  # AUDIO_OUTPUT_SYNCHRONOUS: espeak_Synth returns when all audio was delivered
_CHARS_UTF8 = 1
_POSITION_CHARACTER = 1
_RATE, _VOLUME, _PITCH = 1, 2, 3
# Half the default: some voices clip inside the library at 100.
_QUIET = 50

_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
)


class _VoiceRecord(ctypes.Structure):
    """The head of ``espeak_VOICE``, as in speak_lib.h."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("languages", ctypes.c_char_p),
        ("identifier", ctypes.c_char_p),
    )


class Espeak:
    """The synthesiser of this process."""

    options = 0x8000  # espeakINITIALIZE_DONT_EXIT: report bad data by result code

    def __init__(self) -> None:
        loader = importlib.import_module("espeakng_loader")
        self._library: Any = ctypes.CDLL(loader.get_library_path())
        self._library.espeak_GetCurrentVoice.restype = ctypes.POINTER(_VoiceRecord)
        data = os.fsencode(loader.get_data_path())
        self.sample_rate: int = self._library.espeak_Initialize(_SYNCHRONOUS, 0, data, self.options)
        if self.sample_rate <= 0:
            raise RuntimeError(f"espeak: cannot read its data in {os.fsdecode(data)}")
        self._library.espeak_ng_SetRandSeed(ctypes.c_long(1))
        self._chunks: list[bytes] = []
        # The library keeps only the pointer; the object must live as long as it does.
        self._callback = _Callback(self._collect)
        self._library.espeak_SetSynthCallback(self._callback)

    def select(self, voice: str) -> None:
        """Makes ``voice`` ("en-us+f1": accent and variant) the current one."""
        code = self._library.espeak_SetVoiceByName(voice.encode())
        record = self._library.espeak_GetCurrentVoice()
        found = record.contents.identifier.decode() if code == 0 and record else "no voice"
        # The identifier is the path of the voice's file, like "gmw/en-US+f1".
        if found.rpartition("/")[2].lower() != voice.lower():
            raise ValueError(
                f"espeak: `voice` must be an accent and a variant that this library has, "
                f"but {voice!r} gave {found!r}"
            )

    def speak(self, text: str, *, rate: int, pitch: int) -> np.ndarray:
        """Render a sentence with the current voice at `sample_rate`, in [-1, 1)."""
        for parameter, value in ((_RATE, rate), (_VOLUME, _QUIET), (_PITCH, pitch)):
            self._library.espeak_SetParameter(parameter, value, 0)
        self._chunks.clear()
        data = text.encode() + b"\0"
        code = self._library.espeak_Synth(
            data, len(data), 0, _POSITION_CHARACTER, 0, _CHARS_UTF8, None, None
        )
        samples = np.frombuffer(b"".join(self._chunks), np.int16)
        if code != 0 or not samples.any():
            raise RuntimeError(f"espeak: no audio for {text!r} (result code {code})")
        return samples.astype(np.float32) / 32768

    def _collect(self, samples: Any, count: int, events: Any) -> int:
        if samples and count > 0:
            self._chunks.append(ctypes.string_at(samples, 2 * count))
        return 0
