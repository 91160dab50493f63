"""Where to cut a long recording: at its quietest moments, so that no word is split."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

_HOP_SECONDS = 0.01
_WINDOW_HOPS = 20
"""Energy is summed over 0.2 s: a pause between words, not the closure of a stop inside one."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Samples ``start:end`` of a recording."""

    start: int
    end: int


def split_at_pauses(
    audio: np.ndarray, sample_rate: int, *, chunk_seconds: float = 30.0, search_seconds: float = 3.0
) -> list[Chunk]:
    """Cut a recording into chunks which cover it without gap or overlap.

    The chunks would be equally long, so that none is left with a fraction of a second; each cut
    then moves to the quietest moment near its place. Silence moves no cut further than needed.

    Args:
        audio: float (samples,), mono.
        sample_rate: Samples per second.
        chunk_seconds: No chunk is longer.
        search_seconds: How far a cut may move to either side.

    Returns:
        The chunks in order; none for a recording without samples.

    Raises:
        ValueError: ``chunk_seconds`` is under one second, or ``search_seconds`` is negative or
            over half of ``chunk_seconds``.
    """
    if chunk_seconds < 1.0:
        raise ValueError(f"`chunk_seconds` must be at least 1, but is {chunk_seconds}.")
    if not 0.0 <= search_seconds <= chunk_seconds / 2:
        raise ValueError(
            f"`search_seconds` must be from 0 to half of `chunk_seconds` = {chunk_seconds}, "
            f"but is {search_seconds}."
        )
    longest, search = int(chunk_seconds * sample_rate), int(search_seconds * sample_rate)
    chunks, start = [], 0
    while len(audio) - start > longest:
        remaining = len(audio) - start
        wanted = start + round(remaining / math.ceil(remaining / longest))
        latest = min(wanted + search, start + longest)
        # Never at the cut before: where two cuts may move to one pause, both would.
        earliest = max(wanted - search, start + 1)
        end = _quietest(audio, earliest, latest, wanted, sample_rate)
        chunks.append(Chunk(start, end))
        start = end
    if start < len(audio):
        chunks.append(Chunk(start, len(audio)))
    return chunks


def _quietest(audio: np.ndarray, low: int, high: int, wanted: int, sample_rate: int) -> int:
    """The sample in low..high around which there is least energy; nearest to wanted on a tie."""
    hop = max(1, round(_HOP_SECONDS * sample_rate))
    begin = max(0, low - _WINDOW_HOPS // 2 * hop)
    hops = (min(len(audio), high + _WINDOW_HOPS // 2 * hop) - begin) // hop
    if hops < _WINDOW_HOPS:
        return wanted
    blocks = audio[begin : begin + hops * hop].reshape(hops, hop)
    energy = np.square(blocks, dtype=np.float64).sum(axis=1)
    smooth = np.convolve(energy, np.ones(_WINDOW_HOPS), mode="valid")
    centres = begin + (np.arange(len(smooth)) + _WINDOW_HOPS // 2) * hop
    allowed = (centres >= low) & (centres <= high)
    centres, smooth = centres[allowed], smooth[allowed]
    order = np.lexsort((np.abs(centres - wanted), smooth))
    return int(centres[order[0]]) if len(order) else wanted
