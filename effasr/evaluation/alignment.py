"""Word alignments as text, in the style of NIST's sclite."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jiwer

from effasr.evaluation.wer import split_words


@dataclass(frozen=True, slots=True)
class Alignment:
    reference: tuple[str, ...]  # words; those with an error in capitals, a missing one as asterisks
    hypothesis: tuple[str, ...]
    kinds: tuple[str, ...]  # kind of each pair: S, D, I, or an empty string for equal words
    pairs: tuple[tuple[str | None, str | None], ...]  # words as they are; None for a missing one

    def lines(self, indent: str = "", limit: int | None = None) -> list[str]:
        rows = (("REF:", self.reference), ("HYP:", self.hypothesis), ("Eval:", self.kinds))
        widths = [max(map(len, words)) for words in zip(*(row for _, row in rows), strict=True)]
        room = None if limit is None else limit - len(indent) - 6
        return [
            f"{indent}{name:5} "
            + " ".join(
                word.ljust(width) for word, width in zip(words[part], widths[part], strict=True)
            ).rstrip()
            for part in _parts(widths, room)
            for name, words in rows
        ]

    def scores(self) -> str:
        """Return counts of correct, substituted, deleted and inserted words, in sclite's format."""
        counts = [
            sum(kind == requested for kind in self.kinds) for requested in ("", "S", "D", "I")
        ]
        return "Scores: (#C #S #D #I) " + " ".join(map(str, counts))


def _parts(widths: Sequence[int], room: int | None) -> Iterator[slice]:
    start = used = 0
    for n, width in enumerate(widths):
        if room is not None and n > start and used + width > room:
            yield slice(start, n)
            start, used = n, 0
        used += width + 1
    yield slice(start, len(widths))


def align(reference: str, hypothesis: str) -> Alignment:
    """Align two texts with the fewest edits; words are those of `split_words`."""
    expected, received = split_words(reference), split_words(hypothesis)
    result = jiwer.process_words(" ".join(expected), " ".join(received)).alignments[0]
    words, message, kinds, pairs = [], [], [], []
    for chunk in result:
        ref = expected[chunk.ref_start_idx : chunk.ref_end_idx]
        hyp = received[chunk.hyp_start_idx : chunk.hyp_end_idx]
        for index in range(max(len(ref), len(hyp))):
            a = ref[index] if index < len(ref) else None
            b = hyp[index] if index < len(hyp) else None
            pairs.append((a, b))
            words.append(_shown(a, b, chunk.type))
            message.append(_shown(b, a, chunk.type))
            kinds.append("" if chunk.type == "equal" else chunk.type[0].upper())
    return Alignment(tuple(words), tuple(message), tuple(kinds), tuple(pairs))


def trn_line(text: str, name: str) -> str:
    """Return a line of sclite's trn format: the words, then the utterance in parentheses."""
    return f"{' '.join(split_words(text))} ({name})\n".lstrip()


def _shown(word: str | None, other: str | None, kind: str) -> str:
    if word is None:
        return "*" * len(other or "")
    return word if kind == "equal" else word.upper()
