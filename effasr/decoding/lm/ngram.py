"""Language models over token ids for shallow fusion, and n-grams of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from effasr.decoding.lm.arpa import BEGIN, MOST_DIGITS, UNSEEN, Context, read_arpa

_CACHE_BYTES = 64 << 20


class TokenLM(Protocol):
    """A language model over the tokens of the speech model, for beam search."""

    order: int  # number of tokens that it reads, the scored one included

    def scores(self, contexts: Tensor, symbols: Tensor) -> Tensor:
        """Score next tokens, and the end of the text.

        ``contexts``: int64 (N, K, n), the last tokens of each hypothesis, at least ``order - 1`` or
        all, -1 before the first; ``symbols``: int64 (N, K, C). Returns log-probabilities of the
        tokens and, last, of the end, float64 (N, K, C + 1).
        """
        ...


class TokenNgrams:
    """A back-off n-gram model, in natural logarithms; dictionaries suit some million n-grams."""

    def __init__(
        self,
        # By length, from 1 on, with log10 of probability and of back-off weight.
        ngrams: Sequence[dict[Context, tuple[float, float]]],
        vocab_size: int,
        eos_id: int,
        unknown: float = UNSEEN,  # log10 of the probability of a token without unigram
    ):
        self.order = len(ngrams)
        self._backoffs: dict[Context, float] = {}
        after: dict[Context, list[tuple[int, float]]] = defaultdict(list)
        for level in ngrams:
            for gram, (probability, backoff) in level.items():
                self._backoffs[gram] = backoff * math.log(10)
                if gram[-1] != BEGIN:
                    after[gram[:-1]].append((gram[-1], probability * math.log(10)))
        self._after = {
            context: (np.array([t for t, _ in pairs]), np.array([p for _, p in pairs]))
            for context, pairs in after.items()
        }
        self._eos_id = eos_id
        self._unseen = np.full(vocab_size, unknown * math.log(10))
        self._follow = lru_cache(max(16, _CACHE_BYTES // (8 * vocab_size)))(self._computed)

    def scores(self, contexts: Tensor, symbols: Tensor) -> Tensor:
        rows = symbols.flatten(0, 1).tolist()
        values = np.empty((len(rows), symbols.shape[2] + 1))
        for row, (context, tokens) in enumerate(
            zip(contexts.flatten(0, 1).tolist(), rows, strict=True)
        ):
            values[row] = self._follow(self._longest_suffix(context))[[*tokens, self._eos_id]]
        return torch.from_numpy(values).to(symbols.device).unflatten(0, symbols.shape[:2])

    def _longest_suffix(self, tokens: Sequence[int]) -> Context:
        """Return the longest suffix of these tokens, after one ``<s>``, that is a context."""
        history = [token for token in tokens if token != BEGIN]
        context = (BEGIN, *history) if len(history) < self.order - 1 else tuple(history)
        context = context[max(0, len(context) - self.order + 1) :]
        while context and context not in self._after and not self._backoffs.get(context):
            context = context[1:]
        return context

    def _computed(self, context: Context) -> np.ndarray:
        if context:
            scores = self._follow(context[1:]) + self._backoffs.get(context, 0.0)
        else:
            scores = self._unseen.copy()
        tokens, values = self._after.get(context, ((), ()))
        scores[list(tokens)] = values
        return scores


def load_ngrams(path: str | Path, vocab_size: int, eos_id: int) -> TokenNgrams:
    """Read an ARPA file, plain or gzipped, whose words are token ids in decimal."""
    names = {"<s>": BEGIN, "</s>": eos_id}

    def token(origin: str, word: str) -> int:
        if word in names:
            return names[word]
        if not (word.isdecimal() and len(word) <= MOST_DIGITS and int(word) < vocab_size):
            raise ValueError(
                f"{origin}: `{word[:40]}` must be a token id below {vocab_size}: estimate the "
                "model from texts that the tokenizer has encoded, a line of ids for each."
            )
        return int(word)

    arpa = read_arpa(path, token)
    return TokenNgrams(arpa.ngrams, vocab_size, eos_id, arpa.unknown)
