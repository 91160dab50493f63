"""N-gram models over words, and their fusion with a search over tokens."""

import math
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from effasr.data.tokenizer import Tokenizer
from effasr.decoding.lm.arpa import BEGIN, Arpa, read_arpa

_UNKNOWN = -2

# Tokens that are read for each word of the n-grams; a longer word is not all read.
_TOKENS_PER_WORD = 16

_CACHED = 1 << 18


class WordNgrams:
    """A back-off n-gram model over words, in natural logarithms.

    It uses dictionaries on the host, which suits models of some million n-grams.

    A word that the model does not have is looked up without punctuation at its ends, then in lower
    and in upper case; what is punctuation alone is no word. What is still unknown has the
    probability of ``<unk>``.
    """

    def __init__(self, arpa: Arpa, ids: dict[str, int]) -> None:
        self.order = len(arpa.ngrams)
        self._ngrams, self._ids = arpa.ngrams, ids
        self._unknown = arpa.unknown * math.log(10)
        self.end_id, self._has_end = ids.get("</s>", _UNKNOWN), arpa.has_end

    def log_probs(self, texts: Sequence[tuple[str, str]]) -> list[float]:
        """Return the log-probability of each text after its history, in nats, without its end."""
        return [self._of_text(self.word_ids(before), self.word_ids(text)) for before, text in texts]

    def word_ids(self, text: str) -> list[int]:
        """Return the ids of the words of a text, which white space separates."""
        ids = (self._id(word) for word in text.split())
        return [number for number in ids if number is not None]

    def _id(self, word: str) -> int | None:
        letters = [n for n, letter in enumerate(word) if unicodedata.category(letter)[0] != "P"]
        plain = word[letters[0] : letters[-1] + 1] if letters else ""
        for form in (word, plain, plain.lower(), plain.upper()):
            if form in self._ids:
                return self._ids[form]
        return _UNKNOWN if plain else None

    def _of_text(self, before: Sequence[int], text: Sequence[int]) -> float:
        history = [BEGIN, *before]
        total = 0.0
        for word in text:
            total += self.log_prob(history, word)
            history.append(word)
        return total

    def log_prob(self, history: Sequence[int], word: int) -> float:
        """Return a word's log-probability in nats; ``BEGIN`` is first if the text begins here."""
        context = tuple(history[max(0, len(history) - self.order + 1) :])
        weights = 0.0
        while True:
            entry = self._ngrams[len(context)].get((*context, word))
            if entry is not None:
                return weights + entry[0] * math.log(10)
            if not context:
                return weights + self._unknown
            _, backoff = self._ngrams[len(context) - 1].get(context, (0.0, 0.0))
            weights, context = weights + backoff * math.log(10), context[1:]

    def end_log_prob(self, history: Sequence[int]) -> float:
        """Return the log-probability of the end in nats; 0 in a model without one."""
        return self.log_prob(history, self.end_id) if self._has_end else 0.0


def load_word_ngrams(path: str | Path) -> WordNgrams:
    """Read an ARPA file over words, plain or gzipped, as KenLM's lmplz and SRILM write them."""
    ids = {"<s>": BEGIN}

    def number(_: str, word: str) -> int:
        return ids.setdefault(word, len(ids))

    arpa = read_arpa(path, number)
    del ids["<s>"]
    return WordNgrams(arpa, ids)


class WordFusion:
    """Word n-grams as a language model over the tokens of a speech model: see `TokenLM`.

    A token that begins a word has the log-probability of the word before it, which is complete
    then, and the end of the text that of the last word and of the end; other tokens have 0. The sum
    over a text is the log-probability of its words and its end.
    """

    def __init__(self, words: WordNgrams, tokenizer: Tokenizer) -> None:
        self.order = _TOKENS_PER_WORD * (words.order + 1)
        self._words, self._tokenizer = words, tokenizer
        # For each token whether it begins a word, so that two of it are two words.
        self._begins = [
            len(tokenizer.decode([token, token]).split()) > 1
            for token in range(tokenizer.vocab_size)
        ]
        self._of_context = lru_cache(_CACHED)(self._computed)
        if not any(self._begins):
            raise ValueError(
                "`lm_unit` must be token for a tokenizer without tokens that begin words, such as "
                "those of languages without spaces, but is word."
            )

    def scores(self, contexts: Tensor, symbols: Tensor) -> Tensor:
        rows = contexts.flatten(0, 1).tolist()
        pairs = [
            self._of_context(tuple(token for token in row if token >= 0)[-self.order :])
            for row in rows
        ]
        values = torch.tensor(pairs, dtype=torch.float64, device=symbols.device)
        values = values.unflatten(0, symbols.shape[:2])
        begins = torch.tensor(self._begins, device=symbols.device)[symbols]
        return torch.cat([values[..., :1] * begins, values[..., 1:]], -1)

    def _computed(self, tokens: tuple[int, ...]) -> tuple[float, float]:
        """Return the log-probability of the last word, and of it and the end."""
        groups: list[list[int]] = []
        for token in tokens:
            if self._begins[token] or not groups:
                groups.append([])
            groups[-1].append(token)
        history = [BEGIN]
        if len(tokens) >= self.order:
            # The beginning of the first word may be missing.
            history, groups = [], groups[1:]
        for group in groups[:-1]:
            history += self._ids(group)
        score = 0.0
        for word in self._ids(groups[-1]) if groups else ():
            score += self._words.log_prob(history, word)
            history.append(word)
        return score, score + self._words.end_log_prob(history)

    def _ids(self, tokens: Sequence[int]) -> list[int]:
        return self._words.word_ids(self._tokenizer.decode(tokens))
