"""Language models over token ids for shallow fusion, and n-grams of them."""

import math
from collections import Counter, defaultdict
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
        has_end: bool = True,  # without, the end has a log-probability of 0
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
        self._eos_id, self._has_end = eos_id, has_end
        self._unseen = np.full(vocab_size, unknown * math.log(10))
        self._follow = lru_cache(max(16, _CACHE_BYTES // (8 * vocab_size)))(self._computed)

    def scores(self, contexts: Tensor, symbols: Tensor) -> Tensor:
        rows = symbols.flatten(0, 1).tolist()
        values = np.empty((len(rows), symbols.shape[2] + 1))
        for row, (context, tokens) in enumerate(
            zip(contexts.flatten(0, 1).tolist(), rows, strict=True)
        ):
            values[row] = self._follow(self._longest_suffix(context))[[*tokens, self._eos_id]]
        if not self._has_end:
            values[:, -1] = 0.0
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


def load_ngrams(
    path: str | Path, vocab_size: int, eos_id: int, pieces: Sequence[str] = ()
) -> TokenNgrams:
    """Read an ARPA file, plain or gzipped, whose words are token ids in decimal or ``pieces``."""
    names = {"<s>": BEGIN, "</s>": eos_id}
    count = Counter(pieces)
    ids = {piece: number for number, piece in enumerate(pieces) if count[piece] == 1}
    of_pieces: bool | None = None

    def token(origin: str, word: str) -> int:
        nonlocal of_pieces
        if word in names:
            return names[word]
        if of_pieces is None:
            # The first word decides: a piece may be a number, too.
            of_pieces = not word.isdecimal() and word in ids
        if of_pieces and word in ids:
            return ids[word]
        if of_pieces or not _is_id(word, vocab_size):
            rule = "a piece of the tokenizer" if of_pieces else f"a token id below {vocab_size}"
            raise ValueError(
                f"{origin}: `{word[:40]}` must be {rule}: estimate the model from texts that the "
                "tokenizer has encoded, a line of ids or pieces for each; or give `lm_unit` word."
            )
        return int(word)

    arpa = read_arpa(path, token)
    return TokenNgrams(arpa.ngrams, vocab_size, eos_id, arpa.unknown, arpa.has_end)


def _is_id(word: str, vocab_size: int) -> bool:
    return word.isdecimal() and len(word) <= MOST_DIGITS and int(word) < vocab_size
