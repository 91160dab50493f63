"""Checkpoints of transformers' Canary, Parakeet and Whisper models, read and written without it.

The models are the same function: outputs, losses and gradients agree. Reading and writing need
only safetensors; transformers >= 5.23 loads what is written here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from effasr.interop.huggingface.config import (
    decoder_mapping,
    encoder_mapping,
    feature_mapping,
    read_decoder,
    read_encoder,
    read_features,
)
from effasr.interop.huggingface.files import (
    checked,
    read_config,
    read_preprocessor,
    read_weights,
    warn_about_layerdrop,
    warn_about_training_options,
    write,
    write_json,
)
from effasr.interop.huggingface.transducer import (
    export_parakeet_transducer,
    import_parakeet_transducer,
)
from effasr.interop.huggingface.weights import from_transformers, to_transformers
from effasr.interop.huggingface.whisper import export_whisper, import_whisper
from effasr.model.asr import ASRModel, ModelConfig
from effasr.model.whisper_encoder import TransformerEncoderConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecialTokens:
    """Tokens that transformers' generation must know; the defaults are canary-1b-v2's.

    Attributes:
        pad_id: Fills batches.
        bos_id: Begins a text.
        eos_id: Ends it.
        decoder_start_id: The first token of a prompt.
        count: Tokens that the tokenizer has; a model may have more classes, which generation then
            leaves out. None for as many as the model has.
        generation: What else ``generation_config.json`` is to say.
    """

    pad_id: int = 2
    bos_id: int = 4
    eos_id: int = 3
    decoder_start_id: int = 7
    count: int | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)


def import_model(directory: str | Path) -> tuple[ModelConfig, int, dict[str, Tensor]]:
    """Read a directory of any class that is known here, as its ``config.json`` names it.

    The classes are ``CanaryForConditionalGeneration``, ``WhisperForConditionalGeneration``,
    ``ParakeetForCTC``, ``ParakeetForRNNT`` and ``ParakeetForTDT``; see `import_canary`.
    """
    readers = {
        "whisper": import_whisper,
        "canary": import_canary,
        "parakeet_ctc": import_parakeet_ctc,
        "parakeet_rnnt": import_parakeet_transducer,
        "parakeet_tdt": import_parakeet_transducer,
    }
    return readers[read_config(Path(directory), *readers)["model_type"]](directory)


def export_model(
    model: ASRModel, directory: str | Path, tokens: SpecialTokens | None = None
) -> str:
    """Write a directory that transformers loads, of the first output that the model has.

    That is the decoder, else the transducer, else the CTC head. The others are left out with a
    warning; see `export_canary`.

    Returns:
        The class that loads it.
    """
    if isinstance(model.config.encoder, TransformerEncoderConfig):
        return export_whisper(model, directory, SpecialTokens() if tokens is None else tokens)
    if model.config.decoder is not None:
        export_canary(model, directory, tokens)
        return "CanaryForConditionalGeneration"
    if model.config.transducer is not None:
        tokens = SpecialTokens() if tokens is None else tokens
        return export_parakeet_transducer(model, directory, pad_id=tokens.pad_id)
    export_parakeet_ctc(model, directory)
    return "ParakeetForCTC"


def import_canary(directory: str | Path) -> tuple[ModelConfig, int, dict[str, Tensor]]:
    """Read a directory of ``CanaryForConditionalGeneration``, such as nvidia/canary-1b-v2's.

    Args:
        directory: Holds ``config.json``, ``model.safetensors`` or its shards with their index, and
            perhaps ``preprocessor_config.json`` or ``processor_config.json``.

    Returns:
        Configuration, vocabulary size and state for `ASRModel`; the weights are float32.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: It is another kind of model, or has an option or weights that are unknown here.
    """
    directory = Path(directory)
    mapping = read_config(directory, "canary")
    # transformers' own defaults for a Canary model that says nothing about its encoder.
    fallback = {"num_hidden_layers": 32, "num_mel_bins": 128, "scale_input": False}
    encoder = mapping.get("encoder_config") or fallback
    decoder = mapping.get("decoder_config") or {}
    tied = mapping.get("tie_word_embeddings", True)
    config = ModelConfig(
        features=read_features(read_preprocessor(directory), encoder.get("num_mel_bins", 80)),
        encoder=read_encoder(encoder),
        decoder=read_decoder(decoder, tie_embeddings=tied),
    )
    warn_about_layerdrop(encoder)
    weights = read_weights(directory)
    if tied:
        weights.pop("proj_out.weight", None)
    vocab_size = mapping.get("vocab_size", 16384)
    return config, vocab_size, checked(config, vocab_size, from_transformers(weights), directory)


def import_parakeet_ctc(directory: str | Path) -> tuple[ModelConfig, int, dict[str, Tensor]]:
    """Read a directory of ``ParakeetForCTC``; see `import_canary`.

    The vocabulary size returned does not count the blank, which must be the last class.
    """
    directory = Path(directory)
    mapping = read_config(directory, "parakeet_ctc")
    encoder = mapping.get("encoder_config") or {}
    classes, blank = mapping.get("vocab_size", 1025), mapping.get("pad_token_id", 1024)
    if blank != classes - 1:
        raise ValueError(
            f"`pad_token_id` must be the last class, {classes - 1}, as it is the blank, "
            f"but is {blank}."
        )
    config = ModelConfig(
        features=read_features(read_preprocessor(directory), encoder.get("num_mel_bins", 80)),
        encoder=read_encoder(encoder),
        decoder=None,
        ctc=True,
    )
    warn_about_layerdrop(encoder)
    state = from_transformers(read_weights(directory))
    return config, classes - 1, checked(config, classes - 1, state, directory)


def export_canary(
    model: ASRModel, directory: str | Path, tokens: SpecialTokens | None = None
) -> None:
    """Write a directory that ``CanaryForConditionalGeneration.from_pretrained`` loads.

    A CTC head, a transducer, a text encoder, SpecAugment, and dropouts that transformers has not
    are left out with a warning: they do not change what the exported model computes.

    Args:
        model: With a decoder.
        directory: Made if need be; files of the same names are replaced.
        tokens: The tokenizer's; canary-1b-v2's by default.

    Raises:
        ValueError: transformers cannot express the model; the message says why.
    """
    tokens = SpecialTokens() if tokens is None else tokens
    ids = {
        "pad_token_id": tokens.pad_id,
        "bos_token_id": tokens.bos_id,
        "eos_token_id": tokens.eos_id,
    }
    for name, token in {**ids, "decoder_start_token_id": tokens.decoder_start_id}.items():
        if not 0 <= token < model.vocab_size:
            raise ValueError(
                f"`{name}` must be in the vocabulary of {model.vocab_size}, but is {token}: "
                "pass the tokenizer's special tokens."
            )
    decoder = {**decoder_mapping(model.config, model.vocab_size), **ids}
    generation: dict[str, Any] = {**ids, "decoder_start_token_id": tokens.decoder_start_id}
    assert model.config.decoder is not None  # checked by decoder_mapping
    config = {
        "architectures": ["CanaryForConditionalGeneration"],
        "model_type": "canary",
        "encoder_config": encoder_mapping(model.config),
        "decoder_config": decoder,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.config.decoder.tie_embeddings,
        "is_encoder_decoder": True,
        "dtype": "float32",
        **generation,
    }
    others = ("ctc_head.", "transducer.", "text_encoder.")
    state = {
        name: value for name, value in model.state_dict().items() if not name.startswith(others)
    }
    if model.config.ctc:
        _log.warning("The CTC head is not exported: transformers' Canary has none.")
    if model.config.transducer is not None:
        _log.warning("The transducer is not exported: transformers' Canary has none.")
    if model.config.text_encoder is not None:
        _log.warning("The text encoder is not exported: transformers' Canary has none.")
    warn_about_training_options(model.config)
    weights = to_transformers(state)
    # transformers' output layer always has a bias.
    weights.setdefault("proj_out.bias", torch.zeros(model.vocab_size))
    directory = write(directory, config, weights, feature_mapping(model.config.features))
    count = model.vocab_size if tokens.count is None else tokens.count
    if count < model.vocab_size:
        generation["suppress_tokens"] = list(range(count, model.vocab_size))
    write_json(directory / "generation_config.json", generation)


def export_parakeet_ctc(model: ASRModel, directory: str | Path) -> None:
    """Write a directory that ``ParakeetForCTC.from_pretrained`` loads; see `export_canary`.

    Raises:
        ValueError: The model has no CTC head, or transformers cannot express it.
    """
    if not model.config.ctc:
        raise ValueError("`ctc` must be true for a Parakeet CTC model, but this one has no head.")
    config = {
        "architectures": ["ParakeetForCTC"],
        "model_type": "parakeet_ctc",
        "encoder_config": encoder_mapping(model.config),
        "vocab_size": model.vocab_size + 1,
        "pad_token_id": model.vocab_size,
        "dtype": "float32",
    }
    if model.config.decoder is not None:
        _log.warning("The decoder is not exported: transformers' Parakeet CTC has none.")
    if model.config.transducer is not None:
        _log.warning("The transducer is not exported: transformers' Parakeet CTC has none.")
    warn_about_training_options(model.config)
    parts = ("encoder.", "ctc_head.")
    state = {name: value for name, value in model.state_dict().items() if name.startswith(parts)}
    features = feature_mapping(model.config.features)
    write(directory, config, to_transformers(state), features)
