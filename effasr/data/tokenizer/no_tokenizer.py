"""Placeholder tokenizer of models that were pretrained on audio alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn

from effasr.data.prompt import Prompt
from effasr.data.tokenizer.base import Tokenizer

NO_TOKENIZER_FILE = "no_tokenizer.json"

_REMEDY = (
    "the model was pretrained on audio alone and has no tokenizer: fine-tune it with init_from and "
    "data.tokenizer."
)


class NoTokenizer(Tokenizer):
    """A tokenizer without texts; whoever asks for tokens gets a ValueError."""

    vocab_size = 1
    pad_id = eos_id = 0
    specials: Mapping[str, int] = {}
    languages = sources = ()

    def encode(self, text: str, language: str) -> NoReturn:
        """Raise a ValueError."""
        raise ValueError(_REMEDY)

    def decode(self, ids: Iterable[int]) -> NoReturn:
        """Raise a ValueError."""
        raise ValueError(_REMEDY)

    def prompt(self, prompt: Prompt) -> NoReturn:
        """Raise a ValueError."""
        raise ValueError(_REMEDY)

    def count_unknown(self, ids: Iterable[int]) -> int:
        """Return 0: there are no texts."""
        return 0

    def pieces(self) -> list[str]:
        """Return nothing: there are no texts."""
        return []

    def save(self, directory: str | Path) -> None:
        """Write the file by which `effasr.data.tokenizer.load_tokenizer` knows it."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / NO_TOKENIZER_FILE).write_text("{}\n")
