"""Estimates n-gram models, to compare searches with them without other programs."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

Gram = tuple[str, ...]


def arpa(sentences: Iterable[Sequence[str]], order: int) -> str:
    """Return an n-gram model in ARPA's format, with interpolated Witten-Bell smoothing.

    Args:
        sentences: Words, or token ids, without start and end.
        order: Words of the longest n-gram, at least 1.

    References:
        Chen and Goodman, 1998, https://dash.harvard.edu/handle/1/25104739.
    """
    counts: list[Counter[Gram]] = [Counter() for _ in range(order)]
    for sentence in sentences:
        words = ("<s>", *sentence, "</s>")
        for n in range(order):
            # <s> is context alone.
            grams = (words[end - n : end + 1] for end in range(max(1, n), len(words)))
            counts[n].update(grams)
    followers: dict[Gram, int] = defaultdict(int)
    totals: dict[Gram, int] = defaultdict(int)
    for level in counts:
        for gram, count in level.items():
            followers[gram[:-1]] += 1
            totals[gram[:-1]] += count
    share = {
        context: followers[context] / (followers[context] + totals[context]) for context in totals
    }
    # What is left of the unigrams is shared by all words and the unknown one.
    uniform = 1 / (len(counts[0]) + 1)
    probabilities: dict[Gram, float] = {}
    for level in counts:
        for gram, count in level.items():
            context = gram[:-1]
            lower = probabilities[gram[1:]] if context else uniform
            rest = share[context]
            probabilities[gram] = (1 - rest) * count / totals[context] + rest * lower
    unknown = share[()] * uniform
    lines = ["\\data\\"]
    lines += [f"ngram {n + 1}={len(level) + 2 * (not n)}" for n, level in enumerate(counts)]
    for n, level in enumerate(counts):
        lines += ["", f"\\{n + 1}-grams:"]
        if not n:
            lines += [f"{math.log10(unknown):.7f}\t<unk>", _line(-99.0, ("<s>",), share)]
        lines += [_line(math.log10(probabilities[gram]), gram, share) for gram in level]
    return "\n".join([*lines, "", "\\end\\", ""])


def _line(probability: float, gram: Gram, share: dict[Gram, float]) -> str:
    backoff = f"\t{math.log10(share[gram]):.7f}" if gram in share else ""
    return f"{probability:.7f}\t{' '.join(gram)}{backoff}"
