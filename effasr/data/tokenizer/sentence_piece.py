"""Tokenizers of several SentencePiece models, among them those that effasr trains."""

from __future__ import annotations

import json
import unicodedata
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from operator import add
from pathlib import Path
from typing import Any, Literal

import sentencepiece

from effasr.checks import check
from effasr.data.atomic_files import write_atomically
from effasr.data.languages import language_among
from effasr.data.prompt import Prompt
from effasr.data.tokenizer.base import Tokenizer, check_ids
from effasr.untrusted.documents import read_json_object
from effasr.untrusted.files import plain_name, read_bytes

METADATA_FILE = "effasr_tokenizer.json"
"""File that identifies a folder of effasr: Hugging Face's folders have ``tokenizer.json``."""

SHARED = "shared"
"""Name of a model that languages share."""

# What is done to a text before it is divided into pieces. Tokenizers of before this was stored have
# SentencePiece's nmt_nfkc in their models, which goes on to apply.
Normalization = Literal["identity", "nfc", "nfkc"]

_VERSION = 1
_PAD, _EOS, _START = "<pad>", "<|endoftext|>", "<|startoftranscript|>"
_TASKS = ("<|transcribe|>", "<|translate|>")
_PUNCTUATION = ("<|nopnc|>", "<|pnc|>")


class AggregateTokenizer(Tokenizer):
    """SentencePiece models whose ids follow one another."""

    normalization: Normalization | None = None

    def __init__(self, models: Mapping[str, bytes], gaps: Mapping[str, int] | None = None) -> None:
        """Leave a gap of so many ids before the pieces of a model."""
        self.models = dict(models)
        self._names = list(models)
        self._processors = [load_processor(name, data) for name, data in models.items()]
        self._sizes = [processor.vocab_size() for processor in self._processors]
        before = [(gaps or {}).get(name, 0) for name in models]
        self._offsets = list(accumulate(map(add, before, [0, *self._sizes])))
        self.vocab_size = self._offsets[-1] + self._sizes[-1]
        self._unknown = {
            offset + processor.unk_id()
            for offset, processor in zip(self._offsets, self._processors, strict=True)
        }

    def count_unknown(self, ids: Iterable[int]) -> int:
        return sum(token in self._unknown for token in ids)

    def pieces(self) -> list[str]:
        names = {number: name for name, number in self.specials.items()}
        for offset, processor in zip(self._offsets, self._processors, strict=True):
            for piece in range(processor.vocab_size()):
                names[offset + piece] = processor.id_to_piece(piece)
        return [names.get(number, f"<{number}>") for number in range(self.vocab_size)]

    @abstractmethod
    def extended(self, models: Mapping[str, bytes]) -> AggregateTokenizer:
        """Return a tokenizer with further languages, in which each id means what it did."""

    def _encode(self, text: str, place: int) -> list[int]:
        return [self._offsets[place] + piece for piece in self._processors[place].encode(text)]

    def _runs(self, ids: Iterable[int]) -> Iterator[tuple[int, list[int]]]:
        """Yield runs of tokens of one model: its number, and the tokens in its numbering."""
        for position, run in groupby(ids, lambda token: bisect_right(self._offsets, token) - 1):
            yield position, [token - self._offsets[position] for token in run]

    def _write(self, directory: str | Path, file: str, metadata: Mapping[str, Any]) -> None:
        """Write one ``.model`` file per model, and a file of metadata."""
        files = {model_file(name): model for name, model in self.models.items()}
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        for file_name, model in files.items():
            write_atomically(folder / file_name, model)
        content = {"version": _VERSION, **metadata}
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        write_atomically(folder / file, text.encode())


class SentencePieceTokenizer(AggregateTokenizer):
    """Ids: the special tokens, then the pieces of each language in alphabetical order.

    Languages may also share one model, and then have the same pieces. Those that were ``added``
    follow, each with its special token and a model, so that the other ids stay. A prompt is
    ``<|startoftranscript|> <|source|> <|task|> <|target|> <|pnc|>``.
    """

    def __init__(
        self,
        models: Mapping[str, bytes],
        sources: Sequence[str] = (),
        *,
        sharing: Sequence[str] = (),
        added: Sequence[str] = (),
        normalization: Normalization | None = None,
        subsampling: int | None = None,
    ) -> None:
        """Put languages together."""
        check(models, "models", "hold at least one language", "empty")
        first = sorted(models.keys() - set(added))
        if sharing and len(first) != 1:
            raise ValueError(
                f"`models` must hold one model for `sharing`, but holds {len(first)}: "
                f"{', '.join(first)}."
            )
        check(subsampling in (None, 4, 8), "subsampling", "be 4 or 8", repr(subsampling))
        self.normalization, self.subsampling = normalization, subsampling
        self.is_shared, self.added = bool(sharing), tuple(added)
        self._sharing, self._spoken = tuple(sharing), tuple(sources)
        languages = sorted({*(sharing or first), *sources} - set(added))
        tags = [f"<|{language}|>" for language in languages]
        names = [_PAD, _EOS, _START, *_TASKS, *_PUNCTUATION, *tags]
        self.specials = {name: index for index, name in enumerate(names)}
        self.pad_id = self.specials[_PAD]
        self.eos_id = self.specials[_EOS]
        gaps = {first[0]: len(names), **dict.fromkeys(added, 1)}
        super().__init__({name: models[name] for name in (*first, *added)}, gaps)
        places = {name: position for position, name in enumerate(self._names)}
        self._places = {language: places.get(language, 0) for language in (*sharing, *places)}
        self._places.pop(SHARED if sharing else "", None)
        self.specials |= {f"<|{name}|>": self._offsets[places[name]] - 1 for name in added}
        self._skipped = set(self.specials.values())
        self.languages = tuple(sorted(self._places))
        self.sources = tuple(sorted({*languages, *added}))

    def extended(self, models: Mapping[str, bytes]) -> SentencePieceTokenizer:
        return SentencePieceTokenizer(
            {**self.models, **models},
            self._spoken,
            sharing=self._sharing,
            added=(*self.added, *models),
            normalization=self.normalization,
            subsampling=self.subsampling,
        )

    def encode(self, text: str, language: str) -> list[int]:
        language = language_among(language, self.languages, "text")
        if self.normalization == "nfc":
            # The rules in the model compose characters, but do not bring marks into their order.
            text = unicodedata.normalize("NFC", text)
        return self._encode(text, self._places[language])

    def decode(self, ids: Iterable[int]) -> str:
        """Runs of pieces of different languages are joined by a space."""
        pieces = [x for x in check_ids(ids, self.vocab_size) if x not in self._skipped]
        return " ".join(
            self._processors[position].decode(local) for position, local in self._runs(pieces)
        )

    def prompt(self, prompt: Prompt) -> list[int]:
        source, target = self.prompt_languages(prompt)
        names = (
            _START,
            f"<|{source}|>",
            f"<|{prompt.task}|>",
            f"<|{target}|>",
            _PUNCTUATION[prompt.punctuation],
        )
        return [self.specials[name] for name in names]

    def save(self, directory: str | Path) -> None:
        """Write one ``.model`` file per language, or that of all, and `METADATA_FILE`."""
        metadata: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "specials": list(self.specials),
            "sources": list(self.sources),
            "languages": {
                language: {"model": f"{self._names[place]}.model", "offset": self._offsets[place]}
                for language, place in self._places.items()
            },
        }
        if self.added:
            metadata["added"] = list(self.added)
        if self.normalization is not None:
            metadata["normalization"] = self.normalization
        if self.subsampling is not None:
            metadata["subsampling"] = self.subsampling
        self._write(directory, METADATA_FILE, metadata)

    @classmethod
    def load(cls, directory: str | Path) -> SentencePieceTokenizer:
        """Read what `save` wrote."""
        path = Path(directory) / METADATA_FILE
        metadata = read_metadata(path, "train the tokenizer again")
        files = {name: entry["model"] for name, entry in metadata["languages"].items()}
        shared = f"{SHARED}.model"
        sharing = [name for name, file in files.items() if file == shared]
        if sharing:
            files = {SHARED: shared, **{x: file for x, file in files.items() if file != shared}}
        models = read_models(path.parent, files, "copy it there")
        options = {name: metadata.get(name) for name in ("normalization", "subsampling")}
        tokenizer = cls(
            models, metadata["sources"], sharing=sharing, added=metadata.get("added", ()), **options
        )
        if list(tokenizer.specials) != metadata["specials"] or (
            tokenizer.vocab_size != metadata["vocab_size"]
        ):
            raise ValueError(
                f"{path}: its special tokens or its size ({metadata['vocab_size']}) are not those "
                f"of this version ({tokenizer.vocab_size}): train the tokenizer again."
            )
        return tokenizer


def model_file(language: str) -> str:
    """Return the name of the file of a language's model."""
    try:
        return plain_name(f"{language}.model", "the model")
    except ValueError as error:
        raise ValueError(
            f"`language` must be a name that a file can have, for its model, but is {language!r}: "
            "use a code such as en."
        ) from error


def read_metadata(path: Path, remedy: str) -> dict[str, Any]:
    """Return the metadata of an `AggregateTokenizer`."""
    try:
        metadata = read_json_object(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}.") from error
    if (version := metadata.get("version")) != _VERSION:
        raise ValueError(f"{path}: `version` must be {_VERSION}, but is {version!r}: {remedy}.")
    return metadata


def read_models(folder: Path, files: Mapping[str, str], remedy: str) -> dict[str, bytes]:
    """Serialised models, from their files by name."""
    for name, file in files.items():
        plain_name(file, f"the model of {name!r} in {folder}")
        if not (folder / file).is_file():
            raise ValueError(f"{folder / file}: the model of {name!r} is missing: {remedy}.")
    return {name: read_bytes(folder / file) for name, file in files.items()}


def load_processor(language: str, model: bytes) -> sentencepiece.SentencePieceProcessor:
    """Read a serialised SentencePiece model."""
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise ValueError(f"the model of {language!r} is no SentencePiece model.") from error
