"""Words with the times at which they are said."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from effasr.decoding.ctc_alignment import Span
from effasr.transcription.inputs.vad import HOP_SECONDS

_PAUSE_SECONDS = 0.1
"""So long without speech is behind a word; the closure of a stop inside one is shorter."""
_TAIL_SECONDS = 0.6
"""How long a word may go on after CTC has recognised it."""
_DELAY_FRAMES = 1.0
"""From where a word begins to the centre of its first frame, where no pause tells."""
_LEAST_DELAY, _MOST_DELAY = 0.5, 4.0
"""A frame is as much what precedes its centre as what follows; more than the most is a guess."""


@dataclass(frozen=True, slots=True)
class Word:
    """A word, or a character of a language that is written without spaces.

    Attributes:
        text: As it is written.
        start: Seconds from the beginning of the recording.
        end: Likewise.
    """

    text: str
    start: float
    end: float


def word_timestamps(
    tokens: Sequence[int],
    spans: Sequence[Span],
    decode: Callable[[list[int]], str],
    *,
    frame_seconds: float,
    speech: np.ndarray,
    offset: float = 0.0,
    spaces: bool = True,
) -> list[Word]:
    """Put tokens together to words, and tell when each was said.

    CTC emits a token at the frame or two that identify it, later than it begins and for less than
    it lasts. How much later depends on the model: the words behind pauses tell it, whose beginning
    is heard, and the others begin so much before their first frame, yet not before the last frame
    of the word before. A word ends where the next one begins, or a pause.

    Args:
        tokens: Of a transcript.
        spans: Frames of each; frame f is centred at ``f * frame_seconds``.
        decode: The tokenizer's, from tokens to text.
        frame_seconds: Between the centres of encoder frames.
        speech: bool (hops,), where the audio may be speech: see `effasr.transcription.inputs.vad`.
        offset: Added to all times; seconds.
        spaces: Whether spaces separate words; else each character is one.
    """
    groups = _groups(tokens, spans, decode, spaces)
    centres = [group.first * frame_seconds for group in groups]
    # To the middle between the last frame of the word before and the frame behind it.
    bounds = [0.0, *((group.last - 0.5) * frame_seconds for group in groups)][: len(groups)]
    longest = _MOST_DELAY * frame_seconds
    onsets = [_onset(speech, *ends, longest) for ends in zip(bounds, centres, strict=True)]
    delay = _delay(centres, onsets, frame_seconds)
    starts = [
        max(bound, centre - delay) if onset is None else onset
        for bound, centre, onset in zip(bounds, centres, onsets, strict=True)
    ]
    words: list[Word] = []
    for number, group in enumerate(groups):
        heard = (group.last - 0.5) * frame_seconds
        latest = heard + _TAIL_SECONDS
        if number + 1 < len(groups):
            latest = min(latest, starts[number + 1])
        start, end = offset + starts[number], offset + _pause(speech, heard, latest)
        words += [Word(text, start, end) for text in group.texts]
    return words


@dataclass(slots=True)
class _Group:
    """Words that share tokens, mostly a single one, and their frames."""

    texts: list[str]
    first: int
    last: int


def _groups(
    tokens: Sequence[int], spans: Sequence[Span], decode: Callable[[list[int]], str], spaces: bool
) -> list[_Group]:
    groups: list[_Group] = []
    pieces, begun = _pieces(decode(list(tokens)), spaces), 0
    for index, (first, last) in enumerate(spans):
        # How many words there are tells to which the token belongs: tokenizers mark words in
        # ways of their own, but all of them write spaces.
        count = min(len(_pieces(decode(list(tokens[: index + 1])), spaces)), len(pieces))
        if count > begun:
            groups.append(_Group(pieces[begun:count], first, last))
            begun = count
        elif groups:
            groups[-1].last = last
    return groups


def _delay(centres: Sequence[float], onsets: Sequence[float | None], frame_seconds: float) -> float:
    """Median seconds from where words behind a pause begin to their first frame."""
    known = [
        centre - onset for centre, onset in zip(centres, onsets, strict=True) if onset is not None
    ]
    frames = statistics.median(known) / frame_seconds if known else _DELAY_FRAMES
    return frame_seconds * min(max(frames, _LEAST_DELAY), _MOST_DELAY)


def _onset(speech: np.ndarray, earliest: float, latest: float, longest: float) -> float | None:
    """The time between the first two at which speech begins behind a pause, if there is one.

    It is not more than ``longest`` before the second.
    """
    begin, end = round(earliest / HOP_SECONDS), round(latest / HOP_SECONDS)
    hops = round(_PAUSE_SECONDS / HOP_SECONDS)
    # A little silence at the very beginning is enough, as nothing was said before.
    found, run = None, hops - 1 if begin == 0 else 0
    for hop in range(begin, min(end + 1, len(speech))):
        if speech[hop]:
            found = hop if run >= hops else found
            run = 0
        else:
            run += 1
    if found is None or latest - found * HOP_SECONDS > longest:
        return None
    return found * HOP_SECONDS


def _pause(speech: np.ndarray, earliest: float, latest: float) -> float:
    """The time between these two at which a pause begins; the second if there is none."""
    begin, end = round(earliest / HOP_SECONDS), round(latest / HOP_SECONDS)
    hops = round(_PAUSE_SECONDS / HOP_SECONDS)
    run = 0
    for hop in range(begin, min(end, len(speech)) + hops):
        # Behind the audio there is silence.
        run = 0 if hop < len(speech) and speech[hop] else run + 1
        if run == hops:
            return min(latest, max(earliest, (hop + 1 - hops) * HOP_SECONDS))
    return latest


def _pieces(text: str, spaces: bool) -> list[str]:
    return text.split() if spaces else [c for c in text if not c.isspace()]
