"""Splitting of recordings into chunks of speech, and of long speech at its quietest moments."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from effasr.checks import check
from effasr.data.audio.loudness import HOP_SECONDS, hop_samples, is_speech, loudness
from effasr.transcription.inputs.vad import Detector

# Energy is summed over 0.2 s: a pause between words, not the closure of a stop consonant.
_WINDOW_HOPS = 20

# Least pause at which speech is cut that is longer than a chunk: 0.3 s, of which detectors, which
# average over 50 ms, may take the ends for speech.
_PAUSE_SECONDS = 0.25
MARGIN_SECONDS = 0.1  # background that stays before and after speech
# Ends so far below the weak parts of speech are no background of it: recordings were joined, gated
# or decoded from a codec. Models that were trained without take them for sounds.
_QUIET_DB = 20.0
# Speech is detected in windows of this length, whole numbers of what Silero decides at once; the
# last one may be longer by a half, so that none is short.
_DETECTION_SECONDS = 24.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Samples ``start:end`` of a recording."""

    start: int
    end: int
    speech: float = field(default=1.0, compare=False)  # share of hops that are speech


def cut_at_pauses(
    blocks: Iterable[np.ndarray],
    sample_rate: int,
    *,
    total: int | None,
    chunk_seconds: float = 30.0,
    search_seconds: float = 3.0,
) -> Iterator[tuple[Chunk, np.ndarray]]:
    """Split a recording, while it is being read, into chunks without gap or overlap.

    The chunks are of equal length at first, so that none is a fraction of a second; then each cut
    moves to the quietest moment near its place. Within silence a cut moves no further than needed.

    At most two chunks and a block are in memory. ``blocks`` are float (samples,) each, mono, in
    order. ``total`` is the number of their samples, which makes the chunks equally long; if it is
    unknown, chunks are as long as allowed until the end is in sight. Yields the chunks with their
    samples; errors are raised with the first chunk.
    """
    _check(chunk_seconds, search_seconds)
    longest, search = int(chunk_seconds * sample_rate), int(search_seconds * sample_rate)
    ahead = Ahead(blocks)
    start, sight = 0, longest if total is not None else 2 * longest
    # The energy window extends by half its length beyond the latest position of a cut.
    margin = (_WINDOW_HOPS // 2 + 1) * hop_samples(sample_rate)
    while True:
        ended = ahead.fill(sight + margin)
        held = len(ahead.samples)
        if total is None:
            remaining = min(held, 2 * longest)
        else:
            remaining = held if ended else max(held, total - start)
        if remaining <= longest:
            break
        length = _first_part(ahead.samples, remaining, longest, search, sample_rate)
        yield Chunk(start, start + length), ahead.take(length)
        start += length
    if len(ahead.samples):
        yield Chunk(start, start + len(ahead.samples)), ahead.samples


def _check(chunk_seconds: float, search_seconds: float) -> None:
    check(chunk_seconds >= 1.0, "chunk_seconds", "be at least 1", chunk_seconds)
    rule = f"be from 0 to half of `chunk_seconds` = {chunk_seconds}"
    check(0.0 <= search_seconds <= chunk_seconds / 2, "search_seconds", rule, search_seconds)


def _first_part(
    samples: np.ndarray, remaining: int, longest: int, search: int, sample_rate: int
) -> int:
    """Return where to cut off the first of the equal parts of ``remaining`` samples."""
    target = round(remaining / math.ceil(remaining / longest))
    latest = min(target + search, longest)
    # The previous cut is excluded: if two cuts may move to the same pause, both would.
    earliest = max(target - search, 1)
    return quietest(samples, earliest, latest, target, sample_rate)


def trimmed(
    chunks: Iterable[tuple[Chunk, np.ndarray]], sample_rate: int, detect: Detector
) -> Iterator[tuple[Chunk, np.ndarray]]:
    """Trim both ends of chunks to speech and a margin; chunks without speech stay whole."""
    hop, margin = hop_samples(sample_rate), round(MARGIN_SECONDS / HOP_SECONDS)
    for chunk, samples in chunks:
        speech = detect(samples)
        places = np.flatnonzero(speech)
        first, last = (places[0], places[-1]) if len(places) else (0, len(speech))
        begin, end = max(0, int(first) - margin) * hop, (int(last) + 1 + margin) * hop
        part = speech[begin // hop : end // hop]
        yield _audible(chunk.start + begin, samples[begin:end], part, sample_rate)


def _audible(
    start: int, samples: np.ndarray, speech: np.ndarray, sample_rate: int
) -> tuple[Chunk, np.ndarray]:
    """Return a chunk without ends that are far quieter than all speech in it."""
    levels = loudness(samples, sample_rate)
    share = float(speech.mean())
    least = np.quantile(levels[speech[: len(levels)]], 0.1) - _QUIET_DB if speech.any() else -np.inf
    audible = np.flatnonzero(levels > least)
    if len(audible):
        hop = hop_samples(sample_rate)
        begin, end = int(audible[0]) * hop, (int(audible[-1]) + 1) * hop
        start, samples = start + begin, samples[begin:end]
    return Chunk(start, start + len(samples), share), samples


def speech_chunks(
    blocks: Iterable[np.ndarray],
    sample_rate: int,
    detect: Detector,
    gap_seconds: float = 2.0,
    packed_seconds: float = math.inf,
    *,
    chunk_seconds: float = 30.0,
    search_seconds: float = 3.0,
) -> Iterator[tuple[Chunk, np.ndarray]]:
    """Split a recording, while it is being read, into chunks of speech with a margin around it.

    A chunk has as many stretches of speech as fit into ``packed_seconds``, or a longer one, up
    to ``chunk_seconds``. Pauses of at least ``gap_seconds`` are in none, and none is cut at pauses
    under 0.3 s, except where speech is longer than a chunk: there, as `cut_at_pauses` does. A
    recording shorter than a gap, in which a network detects no speech, is decoded unless it
    is silent. One whose speech is as short as a chunk may be is cut only at gaps.
    """
    _check(chunk_seconds, search_seconds)
    hop, ahead = hop_samples(sample_rate), Ahead(blocks)
    window = round(_DETECTION_SECONDS / HOP_SECONDS) * hop
    gap = round(gap_seconds / HOP_SECONDS)
    packed = min(packed_seconds, chunk_seconds)
    held = _Held(sample_rate, packed, chunk_seconds, search_seconds, gap)
    ended, is_first = False, True
    while not ended:
        ended = ahead.fill(window * 3 // 2) and len(ahead.samples) <= window * 3 // 2
        samples = ahead.take(len(ahead.samples) if ended else window)
        if not len(samples):
            return
        speech = detect(samples)
        if is_first and ended and len(speech) < gap and not speech.any():
            audible = is_speech(loudness(samples, sample_rate)).any()
            limits = {"chunk_seconds": chunk_seconds, "search_seconds": search_seconds}
            parts = cut_at_pauses([samples], sample_rate, total=len(samples), **limits)
            yield from ((replace(chunk, speech=0.0), part) for chunk, part in parts if audible)
            return
        held.add(samples, speech)
        if is_first and ended:
            held.keep_whole()
        yield from held.chunks(ended)
        is_first = False


class _Held:
    """Audio with detected speech that is not yet in a chunk."""

    def __init__(
        self,
        sample_rate: int,
        packed_seconds: float,
        chunk_seconds: float,
        search_seconds: float,
        gap: int,
    ) -> None:
        self._rate, self._hop = sample_rate, hop_samples(sample_rate)
        self._longest = int(chunk_seconds / HOP_SECONDS + 1e-6)
        self._packed = int(packed_seconds / HOP_SECONDS + 1e-6)
        self._search = int(search_seconds * sample_rate)
        self._gap = gap
        self._pause = min(gap, round(_PAUSE_SECONDS / HOP_SECONDS))
        self._margin = min(round(MARGIN_SECONDS / HOP_SECONDS), self._pause // 2)
        self._start = 0
        self._samples, self._speech = np.zeros(0, np.float32), np.zeros(0, dtype=bool)

    def add(self, samples: np.ndarray, speech: np.ndarray) -> None:
        self._samples = np.concatenate([self._samples, samples])
        self._speech = np.concatenate([self._speech, speech])

    def keep_whole(self) -> None:
        """Cut only at gaps what is as short as a chunk may be."""
        places = np.flatnonzero(self._speech)
        if len(places) and places[-1] - places[0] + 1 + 2 * self._margin <= self._longest:
            self._packed = self._longest

    def chunks(self, ended: bool) -> Iterator[tuple[Chunk, np.ndarray]]:
        """Yield the chunks whose end is known; all of them if the recording has ended."""
        while len(places := np.flatnonzero(self._speech)):
            if (quiet := int(places[0]) - self._margin) > 0:
                self._take(quiet)
                places -= quiet
            end = self._end(places, ended)
            if end is None:
                return
            start, speech = self._start, self._speech[:end]
            yield _audible(start, self._take(end), speech, self._rate)
        self._take(max(0, len(self._speech) - self._margin))

    def _end(self, places: np.ndarray, ended: bool) -> int | None:
        """Return the hops of the first chunk, which is at the beginning, once they are known."""
        count = len(self._speech)
        following = np.append(places[1:], count + self._gap if ended else count)
        pauses = following - places - 1
        ends = np.flatnonzero(pauses >= self._pause)
        stops = np.minimum(places[ends] + 1 + self._margin, count)
        if len(gaps := np.flatnonzero(pauses[ends] >= self._gap)):
            stops = stops[: gaps[0] + 1]
        elif not ended and count <= self._longest + self._pause:
            return None
        fitting = stops[stops <= self._longest]
        if len(fitting):
            packed = fitting[fitting <= self._packed]
            return int(packed[-1] if len(packed) else fitting[0])
        # Speech without a pause: cut into equal parts, if its end is in sight.
        if not len(stops) and count < 2 * self._longest:
            return None
        remaining = min(int(stops[0]) if len(stops) else count, 2 * self._longest)
        remaining, longest = remaining * self._hop, self._longest * self._hop
        part = _first_part(self._samples, remaining, longest, self._search, self._rate)
        return max(1, part // self._hop)

    def _take(self, hops: int) -> np.ndarray:
        """Cut off the first hops; returns their samples."""
        first, self._samples = np.split(self._samples, [hops * self._hop])
        self._speech = self._speech[hops:]
        self._start += len(first)
        return first


class Ahead:
    """The part of a recording that has been read and not yet cut off."""

    def __init__(self, blocks: Iterable[np.ndarray]) -> None:
        self._blocks = iter(blocks)
        self._ended = False
        self.samples = np.zeros(0, np.float32)

    def fill(self, target: int) -> bool:
        """Read until this many samples are held, or the end; returns whether it is the end."""
        parts, held = [self.samples], len(self.samples)
        while held <= target and not self._ended:
            block = next(self._blocks, None)
            if block is None:
                self._ended = True
            else:
                parts.append(block)
                held += len(block)
        full = [part for part in parts if len(part)]
        if len(full) > 1:
            self.samples = np.concatenate(full)
        elif full:
            (self.samples,) = full
        return self._ended

    def take(self, length: int) -> np.ndarray:
        first, self.samples = self.samples[:length], self.samples[length:]
        return first


def quietest(audio: np.ndarray, low: int, high: int, target: int, sample_rate: int) -> int:
    """Return the sample in low..high with the least energy around it; ties go to the nearest."""
    hop = hop_samples(sample_rate)
    begin = max(0, low - _WINDOW_HOPS // 2 * hop)
    hops = (min(len(audio), high + _WINDOW_HOPS // 2 * hop) - begin) // hop
    if hops < _WINDOW_HOPS:
        return target
    blocks = audio[begin : begin + hops * hop].reshape(hops, hop)
    energy = np.square(blocks, dtype=np.float64).sum(axis=1)
    smooth = np.convolve(energy, np.ones(_WINDOW_HOPS), mode="valid")
    centres = begin + (np.arange(len(smooth)) + _WINDOW_HOPS // 2) * hop
    allowed = (centres >= low) & (centres <= high)
    centres, smooth = centres[allowed], smooth[allowed]
    order = np.lexsort((np.abs(centres - target), smooth))
    return int(centres[order[0]]) if len(order) else target
