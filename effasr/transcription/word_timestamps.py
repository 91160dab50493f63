"""Word timestamps from alignments of tokens and pauses."""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from effasr.data.audio.loudness import HOP_SECONDS
from effasr.data.scripts import split_words
from effasr.decoding.ctc_alignment import Span

_PAUSE_SECONDS = 0.1  # least pause between words; the closure of a stop consonant is shorter
_TAIL_SECONDS = 0.6  # longest time that a word continues after CTC has recognised it, in seconds
# Assumed time from a word's start to the centre of its first frame, if no pause shows it.
_DELAY_FRAMES = 1.0
_LEAST_DELAY = 0.5  # in frames: half of a frame precedes its centre
# More is a guess: a token is not recognised so late. CTC had 0.1 to 0.3 s in small models, the
# attention of their decoders up to 0.6 s.
_MOST_DELAY_SECONDS = 0.7
_USUAL_DELAY_FRAMES = 2.0  # a longer delay is also one of the ends of words


@dataclass(frozen=True, slots=True)
class Word:
    """A word, or a character of a language without spaces."""

    text: str
    start: float  # seconds from the beginning of the recording
    end: float  # seconds from the beginning of the recording


def word_timestamps(
    tokens: Sequence[int],
    spans: Sequence[Span],
    decode: Callable[[list[int]], str],
    *,
    frame_seconds: float,
    speech: np.ndarray,  # bool (hops,), from `effasr.transcription.inputs.vad`
    offset: float = 0.0,
    until: float = math.inf,  # end of the audio; no word ends later
    spaces: bool = True,
    cuts: Sequence[int] = (),  # places of tokens that begin a word in any case, in order
) -> list[Word]:
    """Join tokens to words, and find the time of each, in order and without overlap.

    CTC and transducers emit a token at the one or two frames that identify it, and a decoder
    attends to these most, later than its start, for less than its duration. The delay depends on
    the model. It is measured at words after pauses, whose start is audible, and the other words
    start this much before their first frame, but not before the last frame of the previous word.
    A word ends where the next one or a pause starts. Words of one token share its time.
    """
    spans = _without_marks(tokens, spans, decode)
    groups = word_groups(tokens, spans, decode, spaces, cuts)
    placed = group_times(groups, speech, frame_seconds)
    parts = [(group.texts, *times) for group, times in zip(groups, placed, strict=True)]
    return words_of_parts(parts, offset, until)


def words_of_parts(
    parts: Sequence[tuple[Sequence[str], float, float | None]], offset: float, until: float
) -> list[Word]:
    """Return words in order, without overlap; those of a part share its time after ``offset``."""
    words: list[Word] = []
    for texts, start, end in parts:
        words += divided(texts, offset + start, until if end is None else offset + end)
    least = min(HOP_SECONDS, 0.999 * (until - offset) / max(1, len(words)))
    times = in_order([(word.start, word.end) for word in words], offset, until, least)
    return [Word(word.text, *time) for word, time in zip(words, times, strict=True)]


def group_times(
    groups: "Sequence[WordGroup]", speech: np.ndarray, frame_seconds: float
) -> list[tuple[float, float]]:
    """Return when each group begins and ends: see `word_timestamps`."""
    centres = [group.first * frame_seconds for group in groups]
    # Each boundary is midway between the last frame of the previous word and the frame after it.
    lasts = [(group.last - 0.5) * frame_seconds for group in groups]
    onsets, delay = _onsets(speech, lasts, centres, frame_seconds)
    if (late := delay - _USUAL_DELAY_FRAMES * frame_seconds) > 0:
        lasts = [max(0.0, last - late) for last in lasts]
        onsets, delay = _onsets(speech, lasts, centres, frame_seconds)
    bounds = [0.0, *lasts][: len(groups)]
    starts = [
        max(bound, centre - delay) if onset is None else onset
        for bound, centre, onset in zip(bounds, centres, onsets, strict=True)
    ]
    times: list[tuple[float, float]] = []
    for number, start in enumerate(starts):
        last_seen = max(lasts[number], start)
        latest = last_seen + _TAIL_SECONDS
        if number + 1 < len(groups):
            latest = min(latest, starts[number + 1])
        times.append((start, _pause(speech, last_seen, latest)))
    return times


def _without_marks(
    tokens: Sequence[int], spans: Sequence[Span], decode: Callable[[list[int]], str]
) -> list[Span]:
    """Give marks the times of the tokens before them: they are recognised in the pause after."""
    timed: list[Span] = []
    for token, span in zip(tokens, spans, strict=True):
        text = decode([token]).strip()
        # A token may be a part of a letter.
        is_mark = text and not any(letter.isalnum() or letter == "\ufffd" for letter in text)
        timed.append(timed[-1] if is_mark and timed else span)
    return timed


def divided(texts: Sequence[str], start: float, end: float) -> list[Word]:
    """Divide a time among texts by their lengths."""
    total = max(1, sum(map(len, texts)))
    shares = [n / total for n in itertools.accumulate(map(len, texts))]
    bounds = [start * (1 - share) + end * share for share in shares]
    return [Word(*word) for word in zip(texts, [start, *bounds], bounds, strict=False)]


def in_order(
    times: Sequence[tuple[float, float]], begin: float, end: float, least: float
) -> list[tuple[float, float]]:
    """Return beginnings and ends in order, between two bounds, of ``least`` duration or more."""
    ordered: list[tuple[float, float]] = []
    for first, last in times:
        first = max(begin, first)
        begin = max(first + least, last)
        ordered.append((first, begin))
    for number in reversed(range(len(ordered))):
        first, last = ordered[number]
        last = min(last, end)
        end = min(first, last - least)
        ordered[number] = end, last
    return ordered


@dataclass(slots=True)
class WordGroup:
    """Words that share tokens, usually one word."""

    texts: list[str]
    first: float  # beginning of the first span of their tokens, in frames
    last: float  # end of the last one


def word_groups(
    tokens: Sequence[int],
    spans: Sequence[Span],
    decode: Callable[[list[int]], str],
    spaces: bool,
    cuts: Sequence[int] = (),
) -> list[WordGroup]:
    if cuts:
        bounds = itertools.pairwise([0, *cuts, len(tokens)])
        parts = [(tokens[a:b], spans[a:b]) for a, b in bounds]
        return [group for part in parts for group in word_groups(*part, decode, spaces)]
    groups: list[WordGroup] = []
    pieces, begun = split_text(decode(list(tokens)), spaces), 0
    for index, (first, last) in enumerate(spans):
        # The number of decoded words shows to which one the token belongs: tokenizers mark words
        # in different ways, but all of them decode to spaces.
        count = min(len(split_text(decode(list(tokens[: index + 1])), spaces)), len(pieces))
        if count > begun:
            groups.append(WordGroup(pieces[begun:count], first, last))
            begun = count
        elif groups:
            groups[-1].last = last
    return groups


def _onsets(
    speech: np.ndarray, lasts: Sequence[float], centres: Sequence[float], frame_seconds: float
) -> tuple[list[float | None], float]:
    """Return when words after a pause start, and their median seconds to their first frame."""
    # ``lasts``: last time of each word; the next one starts later.
    bounds = [0.0, *lasts][: len(centres)]
    onsets = [_onset(speech, *ends) for ends in zip(bounds, centres, strict=True)]
    delays = [
        centre - onset for centre, onset in zip(centres, onsets, strict=True) if onset is not None
    ]
    delay = statistics.median(delays) if delays else _DELAY_FRAMES * frame_seconds
    return onsets, max(delay, _LEAST_DELAY * frame_seconds)


def _onset(speech: np.ndarray, earliest: float, latest: float) -> float | None:
    """Return when speech starts after a pause, not long before ``latest``, or None."""
    begin, end = round(earliest / HOP_SECONDS), round(latest / HOP_SECONDS)
    hops = round(_PAUSE_SECONDS / HOP_SECONDS)
    # Less silence suffices at the very beginning, as there is no earlier word.
    onset, run = None, hops - 1 if begin == 0 else 0
    for hop in range(begin, min(end + 1, len(speech))):
        if speech[hop]:
            onset = hop if run >= hops else onset
            run = 0
        else:
            run += 1
    if onset is None or latest - onset * HOP_SECONDS > _MOST_DELAY_SECONDS:
        return None
    return onset * HOP_SECONDS


def _pause(speech: np.ndarray, earliest: float, latest: float) -> float:
    """Return the time between these two at which a pause starts; the second if there is none."""
    begin, end = round(earliest / HOP_SECONDS), round(latest / HOP_SECONDS)
    hops = round(_PAUSE_SECONDS / HOP_SECONDS)
    run = 0
    for hop in range(begin, min(end, len(speech)) + hops):
        # The audio is followed by silence.
        run = 0 if hop < len(speech) and speech[hop] else run + 1
        if run == hops:
            return min(latest, max(earliest, (hop + 1 - hops) * HOP_SECONDS))
    return latest


def split_text(text: str, spaces: bool) -> list[str]:
    return text.split() if spaces else split_words(text)
