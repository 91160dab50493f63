"""Checkpoints of transformers' Canary, Parakeet and Whisper models, read and written without it.

The models are the same functions: outputs, losses and gradients agree. Reading and writing need
only safetensors; transformers >= 5.23 loads what is written here.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from effasr.interop.export_checks import refuse_experts
from effasr.interop.huggingface.canary import export_canary, import_canary
from effasr.interop.huggingface.files import read_config
from effasr.interop.huggingface.parakeet import (
    export_parakeet_ctc,
    export_parakeet_transducer,
    import_parakeet_ctc,
    import_parakeet_transducer,
)
from effasr.interop.huggingface.special_tokens import SpecialTokens
from effasr.interop.huggingface.whisper import export_whisper, import_whisper
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.whisper_encoder import WhisperEncoderConfig
from effasr.untrusted.documents import WRONG_VALUES

_READERS = {
    "whisper": import_whisper,
    "canary": import_canary,
    "parakeet_ctc": import_parakeet_ctc,
    "parakeet_rnnt": import_parakeet_transducer,
    "parakeet_tdt": import_parakeet_transducer,
}


def import_model(directory: str | Path) -> tuple[ModelConfig, int, dict[str, Tensor]]:
    """Read a model directory of transformers, of the class that ``config.json`` names.

    The classes are ``CanaryForConditionalGeneration``, ``WhisperForConditionalGeneration``,
    ``ParakeetForCTC``, ``ParakeetForRNNT`` and ``ParakeetForTDT``.

    Args:
        directory: Holds ``config.json``, ``model.safetensors`` or its shards with their index, and
            perhaps ``preprocessor_config.json`` or ``processor_config.json``.

    Returns:
        Configuration, vocabulary size and state for `ASRModel`; the weights are float32. The
        vocabulary size does not count a blank, which must be the last class.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: It is another kind of model, or has an option or weights that are unknown here.
    """
    model_type = read_config(Path(directory), *_READERS)["model_type"]
    try:
        return _READERS[model_type](directory)
    except WRONG_VALUES as error:
        raise ValueError(
            f"{directory}: a value of its configuration or a weight is of a wrong kind "
            f"({type(error).__name__}: {error}): copy the folder again."
        ) from error


def export_model(
    model: ASRModel, directory: str | Path, tokens: SpecialTokens | None = None
) -> str:
    """Write a directory that transformers loads, of the first output that the model has.

    That is the decoder, else the transducer, else the CTC head. Other parts, SpecAugment and
    training options that transformers does not have are left out with a warning: they do not change
    what the exported model computes.

    Args:
        model: The model to export.
        directory: Created if needed; files of the same names are replaced.
        tokens: The tokenizer's special tokens; canary-1b-v2's by default.

    Returns:
        The class that loads it.

    Raises:
        ValueError: transformers cannot express the model; the message says why.
    """
    tokens = SpecialTokens() if tokens is None else tokens
    refuse_experts(model.config, "transformers")
    if isinstance(model.config.encoder, WhisperEncoderConfig):
        return export_whisper(model, directory, tokens)
    if model.config.decoder is not None:
        return export_canary(model, directory, tokens)
    if model.config.transducer is not None:
        return export_parakeet_transducer(model, directory, pad_id=tokens.pad_id)
    return export_parakeet_ctc(model, directory)
