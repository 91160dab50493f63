"""Tokenizers of Hugging Face's Canary models: a ``tokenizer.json`` with prompt tokens."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from effasr.data.prompt import Prompt
from effasr.data.tokenizer.base import Tokenizer, check_ids, check_language

TOKENIZER_FILE = "tokenizer.json"
_COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_LANGUAGE = re.compile(r"<\|([a-z]{2})\|>")
_PAD, _EOS, _UNKNOWN = "<pad>", "<|endoftext|>", "<unk>"
_PROMPT_HEAD = ("<|startofcontext|>", "<|startoftranscript|>", "<|emo:undefined|>")
_PROMPT_TAIL = ("<|noitn|>", "<|notimestamp|>", "<|nodiarize|>")
_PUNCTUATION = ("<|nopnc|>", "<|pnc|>")


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json`` that has canary-1b-v2's prompt tokens.

    A prompt is ``<|startofcontext|> <|startoftranscript|> <|emo:undefined|> <|source|>
    <|target|> <|pnc|> <|noitn|> <|notimestamp|> <|nodiarize|>``; the languages alone tell
    transcription from translation.
    """

    def __init__(self, directory: str | Path) -> None:
        """Read a folder.

        Args:
            directory: A folder with a ``tokenizer.json``.

        Raises:
            ValueError: The file is missing or broken, or lacks a prompt token.
            ImportError: The package `tokenizers` is not installed.
        """
        path = Path(directory) / TOKENIZER_FILE
        self._folder = path.parent
        self._tokenizer = _load(path)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # Ids may have holes: the model's output has a class for each number up to the largest.
        self.vocab_size = max(vocabulary.values()) + 1
        self.sources = self.languages = tuple(
            sorted(found[1] for token in vocabulary if (found := _LANGUAGE.fullmatch(token)))
        )
        added = self._tokenizer.get_added_tokens_decoder()
        self.specials = {token.content: index for index, token in added.items() if token.special}
        needed = (_PAD, _EOS, *_PROMPT_HEAD, *_PROMPT_TAIL, *_PUNCTUATION)
        missing = [token for token in needed if token not in vocabulary]
        if missing or not self.languages:
            raise ValueError(
                f"{path}: must have the prompt tokens of canary-1b-v2, but lacks "
                f"{', '.join(missing) or 'language tokens such as <|en|>'}."
            )
        self._ids = {token: vocabulary[token] for token in needed}
        self._ids |= {name: vocabulary[name] for name in map(_tag, self.languages)}
        self.pad_id = vocabulary[_PAD]
        self.eos_id = vocabulary[_EOS]
        self._unknown = vocabulary.get(_UNKNOWN)

    def encode(self, text: str, language: str) -> list[int]:
        """See `Tokenizer.encode`; one vocabulary serves all languages."""
        check_language(language, self.languages, "text")
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`."""
        checked = check_ids(ids, self.vocab_size)
        return self._tokenizer.decode(checked, skip_special_tokens=True).strip()

    def prompt(self, prompt: Prompt) -> list[int]:
        """See `Tokenizer.prompt`."""
        self.check_prompt_languages(prompt)
        languages = (_tag(prompt.source), _tag(prompt.target))
        pnc = _PUNCTUATION[prompt.punctuation]
        return [self._ids[name] for name in (*_PROMPT_HEAD, *languages, pnc, *_PROMPT_TAIL)]

    def count_unknown(self, ids: Iterable[int]) -> int:
        """See `Tokenizer.count_unknown`."""
        return sum(token == self._unknown for token in ids)

    def save(self, directory: str | Path) -> None:
        """Copy ``tokenizer.json`` and the files that belong to it, unchanged."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        if folder.resolve() == self._folder.resolve():
            return
        for name in (TOKENIZER_FILE, *_COMPANIONS):
            if (self._folder / name).is_file():
                shutil.copyfile(self._folder / name, folder / name)


def _tag(language: str) -> str:
    return f"<|{language}|>"


def _load(path: Path):
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file.")
    try:
        from tokenizers import Tokenizer as Fast
    except ImportError as error:
        raise ImportError(
            f"{path}: needs the package `tokenizers`: pip install effasr[huggingface]."
        ) from error
    try:
        return Fast.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(f"{path}: not a tokenizer that can be read: {error}.") from error
