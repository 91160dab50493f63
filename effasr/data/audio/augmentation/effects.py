"""Adds noise at a signal-to-noise ratio."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import soxr

from effasr.data.audio.waveform import AudioError, AudioProblem
from effasr.data.features.frame_geometry import SAMPLE_RATE

_FADE = SAMPLE_RATE // 50
"""Samples over which a clip that begins anew is mixed with its end: 20 ms, so nothing clicks."""


def add_noise(speech: np.ndarray, noise: np.ndarray, snr: float) -> np.ndarray:
    """Add noise at a ratio ``snr`` of the mean powers, in dB; the speech stays as loud as it was.

    Where either is silent there is no ratio, and the speech is returned alone.
    """
    power, noise_power = mean_power(speech), mean_power(noise)
    if power == 0 or noise_power == 0:
        return speech
    gain = math.sqrt(power / noise_power) * 10 ** (-snr / 20)
    return speech + np.float32(gain) * noise


def looped(clip: np.ndarray, samples: int, start: int) -> np.ndarray:
    """Return a stretch of a clip, of at least one sample, that is repeated without end.

    Where it begins anew, its end is faded out under its beginning, at equal power.
    """
    if start + samples <= len(clip):
        return clip[start : start + samples]
    fade = min(_FADE, len(clip) // 2)
    angles = (np.arange(fade, dtype=np.float32) + 0.5) * np.float32(math.pi / 2 / max(1, fade))
    period = clip[: len(clip) - fade].copy()
    period[:fade] = np.sin(angles) * clip[:fade] + np.cos(angles) * clip[len(clip) - fade :]
    repeats = -(-(start % len(period) + samples) // len(period))
    begin = start % len(period)
    return np.tile(period, repeats)[begin : begin + samples]


def mean_power(samples: np.ndarray) -> float:
    """Mean square of samples, summed in float64; 0 of none."""
    if not len(samples):
        return 0.0
    # einsum and not dot: BLAS may sum in another order with another number of threads.
    return float(np.einsum("i,i->", samples, samples, dtype=np.float64)) / len(samples)


# Simulates a telephone channel: 8 kHz and mu-law.

_TELEPHONE_RATE = 8000
_MU = 255.0


def telephone(audio: np.ndarray) -> np.ndarray:
    """Return audio after 8 kHz and 8 bits of mu-law, at the same rate and time.

    What is beyond full scale, 1, is clipped, as a telephone does. The curve is the continuous one,
    of which the standard, ITU-T G.711, has a piecewise linear one.
    """
    narrow = soxr.resample(audio, SAMPLE_RATE, _TELEPHONE_RATE)
    wide = soxr.resample(_expanded(_compressed(narrow)), _TELEPHONE_RATE, SAMPLE_RATE)
    # Resampling to and fro may miss the length by a sample.
    return np.pad(wide, (0, max(0, len(audio) - len(wide))))[: len(audio)]


def _compressed(values: np.ndarray) -> np.ndarray:
    """Return codes from -127 to 127."""
    scale = np.float32(127 / math.log1p(_MU))
    codes = np.rint(np.log1p(np.float32(_MU) * np.minimum(np.abs(values), 1)) * scale)
    return np.copysign(codes, values)


def _expanded(codes: np.ndarray) -> np.ndarray:
    scale = np.float32(math.log1p(_MU) / 127)
    return np.copysign(np.expm1(np.abs(codes) * scale) / np.float32(_MU), codes)


# Adds reverberation: convolution with a room impulse response.

_INAUDIBLE = 1e-6
"""Share of its energy, -60 dB, at which the tail of a recorded response is cut off."""


@dataclass(frozen=True, slots=True, eq=False)
class ImpulseResponse:
    """Room impulse response."""

    values: np.ndarray  # float32 (n,)
    delay: int  # The sample at which the sound arrives that took the direct path

    @classmethod
    def of(cls, recording: np.ndarray) -> ImpulseResponse:
        """Take a recorded response, float32 (n,), without a silent end.

        The direct path is its largest sample.
        """
        energies = np.cumsum(np.square(recording, dtype=np.float64)[::-1])[::-1]
        if not energies.size or energies[0] == 0:
            raise AudioError(AudioProblem.SILENT, "the impulse response is silent.")
        length = int(np.count_nonzero(energies > _INAUDIBLE * energies[0]))
        return cls(recording[:length], int(np.abs(recording[:length]).argmax()))


def reverberate(speech: np.ndarray, response: ImpulseResponse) -> np.ndarray:
    """Speech in a room, as long and as loud as before, and at the same time.

    The delay of the direct path is taken away, so that what is heard when stays as the text has
    it; what sounds on after the end is cut off. The mean power stays.

    References:
        Ko et al., 2017, A study on data augmentation of reverberant speech for robust speech
        recognition; Kaldi's wav-reverberate with --shift-output.
    """
    received = convolve(speech, response.values)[response.delay : response.delay + len(speech)]
    before, after = mean_power(speech), mean_power(received)
    if before == 0 or after == 0:
        return speech
    return received * np.float32(math.sqrt(before / after))


def convolve(signal: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Return the whole convolution, (n + m - 1,), by FFTs of blocks (overlap-add).

    By NumPy and not by torch, whose FFTs may differ in the last bit from one call to the next.
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


# Simulates room impulse responses.
#
# In place of lhotse's generator, which needs torchaudio.

_SOUND = 343.0
"""Metres a second."""
_VOLUMES = (30.0, 1000.0)
"""Cubic metres: from an office to a lecture hall."""
_DISTANCES = (0.3, 6.0)
"""Metres from the mouth to the microphone."""
_DECAY = 6 * math.log(10)
"""Decay exponent of the energy over one T60: a factor of exp(-6 ln 10), 60 dB."""


def simulated_room(
    rng: np.random.Generator, decay_time: tuple[float, float] = (0.1, 0.8)
) -> ImpulseResponse:
    """Draw a room, a distance in it, and the reflections between.

    The direct sound is followed by reflections as a room has them in the mean: t seconds after
    the sound was made, 4 pi c^3 t^2 / V of them arrive a second, each with 1 / (c t) of its
    pressure and what walls have left of it, exp(-6.9 t / T60). First there are single echoes,
    then more and more. Beyond one a sample, fewer and stronger ones stand for many.

    References:
        Kuttruff, Room Acoustics, chapters 4 and 5; Polack, 1988, La transmission de l'énergie
        sonore dans les salles.
    """
    t60 = rng.uniform(*decay_time)
    volume = math.exp(rng.uniform(math.log(_VOLUMES[0]), math.log(_VOLUMES[1])))
    low, high = _DISTANCES
    distance = rng.uniform(low, min(high, volume ** (1 / 3)))
    times = distance / _SOUND + np.arange(1, max(2, round(t60 * SAMPLE_RATE))) / SAMPLE_RATE
    arrivals = 4 * math.pi * _SOUND**3 / volume * times**2 / SAMPLE_RATE
    energies = np.exp(-_DECAY / t60 * times) / (_SOUND * times) ** 2
    thinned = np.minimum(arrivals, 1)
    counts = rng.poisson(thinned)
    # A reflection is of either sign, so that what arrives at once adds up in energy.
    signs = 2 * rng.binomial(counts, 0.5) - counts
    reflections = signs * np.sqrt(energies * arrivals / thinned)
    return ImpulseResponse(np.append(1 / distance, reflections).astype(np.float32), 0)
