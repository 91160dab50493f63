"""Simulates room impulse responses.

In place of lhotse's generator, which needs torchaudio.
"""

from __future__ import annotations

import math

import numpy as np

from effasr.data.audio.augmentation.reverberation import ImpulseResponse
from effasr.data.features.frame_geometry import SAMPLE_RATE

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

    Returns:
        The response from the direct sound on, as long as the T60. The ratio of direct to
        reverberant energy is V 6 ln(10) / (4 pi c T60 d^2) in the mean, for a small distance d.

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
