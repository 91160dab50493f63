"""Language models over token ids for shallow fusion; n-grams from ARPA files."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from effasr.data.manifest.lines import numbered_lines

_BEGIN = -1
"""``<s>`` among token ids."""

_UNSEEN = -100.0
"""log10 probability of an unknown token in a model without ``<unk>``, as in KenLM."""

_CACHE_BYTES = 64 << 20
_MOST_DIGITS = 18

Context = tuple[int, ...]


class TokenLM(Protocol):
    """A language model over the tokens of the speech model, for beam search.

    Attributes:
        order: Number of tokens that it reads, the scored one included.
    """

    order: int

    def scores(self, contexts: Tensor, symbols: Tensor) -> Tensor:
        """Score next tokens, and the end of the text.

        Args:
            contexts: int64 (N, K, n), the last tokens of each hypothesis, at least ``order - 1`` or
                all; -1 before the first.
            symbols: int64 (N, K, C).

        Returns:
            Log-probabilities of the tokens and, last, of the end, float64 (N, K, C + 1).
        """
        ...


class TokenNgrams:
    """A back-off n-gram model, in natural logarithms.

    It uses dictionaries on the host, which suits models of some million n-grams.

    Attributes:
        order: Tokens of the longest n-gram.
    """

    def __init__(
        self,
        ngrams: Sequence[dict[Context, tuple[float, float]]],
        vocab_size: int,
        eos_id: int,
        unknown: float = _UNSEEN,
    ):
        """Index n-grams by context.

        Args:
            ngrams: N-grams by length, from 1 on, with log10 of probability and of back-off weight.
            vocab_size: V.
            eos_id: The token for ``</s>``.
            unknown: log10 of the probability of a token without unigram.
        """
        self.order = len(ngrams)
        self._backoffs: dict[Context, float] = {}
        after: dict[Context, list[tuple[int, float]]] = defaultdict(list)
        for level in ngrams:
            for gram, (probability, backoff) in level.items():
                self._backoffs[gram] = backoff * math.log(10)
                if gram[-1] != _BEGIN:
                    after[gram[:-1]].append((gram[-1], probability * math.log(10)))
        self._after = {
            context: (np.array([t for t, _ in pairs]), np.array([p for _, p in pairs]))
            for context, pairs in after.items()
        }
        self._eos_id = eos_id
        self._rest = np.full(vocab_size, unknown * math.log(10))
        self._follow = lru_cache(max(16, _CACHE_BYTES // (8 * vocab_size)))(self._computed)

    def scores(self, contexts: Tensor, symbols: Tensor) -> Tensor:
        """Score next tokens: see `TokenLM.scores`."""
        rows = symbols.flatten(0, 1).tolist()
        found = np.empty((len(rows), symbols.shape[2] + 1))
        for row, (context, tokens) in enumerate(
            zip(contexts.flatten(0, 1).tolist(), rows, strict=True)
        ):
            found[row] = self._follow(self._known(context))[[*tokens, self._eos_id]]
        return torch.from_numpy(found).to(symbols.device).unflatten(0, symbols.shape[:2])

    def _known(self, tokens: Sequence[int]) -> Context:
        """Return the longest suffix of these tokens, after one ``<s>``, that is a context."""
        said = [token for token in tokens if token != _BEGIN]
        context = (_BEGIN, *said) if len(said) < self.order - 1 else tuple(said)
        context = context[max(0, len(context) - self.order + 1) :]
        while context and context not in self._after and not self._backoffs.get(context):
            context = context[1:]
        return context

    def _computed(self, context: Context) -> np.ndarray:
        """Return log-probabilities of all tokens, float64 (V,)."""
        if context:
            every = self._follow(context[1:]) + self._backoffs.get(context, 0.0)
        else:
            every = self._rest.copy()
        tokens, values = self._after.get(context, ((), ()))
        every[list(tokens)] = values
        return every


def load_ngrams(path: str | Path, vocab_size: int, eos_id: int) -> TokenNgrams:
    """Read an ARPA file, plain or gzipped, whose words are token ids in decimal.

    Raises:
        ValueError: It is not an ARPA file, is truncated, or has a word that is no token id.
    """
    path = Path(path)
    names = {"<s>": _BEGIN, "</s>": eos_id}
    ngrams: list[dict[Context, tuple[float, float]]] = []
    promised: list[int] = []
    held: list[int] = []
    unknown, section = _UNSEEN, ""
    for number, line in _lines(path):
        if line.startswith("\\"):
            section = line
            if section.endswith("-grams:"):
                ngrams.append({})
                held.append(0)
            continue
        if section == "\\data\\":
            promised.append(_count(path, number, line))
        elif section == f"\\{len(ngrams)}-grams:":
            gram, probability, backoff = _entry(path, number, line, len(ngrams))
            held[-1] += 1
            if gram == ["<unk>"]:
                unknown = probability
            elif "<unk>" not in gram:
                ids = tuple(_token(path, number, word, names, vocab_size) for word in gram)
                ngrams[-1][ids] = probability, backoff
        elif section:
            raise ValueError(f"{path}:{number}: `{section}` is no section of an ARPA file.")
    if section != "\\end\\" or not ngrams or not ngrams[0]:
        raise ValueError(
            f"{path} must be an ARPA file, from \\data\\ to \\end\\, but ends in "
            f"{section or 'no section'}: KenLM's lmplz and SRILM write such files."
        )
    if held != promised:
        raise ValueError(f"{path}: \\data\\ promises {promised} n-grams, but there are {held}.")
    return TokenNgrams(ngrams, vocab_size, eos_id, unknown)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not empty, with their numbers."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file.")
    try:
        for number, line in numbered_lines(path):
            yield number, line.strip()
    except ValueError as error:
        raise ValueError(
            f"{path} must be an ARPA file, plain or .gz, but is not: {error}"
        ) from None


def _count(path: Path, number: int, line: str) -> int:
    """Parse a line like ``ngram 2=120``."""
    left, equals, count = line.partition("=")
    count = count.strip()
    is_number = count.isdecimal() and len(count) <= _MOST_DIGITS
    if not (left.startswith("ngram ") and equals and is_number):
        raise ValueError(f"{path}:{number} must be like `ngram 1=120`, but is `{line[:60]}`.")
    return int(count)


def _entry(path: Path, number: int, line: str, length: int) -> tuple[list[str], float, float]:
    """Return the words of a line, and log10 of their probability and of their back-off weight."""
    parts = line.split()
    try:
        probability = float(parts[0])
        backoff = float(parts[1 + length]) if len(parts) == 2 + length else 0.0
        if (
            len(parts) not in (1 + length, 2 + length)
            or not -math.inf < probability <= 0
            or not math.isfinite(backoff)
        ):
            raise ValueError
    except (ValueError, IndexError):
        raise ValueError(
            f"{path}:{number} must be a log-probability, {length} words and perhaps a back-off "
            f"weight, but is `{line[:60]}`."
        ) from None
    return parts[1 : 1 + length], probability, backoff


def _token(path: Path, number: int, word: str, names: dict[str, int], vocab_size: int) -> int:
    if word in names:
        return names[word]
    if not (word.isdecimal() and len(word) <= _MOST_DIGITS and int(word) < vocab_size):
        raise ValueError(
            f"{path}:{number}: `{word[:40]}` must be a token id below {vocab_size}: estimate the "
            "model from texts that the tokenizer has encoded, a line of ids for each."
        )
    return int(word)
