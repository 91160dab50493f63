"""Checkpoints of ``CanaryForConditionalGeneration``, such as nvidia/canary-1b-v2's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from effasr.interop.export_checks import warn_about_parts
from effasr.interop.huggingface.config import (
    decoder_mapping,
    encoder_mapping,
    feature_mapping,
    read_decoder,
    read_encoder,
    read_features,
)
from effasr.interop.huggingface.files import (
    read_config,
    read_preprocessor,
    read_state,
    read_weights,
    special_ids,
    warn_about_training_options,
    write,
    write_json,
)
from effasr.interop.huggingface.parakeet import warn_about_layerdrop
from effasr.interop.huggingface.special_tokens import SpecialTokens
from effasr.interop.huggingface.weights import CANARY
from effasr.interop.weights import export_weights
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig

_CLASS = "CanaryForConditionalGeneration"


def import_canary(directory: str | Path) -> tuple[ModelConfig, int, dict[str, Tensor]]:
    """Read a directory; see `effasr.interop.huggingface.checkpoint.import_model`."""
    directory = Path(directory)
    mapping = read_config(directory, "canary")
    # transformers' own defaults where a Canary's file does not describe the encoder.
    fallback = {"num_hidden_layers": 32, "num_mel_bins": 128, "scale_input": False}
    encoder = mapping.get("encoder_config") or fallback
    tied = mapping.get("tie_word_embeddings", True)
    config = ModelConfig(
        features=read_features(read_preprocessor(directory), encoder.get("num_mel_bins", 80)),
        encoder=read_encoder(encoder),
        decoder=read_decoder(mapping.get("decoder_config") or {}, tie_embeddings=tied),
    )
    warn_about_layerdrop(encoder)
    weights = read_weights(directory)
    if tied:
        weights.pop("proj_out.weight", None)
    vocab_size = mapping.get("vocab_size", 16384)
    return config, vocab_size, read_state(config, vocab_size, weights, CANARY, directory)


def export_canary(
    model: ASRModel, directory: str | Path, tokens: SpecialTokens | None = None
) -> str:
    """Write a directory; see `effasr.interop.huggingface.checkpoint.export_model`."""
    tokens = SpecialTokens() if tokens is None else tokens
    generation: dict[str, Any] = special_ids(tokens, model.vocab_size)
    fields = decoder_mapping(model.config, model.vocab_size)
    decoder = model.config.decoder
    assert decoder is not None  # checked by decoder_mapping
    fields |= {key: generation[key] for key in generation if key != "decoder_start_token_id"}
    config = {
        "architectures": [_CLASS],
        "model_type": "canary",
        "encoder_config": encoder_mapping(model.config),
        "decoder_config": fields,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": decoder.tie_embeddings,
        "is_encoder_decoder": True,
        "dtype": "float32",
        **generation,
    }
    warn_about_parts(model.config, ("decoder",), "transformers' Canary")
    warn_about_training_options(model.config)
    parts = tuple(CANARY)
    state = {name: value for name, value in model.state_dict().items() if name.startswith(parts)}
    weights = export_weights(state, CANARY)
    # transformers' output layer always has a bias.
    weights.setdefault("proj_out.bias", torch.zeros(model.vocab_size))
    directory = write(directory, config, weights, feature_mapping(model.config.features))
    # transformers stops after 20 tokens by default.
    generation["max_length"] = decoder.max_positions
    if suppressed := [*decoder.suppress, *tokens.unused_classes(model.vocab_size)]:
        generation["suppress_tokens"] = suppressed
    if decoder.begin_suppress:
        generation["begin_suppress_tokens"] = list(decoder.begin_suppress)
    write_json(directory / "generation_config.json", generation)
    return _CLASS
