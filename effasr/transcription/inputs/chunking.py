"""Splitting of long recordings at their quietest moments."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from effasr.nn.checks import check

_HOP_SECONDS = 0.01
# Energy is summed over 0.2 s: a pause between words, not the closure of a stop consonant.
_WINDOW_HOPS = 20


@dataclass(frozen=True, slots=True)
class Chunk:
    """Samples ``start:end`` of a recording."""

    start: int
    end: int


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
    check(chunk_seconds >= 1.0, "chunk_seconds", "be at least 1", chunk_seconds)
    rule = f"be from 0 to half of `chunk_seconds` = {chunk_seconds}"
    check(0.0 <= search_seconds <= chunk_seconds / 2, "search_seconds", rule, search_seconds)
    longest, search = int(chunk_seconds * sample_rate), int(search_seconds * sample_rate)
    ahead = _Ahead(blocks)
    start, sight = 0, longest if total is not None else 2 * longest
    # The energy window extends by half its length beyond the latest position of a cut.
    margin = (_WINDOW_HOPS // 2 + 1) * _hop(sample_rate)
    while True:
        ended = ahead.fill(sight + margin)
        held = len(ahead.samples)
        if total is None:
            remaining = min(held, 2 * longest)
        else:
            remaining = held if ended else max(held, total - start)
        if remaining <= longest:
            break
        target = round(remaining / math.ceil(remaining / longest))
        latest = min(target + search, longest)
        # The previous cut is excluded: if two cuts may move to the same pause, both would.
        earliest = max(target - search, 1)
        length = quietest(ahead.samples, earliest, latest, target, sample_rate)
        yield Chunk(start, start + length), ahead.take(length)
        start += length
    if len(ahead.samples):
        yield Chunk(start, start + len(ahead.samples)), ahead.samples


class _Ahead:
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


def _hop(sample_rate: int) -> int:
    return max(1, round(_HOP_SECONDS * sample_rate))


def quietest(audio: np.ndarray, low: int, high: int, target: int, sample_rate: int) -> int:
    """Return the sample in low..high with the least energy around it; ties go to the nearest."""
    hop = _hop(sample_rate)
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
