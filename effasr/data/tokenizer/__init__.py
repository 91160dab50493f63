"""Tokenizers: text to token ids and back."""

from pathlib import Path

from effasr.data.languages import UnknownLanguageError
from effasr.data.tokenizer.base import (
    NO_TOKENIZER_FILE,
    NoTokenizer,
    TimestampTokens,
    Tokenizer,
)
from effasr.data.tokenizer.chat import ChatTokenizer, has_template
from effasr.data.tokenizer.hugging_face import (
    TOKENIZER_FILE,
    VOCABULARY_FILE,
    CanaryTokenizer,
    CharacterTokenizer,
    HuggingFaceTokenizer,
    ParakeetTokenizer,
    SentenceTokenizer,
    WhisperTokenizer,
    find_blank,
    has_characters,
    has_sentences,
    is_whisper,
    read_tokenizer_json,
)
from effasr.data.tokenizer.nemo import NEMO_FILE, NeMoTokenizer
from effasr.data.tokenizer.sentence_piece import (
    METADATA_FILE,
    SentencePieceTokenizer,
    train_tokenizer,
)
from effasr.untrusted.documents import WRONG_VALUES
from effasr.untrusted.remote import localized

__all__ = [
    "CanaryTokenizer",
    "CharacterTokenizer",
    "ChatTokenizer",
    "HuggingFaceTokenizer",
    "NeMoTokenizer",
    "NoTokenizer",
    "ParakeetTokenizer",
    "SentencePieceTokenizer",
    "TimestampTokens",
    "Tokenizer",
    "UnknownLanguageError",
    "WhisperTokenizer",
    "load_hugging_face",
    "load_tokenizer",
    "train_tokenizer",
]


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Read a tokenizer: ours, NeMo's, or a folder with Hugging Face's ``tokenizer.json``."""
    folder = localized(directory, whole=True)
    if (folder / NO_TOKENIZER_FILE).is_file():
        return NoTokenizer()
    for name, kind in ((METADATA_FILE, SentencePieceTokenizer), (NEMO_FILE, NeMoTokenizer)):
        if (folder / name).is_file():
            try:
                return kind.load(folder)
            except WRONG_VALUES as error:
                raise ValueError(
                    f"{folder / name}: a value is missing or of a wrong kind "
                    f"({type(error).__name__}: {error}): copy the folder again."
                ) from error
    if (folder / TOKENIZER_FILE).is_file() or (folder / VOCABULARY_FILE).is_file():
        return load_hugging_face(folder)
    raise ValueError(
        f"{folder}: holds neither {METADATA_FILE} nor {TOKENIZER_FILE}: train a tokenizer with "
        "`effasr tokenizer MANIFEST OUT`."
    )


def load_hugging_face(
    directory: str | Path, language: str | None = None
) -> HuggingFaceTokenizer | CharacterTokenizer:
    """Read the ``tokenizer.json`` of a chat model, a Whisper, a Parakeet, an omniASR or a Canary.

    A chat model has a chat template, and a Parakeet has a blank. A wav2vec 2.0 has a ``vocab.json``
    alone, in which MMS has a vocabulary for each ``language``.
    """
    if has_characters(Path(directory)):
        return CharacterTokenizer(directory, language)
    path = Path(directory) / TOKENIZER_FILE
    vocabulary = read_tokenizer_json(path).get_vocab(with_added_tokens=True)
    if is_whisper(vocabulary):
        return WhisperTokenizer(directory)
    if has_template(Path(directory)):
        return ChatTokenizer(directory)
    if find_blank(vocabulary) is not None:
        return ParakeetTokenizer(directory)
    return (SentenceTokenizer if has_sentences(vocabulary) else CanaryTokenizer)(directory)
