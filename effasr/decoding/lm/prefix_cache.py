"""Cache of keys and values of a causal model, shared by texts with common prefixes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Text = tuple[int, ...]

_FIRST = 256


class PrefixCache:
    """Keys and values of tokens, by their whole prefix.

    The hypotheses of a beam share most of their tokens. Each token of the tree of texts has one row
    of a tensor here, so that nothing is copied when the beam keeps, repeats or drops a hypothesis.

    Args:
        width: Numbers per token, in all layers.
        limit: Most tokens.
        dtype: Data type of the numbers.
        device: Device of the numbers.
    """

    def __init__(self, width: int, limit: int, dtype: torch.dtype, device: torch.device) -> None:
        self._limit = limit
        self._rows = torch.empty(min(limit, _FIRST), width, dtype=dtype, device=device)
        self._free = list(range(len(self._rows)))
        # Rows of the tokens of each text.
        self._places: dict[Text, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def known(self, text: Text) -> int:
        """Return the length of the longest cached prefix of a text, without its last token."""
        for length in range(len(text) - 1, 0, -1):
            if text[:length] in self._places:
                return length
        return 0

    def read(self, beginnings: Iterable[Text]) -> Tensor:
        """Return keys and values of cached prefixes of one length: (texts, tokens, width)."""
        places = [self._places[text] for text in beginnings]
        return self._rows[torch.tensor(places, device=self._rows.device)]

    def write(self, texts: Sequence[Text], values: Tensor) -> bool:
        """Cache the last tokens of texts whose other tokens are cached, if there is room.

        Args:
            texts: Texts of equal length.
            values: (texts, tokens, width).

        Returns:
            Whether there was room.
        """
        count, ends = values.shape[1], range(len(texts[0]) - values.shape[1], len(texts[0]))
        # Two new texts may share a prefix.
        new = {
            text[: end + 1]: row * count + place
            for row, text in enumerate(texts)
            for place, end in enumerate(ends)
            if text[: end + 1] not in self._places
        }
        if not self._make_room(len(new)):
            return False
        taken = [self._free.pop() for _ in new]
        for text, place in zip(new, taken, strict=True):
            self._places[text] = (*self._places.get(text[:-1], ()), place)
        device = self._rows.device
        source = torch.tensor(list(new.values()), dtype=torch.int64, device=device)
        self._rows[torch.tensor(taken, dtype=torch.int64, device=device)] = values.flatten(0, 1)[
            source
        ]
        return True

    def keep(self, texts: Iterable[Text]) -> None:
        """Drop all tokens that are in none of these texts."""
        used: set[int] = set()
        for text in texts:
            cached = text if text in self._places else text[: self.known(text)]
            used.update(self._places.get(cached, ()))
        self._places = {text: own for text, own in self._places.items() if own[-1] in used}
        self._free = [place for place in range(len(self._rows)) if place not in used]

    def _make_room(self, tokens: int) -> bool:
        """Grow up to the limit, for this many more tokens."""
        if len(self._free) >= tokens:
            return True
        size = len(self._rows)
        grown = min(self._limit, max(2 * size, size + tokens - len(self._free)))
        if grown - size + len(self._free) < tokens:
            return False
        self._rows = torch.cat(
            [self._rows, self._rows.new_empty(grown - size, self._rows.shape[1])]
        )
        self._free += range(size, grown)
        return True
