"""Tokenizers of several SentencePiece models, among them those that effasr trains."""

import io
import json
import re
import tempfile
import unicodedata
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate, chain, groupby
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
    def extended(self, models: Mapping[str, bytes]) -> "AggregateTokenizer":
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

    def extended(self, models: Mapping[str, bytes]) -> "SentencePieceTokenizer":
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
    def load(cls, directory: str | Path) -> "SentencePieceTokenizer":
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
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise ValueError(f"the model of {language!r} is no SentencePiece model.") from error


# Trains SentencePiece vocabularies, one per language or one for all.


ModelType = Literal["unigram", "bpe"]
NORMALIZATIONS: tuple[Normalization, ...] = ("identity", "nfc", "nfkc")

_MAX_SENTENCES = 2_000_000
# A fixed number, not the machine's: the sums of the training depend on it.
_THREADS = 4


class VocabularyTooSmall(ValueError):
    """A vocabulary cannot hold the characters of a language."""

    def __init__(self, language: str, vocab_size: int, needed: int) -> None:
        super().__init__(
            f"`vocab_size` must be at least {needed}, the characters of {language!r}, "
            f"but is {vocab_size}: raise it, or clean the transcripts of rare characters."
        )
        self.needed = needed


def train_tokenizer(
    texts_by_language: Mapping[str, Iterable[str]],
    out: str | Path,
    *,
    vocab_size: int | Mapping[str, int] = 1024,
    model_type: ModelType = "unigram",
    normalization: Normalization = "nfc",
    byte_fallback: bool = False,
    coverage: float = 1.0,
    sources: Sequence[str] = (),
    shared: bool = False,
    subsampling: int | None = None,
    extend: Tokenizer | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> AggregateTokenizer:
    """Train a vocabulary for each language, or one for all, and write them together.

    With ``extend``, the languages are added to that tokenizer, whose ids and normalization stay.

    The same texts in the same order give the same files. Of more than two million texts a
    fixed random part is used. ``subsampling``, that of the models which the sizes are for, is
    stored.
    """
    check(texts_by_language, "texts_by_language", "name at least one language", "empty")
    base = None if extend is None else _check_extends(extend, texts_by_language, sources)
    if base is not None:
        normalization = base.normalization or normalization
    options: dict[str, Any] = {
        "normalization": normalization, "byte_fallback": byte_fallback, "coverage": coverage
    }  # fmt: skip
    stored: dict[str, Any] = {"normalization": normalization, "subsampling": subsampling}
    if shared:
        if not isinstance(vocab_size, int):
            raise ValueError(
                "`vocab_size` must be one number for a shared model, but is by language: "
                f"{dict(vocab_size)}."
            )
        texts = chain.from_iterable(texts_by_language[name] for name in sorted(texts_by_language))
        model = train_model(SHARED, texts, vocab_size, model_type, **options)
        tokenizer = SentencePieceTokenizer(
            {SHARED: model}, sources, sharing=sorted(texts_by_language), **stored
        )
        tokenizer.save(out)
        return tokenizer
    for language in texts_by_language:
        model_file(language)
    models = {}
    for done, language in enumerate(sorted(texts_by_language)):
        progress(done, len(texts_by_language))
        models[language] = train_model(
            language,
            texts_by_language[language],
            vocab_size if isinstance(vocab_size, int) else vocab_size[language],
            model_type,
            **options,
        )
    if base is None:
        base = SentencePieceTokenizer(models, sources, **stored)
    else:
        base = base.extended(models)
    base.save(out)
    return base


def _check_extends(
    tokenizer: Tokenizer, languages: Iterable[str], spoken: Iterable[str]
) -> AggregateTokenizer:
    if not isinstance(tokenizer, AggregateTokenizer):
        raise ValueError(
            "`extend` must be a tokenizer of `effasr tokenizer`, or NeMo's with a model for each "
            f"language, but is a {type(tokenizer).__name__}, whose ids have no place for another "
            "language: train a new tokenizer, and name it as data.tokenizer beside init_from."
        )
    known = ", ".join(sorted({*tokenizer.languages, *tokenizer.sources}.intersection(languages)))
    rule = "be a tokenizer that lacks the languages of the texts"
    remedy = "leave out their manifests, or name another language by --language"
    check(not known, "extend", rule, f"one with {known}", remedy)
    missing = ", ".join(sorted(set(spoken).difference(tokenizer.sources)))
    rule = "be a tokenizer that has all languages that are spoken and not written"
    check(not missing, "extend", rule, f"one without {missing}", "add texts of it")
    return tokenizer


def train_model(
    language: str,
    texts: Iterable[str],
    vocab_size: int,
    model_type: ModelType,
    *,
    normalization: Normalization = "nfc",
    byte_fallback: bool = False,
    coverage: float = 1.0,
) -> bytes:
    """Train a SentencePiece model of one language, and return it serialised."""
    lines = (line for text in texts if (line := " ".join(text.split())))
    first = next(lines, None)
    if first is None:
        raise ValueError(f"`texts_by_language[{language!r}]` must hold text, but is empty.")

    def all_lines() -> Iterator[str]:
        yield first
        yield from lines

    rule = "be from 0.9 to 1, the share of characters in pieces"
    check(0.9 <= coverage <= 1, "coverage", rule, f"{coverage:g}", "1 leaves out none")
    model = io.BytesIO()
    sentencepiece.set_random_generator_seed(0)
    try:
        with _rules(normalization) as rules:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=all_lines(),
                model_writer=model,
                vocab_size=vocab_size,
                model_type=model_type,
                byte_fallback=byte_fallback,
                character_coverage=coverage,
                **rules,
                # A corpus too small for so many pieces gets fewer, not an error.
                hard_vocab_limit=False,
                input_sentence_size=_MAX_SENTENCES,
                max_sentence_length=1 << 16,
                num_threads=_THREADS,
                unk_id=0,
                bos_id=-1,
                eos_id=-1,
                pad_id=-1,
                minloglevel=2,
            )
    except RuntimeError as error:
        needed = re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error))
        if needed is None:
            raise ValueError(f"SentencePiece cannot train {language!r}: {error}") from error
        raise VocabularyTooSmall(language, vocab_size, int(needed[1])) from error
    return _without_paths(model.getvalue())


def _without_paths(model: bytes) -> bytes:
    """Return a model without the name of a temporary file, which differs each time."""
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2.ModelProto.FromString(model)  # type: ignore[attr-defined]
    proto.normalizer_spec.ClearField("normalization_rule_tsv")
    return proto.SerializeToString(deterministic=True)


@contextmanager
def _rules(normalization: Normalization) -> Iterator[dict[str, Any]]:
    """Give SentencePiece's option: its default, nmt_nfkc, has spaces in place of joiners."""
    rule = f"be one of {', '.join(NORMALIZATIONS)}"
    check(normalization in NORMALIZATIONS, "normalization", rule, repr(normalization))
    if normalization != "nfc":
        yield {"normalization_rule_name": normalization}
        return
    # It has no rules of NFC itself.
    with tempfile.NamedTemporaryFile("w", suffix=".tsv", encoding="ascii") as file:
        file.write(_nfc_rules())
        file.flush()
        yield {"normalization_rule_tsv": file.name}


@cache
def _nfc_rules() -> str:
    """Return lines of what NFC composes: characters in hexadecimal, before and after."""
    rules = {}
    for code in range(0x110000):
        character = chr(code)
        is_hangul = 0xAC00 <= code <= 0xD7A3
        decomposition = unicodedata.decomposition(character)
        if not is_hangul and (not decomposition or decomposition.startswith("<")):
            continue
        composed = unicodedata.normalize("NFC", character)
        if composed != character:
            rules[character] = composed
            continue
        parts = unicodedata.normalize("NFD", character)
        for end in range(1, len(parts)):
            rules[unicodedata.normalize("NFC", parts[:end]) + parts[end:]] = character
    lines = (f"{_hexadecimal(text)}\t{_hexadecimal(rules[text])}\n" for text in sorted(rules))
    return "".join(lines)


def _hexadecimal(text: str) -> str:
    return " ".join(f"{ord(character):X}" for character in text)
