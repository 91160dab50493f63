"""N-gram models over words, whatever the tokens of the speech model."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from effasr.decoding.lm.arpa import BEGIN, Arpa, read_arpa

_UNKNOWN = -2


class WordNgrams:
    """A back-off n-gram model over words, in natural logarithms.

    It uses dictionaries on the host, which suits models of some million n-grams.

    A word that the model does not have is looked up without punctuation at its ends, then in lower
    and in upper case; what is punctuation alone is no word. What is still unknown has the
    probability of ``<unk>``.

    Attributes:
        order: Words of the longest n-gram.
        end_id: The id of the end of a text.
    """

    def __init__(self, arpa: Arpa, ids: dict[str, int]) -> None:
        """Take n-grams over ids, and the id of each word."""
        self.order = len(arpa.ngrams)
        self._ngrams, self._ids = arpa.ngrams, ids
        self._unknown = arpa.unknown * math.log(10)
        self.end_id = ids.get("</s>", _UNKNOWN)

    def log_probs(self, texts: Sequence[tuple[str, str]]) -> list[float]:
        """Return the log-probability of each text after what was said before it, in nats.

        The end of a text is not scored, as speech may go on in the next segment.

        Args:
            texts: What was said before, perhaps nothing, and the text to score.
        """
        return [self._of_text(self.word_ids(before), self.word_ids(own)) for before, own in texts]

    def word_ids(self, text: str) -> list[int]:
        """Return the ids of the words of a text, which white space separates."""
        found = (self._id(word) for word in text.split())
        return [one for one in found if one is not None]

    def _id(self, word: str) -> int | None:
        plain = _without_punctuation(word)
        for form in (word, plain, plain.lower(), plain.upper()):
            if form in self._ids:
                return self._ids[form]
        return _UNKNOWN if plain else None

    def _of_text(self, before: Sequence[int], own: Sequence[int]) -> float:
        said = [BEGIN, *before]
        total = 0.0
        for word in own:
            total += self.log_prob(said, word)
            said.append(word)
        return total

    def log_prob(self, said: Sequence[int], word: int) -> float:
        """Return the log-probability of a word in nats after others, of which ``BEGIN`` is first.

        Args:
            said: Ids of `word_ids`; without ``BEGIN`` the text has begun before them.
            word: An id, or ``end_id``.
        """
        context = tuple(said[max(0, len(said) - self.order + 1) :])
        weights = 0.0
        while True:
            found = self._ngrams[len(context)].get((*context, word))
            if found is not None:
                return weights + found[0] * math.log(10)
            if not context:
                return weights + self._unknown
            _, backoff = self._ngrams[len(context) - 1].get(context, (0.0, 0.0))
            weights, context = weights + backoff * math.log(10), context[1:]


def _without_punctuation(word: str) -> str:
    """Return a word without the punctuation at both ends."""
    kept = [n for n, letter in enumerate(word) if unicodedata.category(letter)[0] != "P"]
    return word[kept[0] : kept[-1] + 1] if kept else ""


def load_word_ngrams(path: str | Path) -> WordNgrams:
    """Read an ARPA file over words, plain or gzipped, as KenLM's lmplz and SRILM write them.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not an ARPA file, or is truncated.
    """
    ids = {"<s>": BEGIN}

    def number(_: str, word: str) -> int:
        return ids.setdefault(word, len(ids))

    found = read_arpa(path, number)
    del ids["<s>"]
    return WordNgrams(found, ids)
