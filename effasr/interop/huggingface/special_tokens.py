"""Special tokens of a tokenizer, as transformers' configurations need them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialTokens:
    """Token ids for transformers' generation; the defaults are canary-1b-v2's.

    Attributes:
        pad_id: Fills batches.
        bos_id: Begins a text.
        eos_id: Ends a text.
        decoder_start_id: The first token of a prompt.
        count: Number of tokens of the tokenizer. A model may have more classes, which generation
            then suppresses. None for as many as the model has.
        generation: Other fields of ``generation_config.json``.
    """

    pad_id: int = 2
    bos_id: int = 4
    eos_id: int = 3
    decoder_start_id: int = 7
    count: int | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)

    def unused_classes(self, vocab_size: int) -> list[int]:
        """Return the classes of a model that no token has."""
        return list(range(vocab_size if self.count is None else self.count, vocab_size))
