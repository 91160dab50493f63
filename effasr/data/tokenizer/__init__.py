"""Text to token ids and back."""

from __future__ import annotations

from pathlib import Path

from effasr.data.tokenizer.base import Tokenizer, UnknownLanguageError
from effasr.data.tokenizer.hugging_face import (
    TOKENIZER_FILE,
    CanaryTokenizer,
    HuggingFaceTokenizer,
    ParakeetTokenizer,
    load_hugging_face,
)
from effasr.data.tokenizer.nemo import NEMO_FILE, NeMoTokenizer
from effasr.data.tokenizer.sentence_piece import METADATA_FILE, SentencePieceTokenizer
from effasr.data.tokenizer.training import train_tokenizer
from effasr.data.tokenizer.whisper import VOCABULARY_FILE, WhisperTokenizer

__all__ = [
    "CanaryTokenizer",
    "HuggingFaceTokenizer",
    "NeMoTokenizer",
    "ParakeetTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "UnknownLanguageError",
    "WhisperTokenizer",
    "load_hugging_face",
    "load_tokenizer",
    "train_tokenizer",
]


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Read a tokenizer: ours, NeMo's, or a folder with Hugging Face's ``tokenizer.json``.

    Raises:
        ValueError: The folder holds none, or its files are broken.
    """
    folder = Path(directory)
    if (folder / METADATA_FILE).is_file():
        return SentencePieceTokenizer.load(folder)
    if (folder / NEMO_FILE).is_file():
        return NeMoTokenizer.load(folder)
    if (folder / TOKENIZER_FILE).is_file() or (folder / VOCABULARY_FILE).is_file():
        return load_hugging_face(folder)
    raise ValueError(
        f"{folder}: holds neither {METADATA_FILE} nor {TOKENIZER_FILE}: train a tokenizer with "
        "`effasr tokenizer MANIFEST OUT`."
    )
