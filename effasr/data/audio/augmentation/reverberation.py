"""Adds reverberation: convolution with a room impulse response."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from effasr.data.audio.augmentation.noise import mean_power
from effasr.data.audio.waveform import AudioError, AudioProblem

_INAUDIBLE = 1e-6
"""Share of its energy, -60 dB, at which the tail of a recorded response is cut off."""


@dataclass(frozen=True, slots=True, eq=False)
class ImpulseResponse:
    """Room impulse response.

    Attributes:
        values: float32 (n,).
        delay: The sample at which the sound arrives that took the direct path.
    """

    values: np.ndarray
    delay: int

    @classmethod
    def of(cls, recording: np.ndarray) -> ImpulseResponse:
        """Take a recorded response, float32 (n,), without a silent end.

        The direct path is its largest sample.

        Raises:
            AudioError: It is silent.
        """
        energies = np.cumsum(np.square(recording, dtype=np.float64)[::-1])[::-1]
        if not energies.size or energies[0] == 0:
            raise AudioError(AudioProblem.SILENT, "the impulse response is silent.")
        length = int(np.count_nonzero(energies > _INAUDIBLE * energies[0]))
        return cls(recording[:length], int(np.abs(recording[:length]).argmax()))


def reverberate(speech: np.ndarray, response: ImpulseResponse) -> np.ndarray:
    """Speech in a room, as long and as loud as before, and at the same time.

    The delay of the direct path is taken away, so that what is heard when stays as the text has
    it; what sounds on after the end is cut off.

    Args:
        speech: float32 (samples,).
        response: Impulse response of the room.

    Returns:
        float32 (samples,); the mean power is that of ``speech``.

    References:
        Ko et al., 2017, A study on data augmentation of reverberant speech for robust speech
        recognition; Kaldi's wav-reverberate with --shift-output.
    """
    heard = convolve(speech, response.values)[response.delay : response.delay + len(speech)]
    before, after = mean_power(speech), mean_power(heard)
    if before == 0 or after == 0:
        return speech
    return heard * np.float32(math.sqrt(before / after))


def convolve(signal: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Return the whole convolution of float32 (n,) and (m,), by FFTs of blocks (overlap-add).

    By NumPy and not by torch, whose FFTs may differ in the last bit from one call to the next.

    Returns:
        float32 (n + m - 1,).
    """
    size = max(8192, 2 ** math.ceil(math.log2(4 * len(kernel))))
    step = size - len(kernel) + 1
    blocks = -(-len(signal) // step)
    padded = np.zeros((blocks, step), dtype=np.float32)
    padded.reshape(-1)[: len(signal)] = signal
    spectra = np.fft.rfft(padded, size, axis=1) * np.fft.rfft(kernel, size)
    parts = np.fft.irfft(spectra, size, axis=1)
    result = np.zeros(blocks * step + size, dtype=np.float32)
    for block in range(blocks):
        result[block * step : block * step + size] += parts[block]
    return result[: len(signal) + len(kernel) - 1]
