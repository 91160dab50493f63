"""Words with the times at which they are said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from effasr.inference.ctc_alignment import Span


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


def words_of(
    tokens: Sequence[int],
    spans: Sequence[Span],
    decode: Callable[[list[int]], str],
    *,
    frame_seconds: float,
    offset: float = 0.0,
    spaces: bool = True,
) -> list[Word]:
    """Put tokens together to words.

    A word lasts from the first frame of its first token to the last of its last one. CTC finds
    where a token is heard best, which may be a frame or two after it begins.

    Args:
        tokens: Of a transcript.
        spans: Frames of each.
        decode: The tokenizer's, from tokens to text.
        frame_seconds: Duration of an encoder frame.
        offset: Added to all times; seconds.
        spaces: Whether spaces separate words; else each character is one.
    """
    words: list[Word] = []
    begun = 0
    pieces = _pieces(decode(list(tokens)), spaces)
    begin = 0
    for index, (first, last) in enumerate(spans):
        # How many words there are tells to which the token belongs: tokenizers mark words in
        # ways of their own, but all of them write spaces.
        count = min(len(_pieces(decode(list(tokens[: index + 1])), spaces)), len(pieces))
        if count > begun:
            begin, begun = first, count
        if not begun:
            continue
        start, end = (offset + frame * frame_seconds for frame in (begin, last))
        word = Word(pieces[begun - 1], start, end)
        if len(words) == begun:
            words[-1] = word
        else:
            # A token of several words gives them its time.
            missing = pieces[len(words) : begun - 1]
            words += [Word(text, start, end) for text in missing] + [word]
    return words


def _pieces(text: str, spaces: bool) -> list[str]:
    return text.split() if spaces else [c for c in text if not c.isspace()]
