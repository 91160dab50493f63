"""Abstract base class of tokenizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn

from effasr.data.languages import UnknownLanguageError, language_among
from effasr.data.prompt import Prompt


class Tokenizer(ABC):
    """Text to token ids and back, and prompts as token ids."""

    vocab_size: int  # Ids are ``0 .. vocab_size - 1``; the CTC blank is ``vocab_size``
    pad_id: int  # Fills the tail of a static shape; no loss sees it
    eos_id: int  # Ends a transcript
    specials: Mapping[str, int]  # Ids by token, of tokens that are no text
    languages: tuple[str, ...]  # Languages that text may be in
    sources: tuple[str, ...]  # Languages that speech may be in
    subsampling: int | None = None  # That of models which its size was chosen for, if it was

    @abstractmethod
    def encode(self, text: str, language: str) -> list[int]:
        """Token ids of a text, without prompt and end."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids; special tokens are skipped."""

    @abstractmethod
    def prompt(self, prompt: Prompt) -> list[int]:
        """Return the tokens that the decoder reads before it writes."""

    @abstractmethod
    def count_unknown(self, ids: Iterable[int]) -> int:
        """Return how many of these ids stand for text that the vocabulary cannot spell."""

    @abstractmethod
    def pieces(self) -> list[str]:
        """Return the piece of every id, with U+2581 for a space; special tokens by their names."""

    @abstractmethod
    def save(self, directory: str | Path) -> None:
        """Write the tokenizer where `effasr.data.tokenizer.load_tokenizer` can read it."""

    @property
    def blank_id(self) -> int:
        """The class of the CTC blank, the last of ``vocab_size + 1``."""
        return self.vocab_size

    def knows(self, language: str) -> bool:
        """Whether text may be in a language."""
        try:
            return bool(language_among(language, self.languages, "text"))
        except UnknownLanguageError:
            return False

    def prompt_languages(self, prompt: Prompt) -> tuple[str, str]:
        """Return both languages of a request, by their names in the tokenizer."""
        source = language_among(prompt.source, self.sources, "speech")
        return source, language_among(prompt.target, self.languages, "text")


def check_ids(ids: Iterable[int], vocab_size: int) -> list[int]:
    """Return the ids as a list."""
    checked = [int(token) for token in ids]
    for token in checked:
        if not 0 <= token < vocab_size:
            raise ValueError(f"`ids` must be in 0 .. {vocab_size - 1}, but one is {token}.")
    return checked


# Placeholder tokenizer of models that were pretrained on audio alone.

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
        raise ValueError(_REMEDY)

    def decode(self, ids: Iterable[int]) -> NoReturn:
        raise ValueError(_REMEDY)

    def prompt(self, prompt: Prompt) -> NoReturn:
        raise ValueError(_REMEDY)

    def count_unknown(self, ids: Iterable[int]) -> int:
        return 0

    def pieces(self) -> list[str]:
        return []

    def save(self, directory: str | Path) -> None:
        """Write the file by which `effasr.data.tokenizer.load_tokenizer` knows it."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / NO_TOKENIZER_FILE).write_text("{}\n")
