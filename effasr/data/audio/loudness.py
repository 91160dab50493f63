"""Loudness of audio over time, and what may be speech by it alone."""

import numpy as np

HOP_SECONDS = 0.01

SILENCE_DB = -100.0  # level of zeros in `loudness`
_SMOOTH_HOPS = 5
_SILENT_DB = -70.0  # relative to full scale; recordings of speech are louder
_LEAST_RANGE_DB = 8.0  # least range between background and speech in a recording with pauses
_SHARE = 0.3  # threshold of speech between the background and the loudest speech, as a share in dB
_MOST_OVER_DB = 10.0  # weak syllables are not much louder than the background of a quiet room
_BELOW_SPEECH_DB = 15.0  # audio of even loudness this far below the earlier speech is background


def hop_samples(sample_rate: int) -> int:
    return max(1, round(HOP_SECONDS * sample_rate))


def loudness(samples: np.ndarray, sample_rate: int) -> np.ndarray:
    """Mean power around each 10 ms in dB of full scale, averaged over 50 ms: float (hops,)."""
    hop = hop_samples(sample_rate)
    hops = -(-len(samples) // hop)
    if not hops:
        return np.zeros(0)
    power = np.zeros(hops * hop)
    np.square(samples, out=power[: len(samples)])
    energy = power.reshape(hops, hop).sum(axis=1)
    counts = np.full(hops, float(hop))
    counts[-1:] = len(samples) - (hops - 1) * hop
    window = np.ones(min(_SMOOTH_HOPS, hops))
    smooth = np.convolve(energy, window, mode="same") / np.convolve(counts, window, mode="same")
    return 10 * np.log10(smooth + 1e-10)


def is_speech(levels: np.ndarray, loudest: float = -np.inf) -> np.ndarray:
    """Return whether each hop may be speech: bool (hops,).

    Background and speech differ by at least 8 dB. If the loudness is more even than that, all of it
    is speech, unless it is silent or far below the earlier speech.
    """
    background, peak = float(np.quantile(levels, 0.1)), float(levels.max())
    if peak < _SILENT_DB:
        return np.zeros(len(levels), dtype=bool)
    background = max(background, _SILENT_DB)
    if peak - background < _LEAST_RANGE_DB:
        return np.full(len(levels), peak > loudest - _BELOW_SPEECH_DB)
    return levels > background + min(_SHARE * (peak - background), _MOST_OVER_DB)
