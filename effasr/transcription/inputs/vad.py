"""Voice activity detection by loudness: what is far below the surrounding speech is a gap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from effasr.transcription.inputs.chunking import Chunk

HOP_SECONDS = 0.01  # resolution of the loudness

_SMOOTH_HOPS = 5
_SILENCE_DB = -100.0  # level of zeros in `loudness`
_SILENT_DB = -70.0  # relative to full scale; recordings of speech are louder
_LEAST_RANGE_DB = 8.0  # least range between background and speech in a recording with pauses
_SHARE = 0.3  # threshold of speech between the background and the loudest speech, as a share in dB
_BELOW_SPEECH_DB = 15.0  # audio of even loudness this far below the earlier speech is background

_FORGET_DB = 3.0  # decay per chunk of the remembered loudness of speech
_MARGIN_HOPS = 25


def loudness(samples: np.ndarray, sample_rate: int) -> np.ndarray:
    """Mean power around each 10 ms in dB of full scale, averaged over 50 ms: float (hops,)."""
    hop = max(1, round(HOP_SECONDS * sample_rate))
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
    return levels > background + _SHARE * (peak - background)


def without_gaps(
    chunks: Iterable[tuple[Chunk, np.ndarray]], sample_rate: int, gap_seconds: float
) -> Iterator[tuple[Chunk, np.ndarray]]:
    """Remove long stretches without speech from chunks, each with samples, float (samples,)."""
    loudest = -np.inf
    for chunk, samples in chunks:
        levels = loudness(samples, sample_rate)
        speech = is_speech(levels, loudest)
        if speech.any():
            loudest = max(loudest - _FORGET_DB, float(levels.max()))
        for start, end in _stretches(speech, round(gap_seconds / HOP_SECONDS)):
            hop = max(1, round(HOP_SECONDS * sample_rate))
            begin, stop = start * hop, min(end * hop, len(samples))
            yield Chunk(chunk.start + begin, chunk.start + stop), samples[begin:stop]


def _stretches(speech: np.ndarray, gap: int) -> list[tuple[int, int]]:
    """First and last hop, exclusive, of the stretches between gaps of at least ``gap`` hops."""
    places = np.flatnonzero(speech)
    if not len(places):
        return []
    # The ends of the audio bound gaps like speech.
    bounds = np.concatenate([[-1], places, [len(speech)]])
    long = np.flatnonzero(np.diff(bounds) - 1 >= gap)
    margin = min(_MARGIN_HOPS, gap // 2)
    begin, stretches = 0, []
    for index in long:
        before, after = int(bounds[index]), int(bounds[index + 1])
        if before >= 0:
            stretches.append((begin, before + 1 + margin))
        begin = after - margin
    if begin < len(speech) and (not len(long) or long[-1] != len(bounds) - 2):
        stretches.append((begin, len(speech)))
    return stretches


class StreamLoudness:
    """Levels of the frames that are still of interest, one for each `HOP_SECONDS`."""

    def __init__(self, sample_rate: int, frame_seconds: float):
        self.first = self.frames = 0
        self._rate, self._hops = sample_rate, frame_seconds / HOP_SECONDS
        # From the first frame on, in dB as `loudness` gives them: float (hops,).
        self.levels = np.zeros(0)

    def add(self, samples: np.ndarray, frames: int) -> None:
        """Add the samples of the next frames: float (samples,), fewer at the end of a stream."""
        # Levels count from the beginning of the stream, so that rounding does not add up.
        count = self._hop(self.frames + frames) - self._hop(self.frames)
        levels = loudness(samples, self._rate)[:count]
        silence = np.full(count - len(levels), _SILENCE_DB)
        self.levels = np.concatenate([self.levels, levels, silence])
        self.frames += frames

    def forget(self, before: int) -> None:
        if before > self.first:
            self.levels = self.levels[self._hop(before) - self._hop(self.first) :].copy()
            self.first = before

    def _hop(self, frame: int) -> int:
        return round(frame * self._hops)
