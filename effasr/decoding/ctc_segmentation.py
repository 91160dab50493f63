"""Alignment of hours of CTC scores to a transcript with errors, in bounded memory.

Viterbi search over the CTC trellis of the whole transcript, with two additions: a word, or any
number of words in a row, may be skipped (text without audio), and between words any token may be
emitted at a fixed cost (audio without text).

For T frames and a band of W tokens the search computes about 2 * 12 * T * W float32 operations: an
hour of 40 ms frames with W = 8192 takes 18 GFLOP in 180,000 calls of each numpy function. Back
pointers would be T * U bytes for all U tokens, 4 GB an hour; here the scores of the band are stored
every ``_BLOCK`` frames (12 MB an hour), from which the pointers of one block at a time (6 MB) are
computed again on the way back. The band moves with the best path.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from effasr.decoding.ctc_alignment import Span

BAND_TOKENS = 8192  # half an hour of speech, most of it behind the best path
_BLOCK = 512  # frames
_BEHIND = 8  # the best path stays at this part of the band: it may have skipped text too early

# Codes of back pointers. Of a token: it goes on, or comes after a blank or after another token.
_AFTER_BLANK, _AFTER_TOKEN = 1, 2
# Of a blank: it comes after a token, or after skipped words.
_BLANK_AFTER_TOKEN, _AFTER_SKIP = 4, 8


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs in nats, beside the log-probability of the likeliest token of each frame."""

    frame: float = 8.0  # of a frame between words whose audio is in no text
    token: float = 4.0  # of a token of a skipped word
    skip: float = 60.0  # of tokens that are skipped in a row, at most, and for each of them:
    skipped: float = 0.5
    outside: float = 0.02  # of a frame of a token, for each frame outside of where it is expected,
    most_outside: float = 1.0  # and at most: rough times may be wrong, and audio is heard

    def of_skip(self, tokens: np.ndarray) -> np.ndarray:
        return np.minimum(self.token * tokens, self.skip + self.skipped * tokens)


@dataclass(frozen=True, slots=True)
class Alignment:
    """The likeliest path, of cost 0 where each frame has its likeliest token."""

    spans: list[Span | None]  # of each token; None of those of skipped words
    costs: np.ndarray  # float32 (T,), of each frame, without those of skipped words
    cost: float  # with them


def align(
    scores: np.ndarray,
    tokens: Sequence[int],
    words: Sequence[int],
    costs: Costs | None = None,
    band: int = BAND_TOKENS,
    expected: np.ndarray | None = None,
) -> Alignment:
    """Align tokens to frames.

    ``scores``: float (T, C), log-probabilities less the highest of each frame; class 0 is the blank
    ``tokens``: the class of each token; ``words``: the first token of each word, in order
    ``expected``: int (U, 2), the first and the last frame where each token is likely
    """
    return _Search(scores, tokens, words, costs or Costs(), band, expected).run()


class _Search:
    # State ``u`` of ``blank`` is the blank before token ``u``, and of ``token`` that token itself.
    # The blank after the last token has a token that repeats it, so that both are of one length.

    def __init__(
        self,
        scores: np.ndarray,
        tokens: Sequence[int],
        words: Sequence[int],
        costs: Costs,
        band: int,
        expected: np.ndarray | None,
    ) -> None:
        self._scores, self._costs = scores, costs
        self._expected = None
        if expected is not None:
            self._expected = np.vstack([expected, [[0, len(scores)]]]).astype(np.float32).T
        self._tokens = np.array([*tokens, 0], dtype=np.int64)
        self._between = np.zeros(len(self._tokens), dtype=bool)
        self._between[[*words, len(tokens)]] = True
        self._repeats = np.full(len(self._tokens), -np.inf, dtype=np.float32)
        self._repeats[1:][self._tokens[1:] != self._tokens[:-1]] = 0.0
        self._width = min(band, len(self._tokens))

    def run(self) -> Alignment:
        frames, width = len(self._scores), self._width
        blank, token = np.full((2, width), -np.inf, dtype=np.float32)
        blank[0] = 0.0
        begins: list[tuple[int, np.ndarray, np.ndarray]] = []  # the states before each block
        low, offset = 0, 0.0
        self._skip(blank, low)
        for first in range(0, frames, _BLOCK):
            best = int(np.maximum(blank, token).argmax())
            shift = min(max(0, best - width // _BEHIND), len(self._tokens) - width - low)
            low, blank, token = low + shift, _shifted(blank, shift), _shifted(token, shift)
            # Small numbers keep the precision of float32.
            highest = max(blank.max(), token.max())
            blank, token, offset = blank - highest, token - highest, offset + float(highest)
            begins.append((low, blank, token))
            blank, token = self._forward(first, low, blank, token)
        # Words after the last one may be skipped, even those beyond the band.
        after = np.maximum(blank, _shifted(token, -1))
        remaining = len(self._tokens) - 1 - low - np.arange(width)
        after = np.where(self._between[low : low + width], after, -np.inf)
        after -= self._costs.of_skip(remaining)
        state = int(after.argmax())
        is_blank = bool(blank[state] >= _shifted(token, -1)[state])
        path = self._traced(begins, low + state - (not is_blank), is_blank)
        return self._alignment(path, -offset - float(after[state]))

    def _skip(self, blank: np.ndarray, low: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Skip words within a frame; returns the blanks between words, their scores and gains."""
        (places,) = np.nonzero(self._between[low : low + self._width])
        before = blank[places]
        costs, best = self._costs, np.full(len(places), -np.inf, dtype=np.float32)
        for rate, once in ((costs.token, 0.0), (costs.skipped, costs.skip)):
            slope = (rate * places).astype(np.float32)
            best = np.maximum(best, np.maximum.accumulate(before + slope) - slope - once)
        # Where nothing is skipped, rounding may be above the score itself.
        gains = best > before + 1e-3
        blank[places] = np.where(gains, best, before)
        return places, before, gains

    def _forward(
        self,
        first: int,
        low: int,
        blank: np.ndarray,
        token: np.ndarray,
        codes: np.ndarray | None = None,
        skips: list[tuple[np.ndarray, np.ndarray]] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the states after a block; fills in back pointers where they are asked for."""
        part = slice(low, low + self._width)
        classes, between, repeats = (x[part] for x in (self._tokens, self._between, self._repeats))
        block = np.asarray(self._scores[first : first + _BLOCK], dtype=np.float32)
        for number, scores in enumerate(block):
            before = _shifted(token, -1)
            enters = np.maximum(blank, before + repeats)
            emitted = np.where(between, max(scores[0], -self._costs.frame), scores[0])
            if codes is not None:
                after = np.where(blank >= before + repeats, _AFTER_BLANK, _AFTER_TOKEN)
                after[token >= enters] = 0
                codes[number] = after + _BLANK_AFTER_TOKEN * (before > blank)
            blank = np.maximum(blank, before) + emitted
            token = np.maximum(token, enters) + scores[classes]
            if self._expected is not None:
                begin, end = self._expected[:, part] - (first + number)
                distance = np.maximum(begin, -end).clip(0)
                token -= np.minimum(self._costs.outside * distance, self._costs.most_outside)
            places, unskipped, gains = self._skip(blank, low)
            if codes is not None and skips is not None:
                codes[number, places[gains]] |= _AFTER_SKIP
                skips.append((places, unskipped))
        return blank, token

    def _traced(
        self, begins: list[tuple[int, np.ndarray, np.ndarray]], state: int, is_blank: bool
    ) -> list[tuple[int, bool]]:
        """Return the state of each frame, and whether it is a blank."""
        path: list[tuple[int, bool]] = []
        for number in reversed(range(len(begins))):
            low, blank, token = begins[number]
            first = number * _BLOCK
            count = min(_BLOCK, len(self._scores) - first)
            codes = np.zeros((count, self._width), dtype=np.uint8)
            skips: list[tuple[np.ndarray, np.ndarray]] = []
            self._forward(first, low, blank, token, codes, skips)
            for frame in reversed(range(count)):
                if is_blank and codes[frame, state - low] & _AFTER_SKIP:
                    places, before = skips[frame]
                    earlier = places < state - low
                    skipped = self._costs.of_skip(state - low - places[earlier])
                    state = low + int(places[earlier][(before[earlier] - skipped).argmax()])
                path.append((state, is_blank))
                code = codes[frame, state - low]
                if is_blank:
                    is_blank = not code & _BLANK_AFTER_TOKEN
                    state -= not is_blank
                else:
                    is_blank = bool(code & _AFTER_BLANK)
                    state -= bool(code & _AFTER_TOKEN)
        return path[::-1]

    def _alignment(self, path: list[tuple[int, bool]], cost: float) -> Alignment:
        spans: list[Span | None] = [None] * (len(self._tokens) - 1)
        costs = np.zeros(len(path), dtype=np.float32)
        for frame, (state, is_blank) in enumerate(path):
            score = float(self._scores[frame, 0 if is_blank else self._tokens[state]])
            if is_blank and self._between[state]:
                score = max(score, -self._costs.frame)
            costs[frame] = -score
            if not is_blank and state < len(spans):
                span = spans[state]
                spans[state] = (frame if span is None else span[0], frame + 1)
        return Alignment(spans, costs, cost)


def _shifted(values: np.ndarray, count: int) -> np.ndarray:
    """Return values that begin ``count`` later, or earlier below 0, filled with -inf."""
    shifted = np.full_like(values, -np.inf)
    if count >= 0:
        shifted[: len(values) - count] = values[count:]
    else:
        shifted[-count:] = values[:count]
    return shifted
