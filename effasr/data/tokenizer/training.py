"""Trains SentencePiece vocabularies, one per language or one for all."""

import io
import re
import tempfile
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import sentencepiece

from effasr.checks import check
from effasr.data.tokenizer.base import Tokenizer
from effasr.data.tokenizer.sentence_piece import (
    SHARED,
    AggregateTokenizer,
    Normalization,
    SentencePieceTokenizer,
    model_file,
)

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
    lines = _lines(texts)
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


def _lines(texts: Iterable[str]) -> Iterator[str]:
    return (line for text in texts if (line := " ".join(text.split())))


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
