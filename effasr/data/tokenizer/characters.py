"""Tokenizers of wav2vec 2.0 models: a vocabulary of characters, in ``vocab.json``."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from effasr.data.prompt import Prompt
from effasr.data.tokenizer.base import Tokenizer, check_ids
from effasr.data.tokenizer.hugging_face import (
    ADDED_FILE,
    MERGES_FILE,
    SETTINGS_FILE,
    TOKENIZER_FILE,
    VOCABULARY_FILE,
)
from effasr.untrusted.documents import read_json_object

_SPECIALS = {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "unk": "<unk>"}
_SETTINGS_FILES = "special_tokens_map.json", SETTINGS_FILE
_MOST_LANGUAGES = 8  # that an error names


def has_characters(folder: Path) -> bool:
    """Whether a folder has a ``vocab.json`` that belongs to no other tokenizer."""
    others = any((folder / name).is_file() for name in (TOKENIZER_FILE, MERGES_FILE))
    return (folder / VOCABULARY_FILE).is_file() and not others


class CharacterTokenizer(Tokenizer):
    """transformers' ``Wav2Vec2CTCTokenizer``, whose padding token is the blank.

    Its other tokens keep their order. A vocabulary of capital letters alone gets texts in capitals,
    one of small letters alone in small letters. MMS has a vocabulary for each language:
    ``language`` names one, by default that of ``target_lang``.
    """

    def __init__(self, directory: str | Path, language: str | None = None) -> None:
        folder = Path(directory)
        self._path = folder / VOCABULARY_FILE
        vocabulary: dict[str, Any] = read_json_object(self._path)
        self._settings: dict[str, Any] = {}
        for name in _SETTINGS_FILES:
            if (folder / name).is_file():
                self._settings |= read_json_object(folder / name)
        if isinstance(next(iter(vocabulary.values()), None), dict):
            vocabulary = self._of_language(vocabulary, language)
        if (folder / ADDED_FILE).is_file():
            vocabulary = {**vocabulary, **read_json_object(folder / ADDED_FILE)}
        names = {kind: self._special(f"{kind}_token", name) for kind, name in _SPECIALS.items()}
        self._delimiter = self._special("word_delimiter_token", "|")
        self._vocabulary = vocabulary
        self._check(names["pad"])
        self.blank = vocabulary[names["pad"]]
        self._ids = {x: n - (n > self.blank) for x, n in vocabulary.items() if n != self.blank}
        self._tokens = {number: token for token, number in self._ids.items()}
        self.vocab_size = max(self._ids.values()) + 1
        self.specials = {x: self._ids[x] for x in names.values() if x in self._ids}
        self._unknown = self._ids.get(names["unk"])
        self.pad_id = self._ids[self._delimiter]
        self.eos_id = self._ids.get(names["eos"], self.pad_id)
        self.sources = self.languages = ()
        texts = [token for token in self._ids if token not in self.specials]
        longest_first = sorted((x for x in texts if len(x) > 1), key=len, reverse=True)
        self._pattern = re.compile("|".join([*map(re.escape, longest_first), "."]), re.DOTALL)
        letters = "".join(texts)
        cases = (case for case in (str.upper, str.lower) if case(letters) == letters)
        self._case = next(cases, str)

    def _of_language(self, vocabularies: dict[str, Any], language: str | None) -> dict[str, Any]:
        chosen = language or self._settings.get("target_lang")
        if chosen not in vocabularies:
            names = sorted(vocabularies)
            more = ", ..." if len(names) > _MOST_LANGUAGES else ""
            raise ValueError(
                f"{self._path}: `--language` must be one of its {len(names)} languages "
                f"({', '.join(names[:_MOST_LANGUAGES])}{more}), but is {chosen}."
            )
        return vocabularies[chosen]

    def _special(self, name: str, default: str) -> str:
        value = self._settings.get(name) or default
        return str(value["content"] if isinstance(value, dict) else value)

    def _check(self, pad: str) -> None:
        numbers = list(self._vocabulary.values())
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"{self._path}: must map tokens to their numbers, but does not.")
        missing = [token for token in (pad, self._delimiter) if token not in self._vocabulary]
        if missing or len(numbers) < 2:
            raise ValueError(
                f"{self._path}: must have the blank {pad} and {self._delimiter} between words, but "
                f"lacks {' and '.join(missing) or 'characters'}: copy tokenizer_config.json of the "
                "model, too, which names them."
            )

    def encode(self, text: str, language: str) -> list[int]:
        """One vocabulary serves all languages."""
        tokens = self._pattern.findall(self._case(text).replace(" ", self._delimiter))
        ids = (self._ids.get(token, self._unknown) for token in tokens)
        return [number for number in ids if number is not None]

    def decode(self, ids: Iterable[int]) -> str:
        tokens = (self._tokens.get(number, "") for number in check_ids(ids, self.vocab_size))
        text = "".join(token for token in tokens if token not in self.specials)
        text = text.replace(self._delimiter, " ").strip()
        return text.lower() if self._settings.get("do_lower_case") else text

    def count_unknown(self, ids: Iterable[int]) -> int:
        return sum(number == self._unknown for number in ids)

    def prompt(self, prompt: Prompt) -> list[int]:
        """The decoder that such a model has not would start from it."""
        return [self.pad_id]

    def pieces(self) -> list[str]:
        names = {number: f"<{number}>" for number in range(self.vocab_size)} | self._tokens
        return ["▁" if x == self._delimiter else x for _, x in sorted(names.items())]

    def save(self, directory: str | Path) -> None:
        """Write the vocabulary of the language, and what `transformers` needs to read it."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        settings = {
            **{name: value for name, value in self._settings.items() if name != "target_lang"},
            "tokenizer_class": "Wav2Vec2CTCTokenizer",
        }
        for name, content in {VOCABULARY_FILE: self._vocabulary, SETTINGS_FILE: settings}.items():
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            (folder / name).write_text(text, encoding="utf-8")
