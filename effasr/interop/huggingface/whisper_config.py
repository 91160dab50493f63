"""Configurations of Whisper: this project's, and transformers' JSON files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from effasr.data.features.config import FeatureConfig
from effasr.interop.export_checks import refuse
from effasr.interop.huggingface.fields import Fields
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.whisper_encoder import WhisperEncoderConfig

WHISPER_CLASS = "WhisperForConditionalGeneration"

_log = logging.getLogger(__name__)

_FIXED = {"activation_function": "gelu", "scale_embedding": False}
_DROPOUTS = {
    "input_dropout": ("dropout", 0.0),
    "residual_dropout": ("dropout", 0.0),
    "attention_dropout": ("attention_dropout", 0.0),
    "activation_dropout": ("activation_dropout", 0.0),
}
_ENCODER = Fields(
    "config",
    {
        "width": ("d_model", 384),
        "layers": ("encoder_layers", 4),
        "heads": ("encoder_attention_heads", 6),
        "feed_forward": ("encoder_ffn_dim", 1_536),
        "max_frames": ("max_source_positions", 1_500),
        **_DROPOUTS,
    },
    _FIXED,
)
_DECODER = Fields(
    "config",
    {
        "width": ("d_model", 384),
        "layers": ("decoder_layers", 4),
        "heads": ("decoder_attention_heads", 6),
        "feed_forward": ("decoder_ffn_dim", 1_536),
        "max_positions": ("max_target_positions", 448),
        "tie_embeddings": ("tie_word_embeddings", True),
        **_DROPOUTS,
    },
    _FIXED,
)
_FEATURES = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "sampling_rate": 16_000,
    "hop_length": 160,
    "n_fft": 400,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": False,
}


def read_whisper(
    mapping: Mapping[str, Any],
    preprocessor: Mapping[str, Any],
    generation: Mapping[str, Any],
    *,
    learned_positions: bool,
) -> ModelConfig:
    """Read a ``WhisperConfig`` with its feature extractor and its generation settings.

    Args:
        mapping: Content of ``config.json``.
        preprocessor: Content of ``preprocessor_config.json``; empty if there is none.
        generation: Content of ``generation_config.json``; an older checkpoint has the fields in
            ``config.json``.
        learned_positions: Whether the encoder's table of positions is learned.

    Raises:
        ValueError: It has an option that is not supported here, or the two do not fit.
    """
    encoder = WhisperEncoderConfig(
        **_ENCODER.read(mapping), positions="learned" if learned_positions else "sinusoidal"
    )
    most = generation.get("max_initial_timestamp_index")
    decoder = DecoderConfig(
        **_DECODER.read(mapping),
        positions="learned",
        activation="gelu",
        embedding_norm=False,
        key_bias=False,
        output_bias=False,
        suppress=tuple(generation.get("suppress_tokens") or ()),
        begin_suppress=tuple(generation.get("begin_suppress_tokens") or ()),
        max_initial_timestamp=most if isinstance(most, int) else None,
    )
    return ModelConfig(
        features=_read_features(preprocessor, mapping.get("num_mel_bins", 80), encoder.max_frames),
        encoder=encoder,
        decoder=_with_alignment_heads(decoder, generation.get("alignment_heads")),
    )


def _with_alignment_heads(decoder: DecoderConfig, heads: Any) -> DecoderConfig:
    """Add alignment heads, or warn where they are those of another model, such as a larger one."""
    try:
        return replace(decoder, alignment_heads=tuple((int(x), int(y)) for x, y in heads or ()))
    except (TypeError, ValueError, OverflowError):
        _log.warning(
            "`alignment_heads` of generation_config.json is not exported again, as it does not "
            "name layers and heads of the decoder: transformers will have no word timestamps."
        )
        return decoder


def _read_features(mapping: Mapping[str, Any], mel_bins: int, max_frames: int) -> FeatureConfig:
    seconds = max_frames / 50
    # transformers itself refuses features of another length.
    fixed = {"sampling_rate": 16_000, "hop_length": 160, "n_fft": 400}
    fixed |= {"feature_size": mel_bins, "chunk_length": seconds}
    Fields("preprocessor_config", {}, fixed).read(mapping)
    return FeatureConfig(
        kind="whisper",
        sample_rate=16_000,
        subsampling=2,
        minimum_s=seconds,
        mel_bins=mel_bins,
        n_fft=400,
        window=400,
        hop=160,
        preemphasis=0.0,
        normalize=False,
    )


def whisper_mapping(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of a ``WhisperConfig``, without those of the vocabulary.

    Raises:
        ValueError: transformers cannot express the model; the message lists all reasons.
    """
    encoder, decoder = config.encoder, config.decoder
    if decoder is None or not isinstance(encoder, WhisperEncoderConfig):
        raise ValueError(
            "`decoder` must be given for a Whisper model, but is null: transformers has no CTC "
            "model with an encoder of kind transformer. Export ONNX graphs instead."
        )
    refuse(
        "transformers",
        {
            f"decoder.width={decoder.width}, not encoder.width={encoder.width}": (
                decoder.width != encoder.width
            ),
            f"decoder.head_dim={decoder.head_dim}": (
                decoder.head_width * decoder.heads != decoder.width
            ),
            f"decoder.positions={decoder.positions}": decoder.positions != "learned",
            f"decoder.activation={decoder.activation}": decoder.activation != "gelu",
            "decoder.embedding_norm=true": decoder.embedding_norm,
            "decoder.output_bias=true": decoder.output_bias,
            "encoder.bias=false or decoder.bias=false": not (encoder.bias and decoder.bias),
            "encoder.key_bias=true or decoder.key_bias=true": (
                encoder.key_bias or decoder.key_bias
            ),
            f"features.kind={config.features.kind}": config.features.kind != "whisper",
        },
    )
    return {
        "architectures": [WHISPER_CLASS],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "num_mel_bins": config.features.mel_bins,
        "num_hidden_layers": encoder.layers,
        "dtype": "float32",
        **_ENCODER.write(encoder),
        # If both have a field, the decoder's value is exported.
        **_DECODER.write(decoder),
    }


def whisper_feature_mapping(config: ModelConfig) -> dict[str, Any]:
    """Return the content of ``preprocessor_config.json``.

    Raises:
        ValueError: transformers has no such features.
    """
    features, encoder = config.features, config.encoder
    assert isinstance(encoder, WhisperEncoderConfig)  # checked by whisper_mapping
    samples = encoder.max_frames * features.framing.samples
    seconds, rest = divmod(samples, features.sample_rate)
    only = {"sample_rate": 16_000, "hop": 160, "n_fft": 400}
    reasons = {f"encoder.max_frames={encoder.max_frames}, not whole seconds": rest != 0}
    for name, value in only.items():
        given = getattr(features, name)
        reasons[f"features.{name}={given} (only {value})"] = given != value
    refuse("transformers", reasons)
    return {
        **_FEATURES,
        "feature_size": features.mel_bins,
        "chunk_length": seconds,
        "n_samples": samples,
        "nb_max_frames": samples // features.hop,
        "processor_class": "WhisperProcessor",
    }
