"""Checkpoints of transformers' Whisper models, read and written without it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from effasr.interop.huggingface.config import reader
from effasr.interop.huggingface.files import (
    checked,
    read_config,
    read_generation,
    read_preprocessor,
    read_weights,
    warn_about_training_options,
    write,
    write_json,
)
from effasr.interop.huggingface.whisper_config import (
    WHISPER_CLASS,
    WHISPER_DEFAULTS,
    WHISPER_FIXED,
    read_whisper_features,
    whisper_feature_mapping,
    whisper_mapping,
)
from effasr.interop.huggingface.whisper_weights import OUTPUT_WEIGHT, from_whisper, to_whisper
from effasr.model.asr import ASRModel, ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.whisper_encoder import TransformerEncoderConfig
from effasr.nn.positions import whisper_sinusoids

if TYPE_CHECKING:
    from effasr.interop.huggingface.checkpoint import SpecialTokens

_log = logging.getLogger(__name__)

_UNUSED = {
    "encoder_layerdrop": "`encoder_layerdrop`",
    "decoder_layerdrop": "`decoder_layerdrop`",
    "apply_spec_augment": "SpecAugment as transformers has it (`model.augment` is ours)",
}
_TABLE = "model.encoder.embed_positions.weight"
_TABLE_ERROR = 2e-4
"""Of float32 sinusoids of angles up to 1500."""


def import_whisper(directory: str | Path) -> tuple[ModelConfig, int, dict[str, Tensor]]:
    """Read a directory of ``WhisperForConditionalGeneration``, such as openai/whisper-small's.

    Utterances are followed by silence up to the 30 s that such models were trained with, as
    ``features.minimum_s`` says. The tokens that generation suppresses are the decoder's
    ``suppress`` and ``begin_suppress``.

    Args:
        directory: Holds ``config.json``, ``model.safetensors`` or its shards with their index, and
            perhaps ``preprocessor_config.json`` and ``generation_config.json``.

    Returns:
        Configuration, vocabulary size and state for `ASRModel`; the weights are float32.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: It is another kind of model, or has an option or weights that are unknown here.
    """
    directory = Path(directory)
    mapping = read_config(directory, "whisper")
    get = reader("config", mapping, WHISPER_DEFAULTS, WHISPER_FIXED)
    for name, text in _UNUSED.items():
        if mapping.get(name):
            _log.warning("%s is not used in training here.", text)
    # Older checkpoints have no file of their own for what generation must know.
    generation = read_generation(directory) or mapping
    dropouts: dict[str, Any] = {
        "input_dropout": float(get("dropout")),
        "residual_dropout": float(get("dropout")),
        "activation_dropout": float(get("activation_dropout")),
        "attention_dropout": float(get("attention_dropout")),
    }
    weights = read_weights(directory)
    is_learnt = _is_learnt(weights.get(_TABLE))
    if is_learnt:
        _log.warning(
            "The places of the encoder's frames are no sinusoids, but were learnt, as when some "
            "versions of transformers fine-tune; they are trained on here "
            "(training.freeze=[encoder.embed_positions] keeps them)."
        )
    config = ModelConfig(
        features=read_whisper_features(
            read_preprocessor(directory), get("num_mel_bins"), get("max_source_positions")
        ),
        encoder=TransformerEncoderConfig(
            width=get("d_model"),
            layers=get("encoder_layers"),
            heads=get("encoder_attention_heads"),
            feed_forward=get("encoder_ffn_dim"),
            max_frames=get("max_source_positions"),
            positions="learned" if is_learnt else "sinusoidal",
            **dropouts,
        ),
        decoder=DecoderConfig(
            width=get("d_model"),
            layers=get("decoder_layers"),
            heads=get("decoder_attention_heads"),
            feed_forward=get("decoder_ffn_dim"),
            max_positions=get("max_target_positions"),
            positions="learned",
            activation="gelu",
            embedding_norm=False,
            key_bias=False,
            output_bias=False,
            tie_embeddings=get("tie_word_embeddings"),
            suppress=tuple(generation.get("suppress_tokens") or ()),
            begin_suppress=tuple(generation.get("begin_suppress_tokens") or ()),
            **dropouts,
        ),
    )
    if not is_learnt:
        weights.pop(_TABLE, None)
    if get("tie_word_embeddings"):
        weights.pop(OUTPUT_WEIGHT, None)
    vocab_size = get("vocab_size")
    return config, vocab_size, checked(config, vocab_size, from_whisper(weights), directory)


def export_whisper(model: ASRModel, directory: str | Path, tokens: SpecialTokens) -> str:
    """Write a directory that ``WhisperForConditionalGeneration.from_pretrained`` loads.

    What does not change what the model computes, and transformers has not, is left out with a
    warning. So is one that was trained without silence: transformers always adds it.

    Args:
        model: With a Transformer encoder and a decoder.
        directory: Made if need be; files of the same names are replaced.
        tokens: The tokenizer's.

    Returns:
        The class that loads it.

    Raises:
        ValueError: transformers cannot express the model; the message says why.
    """
    config, features = whisper_mapping(model.config), whisper_feature_mapping(model.config)
    ids = {
        "pad_token_id": tokens.pad_id,
        # As in published models, nothing reads it.
        "bos_token_id": tokens.eos_id,
        "eos_token_id": tokens.eos_id,
        "decoder_start_token_id": tokens.decoder_start_id,
    }
    config |= {"vocab_size": model.vocab_size, **ids}
    encoder, decoder = model.config.encoder, model.config.decoder
    assert isinstance(encoder, TransformerEncoderConfig)  # checked by whisper_mapping
    assert decoder is not None
    if model.config.features.framing.minimum < encoder.max_frames:
        _log.warning(
            "The model was trained with `features.minimum_s` = %g, but transformers pads every "
            "utterance to %g s, which may cost accuracy: evaluate what is exported.",
            model.config.features.minimum_s,
            features["chunk_length"],
        )
    for name, part in (
        ("CTC head", model.ctc_head),
        ("transducer", model.transducer),
        ("text encoder", model.text_encoder),
    ):
        if part is not None:
            _log.warning("The %s is not exported: transformers' Whisper has none.", name)
    _warn_about_dropouts(model.config)
    warn_about_training_options(model.config, dropouts=False)
    parts = ("encoder.", "decoder.")
    state = {name: value for name, value in model.state_dict().items() if name.startswith(parts)}
    weights = to_whisper(state)
    if encoder.positions == "sinusoidal":
        weights[_TABLE] = whisper_sinusoids(torch.arange(encoder.max_frames), encoder.width)
    directory = write(directory, config, weights, features)
    count = model.vocab_size if tokens.count is None else tokens.count
    beyond = range(count, model.vocab_size)
    generation = {
        "max_length": decoder.max_positions,
        "suppress_tokens": [*decoder.suppress, *beyond],
        "begin_suppress_tokens": list(decoder.begin_suppress),
        "return_timestamps": False,
        **ids,
        **tokens.generation,
    }
    write_json(directory / "generation_config.json", generation)
    return WHISPER_CLASS


def _is_learnt(table: Tensor | None) -> bool:
    """Whether a table of places is another than Whisper's sinusoids."""
    if table is None:
        return False
    error = max(_TABLE_ERROR, 2 * torch.finfo(table.dtype).eps)
    expected = whisper_sinusoids(torch.arange(len(table)), table.shape[1])
    return bool((table.float() - expected).abs().max() > error)


def _warn_about_dropouts(config: ModelConfig) -> None:
    names = "residual_dropout", "activation_dropout", "attention_dropout"
    encoder, decoder = config.encoder, config.decoder
    differ = [name for name in names if getattr(encoder, name) != getattr(decoder, name)]
    for name, part in (("encoder", encoder), ("decoder", decoder)):
        if part is not None and part.input_dropout != part.residual_dropout:
            differ.append(f"{name}.input_dropout")
    if differ:
        _log.warning(
            "transformers has one dropout where encoder and decoder differ here, in %s: that of "
            "the decoder's modules is exported.",
            ", ".join(differ),
        )
