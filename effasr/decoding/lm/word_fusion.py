"""N-grams over words for shallow fusion, whose scores are added where words end."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from effasr.data.tokenizer import Tokenizer
from effasr.decoding.lm.arpa import BEGIN
from effasr.decoding.lm.words import WordNgrams

_TOKENS_PER_WORD = 16
"""Tokens that are read for each word of the n-grams; a longer word is not all read."""

_CACHED = 1 << 18


class WordFusion:
    """Word n-grams as a language model over the tokens of a speech model: see `TokenLM`.

    A token that begins a word has the log-probability of the word before it, which is complete
    then, and the end of the text that of the last word and of the end; other tokens have 0. The
    sum over a text is the log-probability of its words and its end.

    Attributes:
        order: Number of tokens that it reads.
    """

    def __init__(self, words: WordNgrams, tokenizer: Tokenizer) -> None:
        """Find the tokens that begin words.

        Raises:
            ValueError: No token of the tokenizer does.
        """
        self.order = _TOKENS_PER_WORD * (words.order + 1)
        self._words, self._tokenizer = words, tokenizer
        self._begins = _word_beginnings(tokenizer)
        self._of_context = lru_cache(_CACHED)(self._computed)
        if not any(self._begins):
            raise ValueError(
                "`lm_unit` must be token for a tokenizer without tokens that begin words, such as "
                "those of languages without spaces, but is word."
            )

    def scores(self, contexts: Tensor, symbols: Tensor) -> Tensor:
        """Score next tokens, and the end: see `TokenLM.scores`."""
        rows = contexts.flatten(0, 1).tolist()
        found = [
            self._of_context(tuple(token for token in row if token >= 0)[-self.order :])
            for row in rows
        ]
        values = torch.tensor(found, dtype=torch.float64, device=symbols.device)
        values = values.unflatten(0, symbols.shape[:2])
        begins = torch.tensor(self._begins, device=symbols.device)[symbols]
        return torch.cat([values[..., :1] * begins, values[..., 1:]], -1)

    def _computed(self, tokens: tuple[int, ...]) -> tuple[float, float]:
        """Return the log-probability of the last word, and of it and the end."""
        groups = self._groups(tokens)
        said = [BEGIN]
        if len(tokens) >= self.order:
            # The beginning of the first word may be missing.
            said, groups = [], groups[1:]
        for group in groups[:-1]:
            said += self._ids(group)
        score = 0.0
        for word in self._ids(groups[-1]) if groups else ():
            score += self._words.log_prob(said, word)
            said.append(word)
        return score, score + self._words.log_prob(said, self._words.end_id)

    def _groups(self, tokens: Sequence[int]) -> list[list[int]]:
        """Divide tokens before those that begin words."""
        groups: list[list[int]] = []
        for token in tokens:
            if self._begins[token] or not groups:
                groups.append([])
            groups[-1].append(token)
        return groups

    def _ids(self, tokens: Sequence[int]) -> list[int]:
        return self._words.word_ids(self._tokenizer.decode(tokens))


def _word_beginnings(tokenizer: Tokenizer) -> list[bool]:
    """Return for each token whether it begins a word, so that two of it are two words."""
    return [
        len(tokenizer.decode([token, token]).split()) > 1 for token in range(tokenizer.vocab_size)
    ]
