"""How well a tokenizer keeps texts: unknown tokens, and texts that come back changed."""

import unicodedata
from collections import Counter
from collections.abc import Sequence

from effasr.data.tokenizer.base import Tokenizer

_SHOWN = 10


class TextFidelity:
    """Counts over texts, each encoded and decoded again."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._is_unknown: dict[tuple[str, str], bool] = {}
        self.texts = self.tokens = self.unknown = self.changed = 0
        self.characters: Counter[str] = Counter()  # that the vocabulary cannot spell
        self._example: tuple[str, str] | None = None

    def add(self, text: str, language: str, ids: Sequence[int] | None = None) -> None:
        ids = self._tokenizer.encode(text, language) if ids is None else ids
        unknown = self._tokenizer.count_unknown(ids)
        self.texts += 1
        self.tokens += len(ids)
        self.unknown += unknown
        if unknown:
            self.characters.update(c for c in text if self._has_no_piece(c, language))
            return
        expected = " ".join(unicodedata.normalize("NFC", text).split())
        decoded = " ".join(self._tokenizer.decode(ids).split())
        if decoded != expected:
            self.changed += 1
            self._example = self._example or (expected, decoded)

    def _has_no_piece(self, character: str, language: str) -> bool:
        key = (character, language)
        if key not in self._is_unknown:
            ids = self._tokenizer.encode(character, language)
            self._is_unknown[key] = self._tokenizer.count_unknown(ids) > 0
        return self._is_unknown[key]

    def lines(self) -> list[str]:
        """Return what there is to say; nothing where all texts come back."""
        lines = []
        if self.unknown:
            lines.append(f"{self._counts()}; commonest characters: {self._commonest()}")
        if self._example is not None:
            text, decoded = self._example
            lines.append(
                f"{self.changed} of {self.texts} texts come back changed from the tokenizer, such "
                f"as {text[:60]!r} as {decoded[:60]!r}"
            )
        return lines

    def check(self, limit: float, option: str) -> None:
        """Refuse a tokenizer that lacks more than this share of the tokens."""
        if self.unknown > limit * self.tokens:
            raise ValueError(
                f"{self._counts()}, over the {100 * limit:g} % of {option}: {self._commonest()}. "
                "Train a tokenizer on these texts, or bring them into the form of those that it "
                "was trained on."
            )

    def _counts(self) -> str:
        share = 100 * self.unknown / max(1, self.tokens)
        return (
            f"{self.unknown} of {self.tokens} tokens ({share:.1f} %) are unknown to the tokenizer"
        )

    def _commonest(self) -> str:
        return ", ".join(f"{c!r} ({count})" for c, count in self.characters.most_common(_SHOWN))
