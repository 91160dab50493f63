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
from effasr.data.tokenizer.sentence_piece import METADATA_FILE, SentencePieceTokenizer
from effasr.data.tokenizer.training import train_tokenizer

__all__ = [
    "CanaryTokenizer",
    "HuggingFaceTokenizer",
    "ParakeetTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "UnknownLanguageError",
    "load_hugging_face",
    "load_tokenizer",
    "train_tokenizer",
]


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """Read a tokenizer: ours, or a folder with Hugging Face's ``tokenizer.json``.

    Raises:
        ValueError: The folder holds neither, or its files are broken.
    """
    folder = Path(directory)
    if (folder / METADATA_FILE).is_file():
        return SentencePieceTokenizer.load(folder)
    if (folder / TOKENIZER_FILE).is_file():
        return load_hugging_face(folder)
    raise ValueError(
        f"{folder}: holds neither {METADATA_FILE} nor {TOKENIZER_FILE}: train a tokenizer with "
        "`effasr tokenizer MANIFEST OUT`."
    )
