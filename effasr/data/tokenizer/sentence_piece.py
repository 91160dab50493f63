"""An aggregate tokenizer: special tokens, then one SentencePiece vocabulary per language."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import sentencepiece

from effasr.data.atomic_files import write_atomically
from effasr.data.prompt import Prompt
from effasr.data.tokenizer.base import Tokenizer, check_ids, check_language

METADATA_FILE = "effasr_tokenizer.json"
"""What makes a folder one of ours: Hugging Face's folders have ``tokenizer.json``."""

_VERSION = 1
_PAD, _EOS, _START = "<pad>", "<|endoftext|>", "<|startoftranscript|>"
_TASKS = ("<|transcribe|>", "<|translate|>")
_PUNCTUATION = ("<|nopnc|>", "<|pnc|>")


class SentencePieceTokenizer(Tokenizer):
    """Ids: the special tokens, then the pieces of each language in alphabetical order.

    A prompt is ``<|startoftranscript|> <|source|> <|task|> <|target|> <|pnc|>``.
    """

    def __init__(self, models: Mapping[str, bytes], sources: Sequence[str] = ()) -> None:
        """Put languages together.

        Args:
            models: A serialised SentencePiece model by language.
            sources: Further languages, spoken but never written (translated from).

        Raises:
            ValueError: There is no model, or one is no SentencePiece model.
        """
        if not models:
            raise ValueError("`models` must hold at least one language, but is empty.")
        self.models = {language: models[language] for language in sorted(models)}
        self._processors = {name: load_processor(name, data) for name, data in self.models.items()}
        self.languages = tuple(self.models)
        self.sources = tuple(sorted({*self.languages, *sources}))
        tags = [f"<|{language}|>" for language in self.sources]
        names = [_PAD, _EOS, _START, *_TASKS, *_PUNCTUATION, *tags]
        self.specials = {name: index for index, name in enumerate(names)}
        self.pad_id = self.specials[_PAD]
        self.eos_id = self.specials[_EOS]
        sizes = [processor.vocab_size() for processor in self._processors.values()]
        *self._offsets, self.vocab_size = accumulate(sizes, initial=len(names))
        self._unknown = {
            offset + processor.unk_id()
            for offset, processor in zip(self._offsets, self._processors.values(), strict=True)
        }

    def encode(self, text: str, language: str) -> list[int]:
        """See `Tokenizer.encode`."""
        check_language(language, self.languages, "text")
        offset = self._offsets[self.languages.index(language)]
        return [offset + piece for piece in self._processors[language].encode(text)]

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`; runs of pieces of different languages are joined by a space."""
        pieces = [token for token in check_ids(ids, self.vocab_size) if token >= self._offsets[0]]
        texts = []
        for place, run in groupby(pieces, lambda token: bisect_right(self._offsets, token) - 1):
            own = [token - self._offsets[place] for token in run]
            texts.append(self._processors[self.languages[place]].decode(own))
        return " ".join(texts)

    def prompt(self, prompt: Prompt) -> list[int]:
        """See `Tokenizer.prompt`."""
        self.check_prompt_languages(prompt)
        names = (
            _START,
            f"<|{prompt.source}|>",
            f"<|{prompt.task}|>",
            f"<|{prompt.target}|>",
            _PUNCTUATION[prompt.punctuation],
        )
        return [self.specials[name] for name in names]

    def count_unknown(self, ids: Iterable[int]) -> int:
        """See `Tokenizer.count_unknown`."""
        return sum(token in self._unknown for token in ids)

    def save(self, directory: str | Path) -> None:
        """Write one ``.model`` file per language and `METADATA_FILE`."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        for language, model in self.models.items():
            write_atomically(folder / f"{language}.model", model)
        metadata = {
            "version": _VERSION,
            "vocab_size": self.vocab_size,
            "specials": list(self.specials),
            "sources": list(self.sources),
            "languages": {
                language: {"model": f"{language}.model", "offset": offset}
                for language, offset in zip(self.languages, self._offsets, strict=True)
            },
        }
        text = json.dumps(metadata, indent=2, ensure_ascii=False) + "\n"
        write_atomically(folder / METADATA_FILE, text.encode())

    @classmethod
    def load(cls, directory: str | Path) -> SentencePieceTokenizer:
        """Read what `save` wrote.

        Raises:
            ValueError: A file is missing, or the folder was written by another version.
        """
        path = Path(directory) / METADATA_FILE
        metadata = _read_metadata(path)
        models = {}
        for language, entry in metadata["languages"].items():
            file = path.parent / entry["model"]
            if not file.is_file():
                raise ValueError(f"{file}: the model of {language!r} is missing: copy it there.")
            models[language] = file.read_bytes()
        tokenizer = cls(models, metadata["sources"])
        if list(tokenizer.specials) != metadata["specials"] or (
            tokenizer.vocab_size != metadata["vocab_size"]
        ):
            raise ValueError(
                f"{path}: its special tokens or its size ({metadata['vocab_size']}) are not those "
                f"of this version ({tokenizer.vocab_size}): train the tokenizer again."
            )
        return tokenizer


def _read_metadata(path: Path) -> dict[str, Any]:
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}.") from error
    if metadata.get("version") != _VERSION:
        raise ValueError(
            f"{path}: `version` must be {_VERSION}, but is {metadata.get('version')!r}: "
            "train the tokenizer again."
        )
    return metadata


def load_processor(language: str, model: bytes) -> sentencepiece.SentencePieceProcessor:
    """Read a serialised SentencePiece model.

    Raises:
        ValueError: It is none.
    """
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise ValueError(f"the model of {language!r} is no SentencePiece model.") from error
