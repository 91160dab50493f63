"""Configurations of Canary and Parakeet: this project's, and transformers' JSON files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from effasr.data.features.config import FeatureConfig
from effasr.interop.export_checks import refuse
from effasr.interop.huggingface.fields import Fields
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.transducer import TransducerConfig

_ENCODER = Fields(
    "encoder_config",
    {
        "width": ("hidden_size", 1024),
        "layers": ("num_hidden_layers", 24),
        "heads": ("num_attention_heads", 8),
        "feed_forward": ("intermediate_size", 4096),
        "conv_kernel": ("conv_kernel_size", 9),
        "subsampling": ("subsampling_factor", 8),
        "subsampling_channels": ("subsampling_conv_channels", 256),
        "scale_input": ("scale_input", True),
        "bias": ("attention_bias", True),
        "convolution_bias": ("convolution_bias", True),
        "input_dropout": ("dropout", 0.1),
        "activation_dropout": ("activation_dropout", 0.1),
        "attention_dropout": ("attention_dropout", 0.1),
        "position_dropout": ("dropout_positions", 0.0),
    },
    {
        "hidden_act": "silu",
        "subsampling_conv_kernel_size": 3,
        "subsampling_conv_stride": 2,
    },
    {"subsampling_factor": (4, 8)},
)
_DECODER = Fields(
    "decoder_config",
    {
        "width": ("hidden_size", 1024),
        "layers": ("num_hidden_layers", 8),
        "heads": ("num_attention_heads", 8),
        "head_dim": ("head_dim", 128),
        "feed_forward": ("intermediate_size", 4096),
        "max_positions": ("max_position_embeddings", 1024),
        "bias": ("attention_bias", True),
        "attention_dropout": ("attention_dropout", 0.0),
    },
    {"hidden_act": "relu"},
)
_TRANSDUCER = Fields(
    "config",
    {
        "width": ("decoder_hidden_size", 640),
        "layers": ("num_decoder_layers", 2),
        "activation": ("hidden_act", "relu"),
    },
)
_DURATIONS = (0, 1, 2, 3, 4)
_FEATURES = Fields(
    "preprocessor_config",
    {
        "sample_rate": ("sampling_rate", 16_000),
        "n_fft": ("n_fft", 512),
        "window": ("win_length", 400),
        "hop": ("hop_length", 160),
        "preemphasis": ("preemphasis", 0.97),
    },
)


def read_encoder(mapping: Mapping[str, Any]) -> FastConformerConfig:
    """Read a ``ParakeetEncoderConfig``.

    Raises:
        ValueError: It has an option that this encoder does not support.
    """
    return FastConformerConfig(**_ENCODER.read(mapping))


def read_decoder(mapping: Mapping[str, Any], *, tie_embeddings: bool) -> DecoderConfig:
    """Read a ``CanaryDecoderConfig``.

    Raises:
        ValueError: It has an option that this decoder does not support.
    """
    values = _DECODER.read(mapping)
    if mapping.get("num_key_value_heads") not in (None, values["heads"]):
        raise ValueError(
            f"`decoder_config.num_key_value_heads` must be {values['heads']}, as "
            f"`num_attention_heads` is, but is {mapping['num_key_value_heads']}: grouped queries "
            "are not supported."
        )
    return DecoderConfig(**values, tie_embeddings=tie_embeddings)


def read_transducer(mapping: Mapping[str, Any]) -> TransducerConfig:
    """Read a ``ParakeetRNNTConfig`` or ``ParakeetTDTConfig``.

    Raises:
        ValueError: It has an option that this transducer does not support.
    """
    values = _TRANSDUCER.read(mapping)
    if values["activation"] not in ("relu", "tanh"):
        raise ValueError(f"`hidden_act` must be relu or tanh, but is {values['activation']}.")
    tdt = mapping.get("model_type") == "parakeet_tdt"
    durations = tuple(mapping.get("durations", _DURATIONS)) if tdt else None
    return TransducerConfig(**values, joint=values["width"], durations=durations)


def read_features(mapping: Mapping[str, Any], mel_bins: int) -> FeatureConfig:
    """Read the settings of a ``ParakeetFeatureExtractor``.

    Args:
        mapping: Content of ``preprocessor_config.json``; empty if there is none.
        mel_bins: Mel bins of the encoder.

    Raises:
        ValueError: The two have different numbers of bins.
    """
    if mapping.get("feature_size", mel_bins) != mel_bins:
        raise ValueError(
            f"`feature_size` must be num_mel_bins = {mel_bins}, as in config.json, but is "
            f"{mapping['feature_size']} in the preprocessor's configuration."
        )
    return FeatureConfig(**_FEATURES.read(mapping), mel_bins=mel_bins)


def encoder_mapping(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of a ``ParakeetEncoderConfig``.

    Raises:
        ValueError: transformers cannot express the encoder or its features; the message lists all
            reasons.
    """
    encoder = config.encoder
    if not isinstance(encoder, FastConformerConfig):
        raise ValueError(
            f"`encoder.kind` must be fastconformer for a Canary or a Parakeet, but is "
            f"{encoder.kind}: transformers has such encoders in Whisper models only."
        )
    refuse(
        "transformers",
        {
            f"position={encoder.position} (only relative)": encoder.position != "relative",
            f"conv_norm={encoder.conv_norm} (only batch_norm)": encoder.conv_norm != "batch_norm",
            "subsampling_norm": encoder.subsampling_norm,
            "context": bool(encoder.context),
            "causal_convolution": encoder.causal_convolution,
            "causal_subsampling": encoder.causal_subsampling,
            f"input_positions={encoder.input_positions} (only 0)": encoder.input_positions != 0,
            "features.normalize=False": not config.features.normalize,
        },
    )
    return {
        "model_type": "parakeet_encoder",
        "num_key_value_heads": encoder.heads,
        "num_mel_bins": config.features.mel_bins,
        "layerdrop": 0.0,
        **_ENCODER.write(encoder),
    }


def decoder_mapping(config: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Return the fields of a ``CanaryDecoderConfig``.

    Raises:
        ValueError: transformers cannot express the decoder; the message lists all reasons.
    """
    decoder, width = config.decoder, config.encoder.width
    if decoder is None:
        raise ValueError(
            "`decoder` must be given for a Canary model, but is null: this model has a CTC head "
            "only, which is exported as a Parakeet CTC model."
        )
    refuse(
        "transformers",
        {
            f"decoder.width={decoder.width}, not encoder.width={width}": decoder.width != width,
            f"decoder.width={decoder.width}, not a multiple of heads={decoder.heads}": (
                decoder.width % decoder.heads != 0
            ),
            f"decoder.positions={decoder.positions} (only sinusoidal)": (
                decoder.positions != "sinusoidal"
            ),
            f"decoder.activation={decoder.activation} (only relu)": decoder.activation != "relu",
            "decoder.embedding_norm=False": not decoder.embedding_norm,
            "decoder.key_bias=False": decoder.bias and not decoder.key_bias,
        },
    )
    return {
        "model_type": "canary_decoder",
        "vocab_size": vocab_size,
        "num_key_value_heads": decoder.heads,
        **_DECODER.write(decoder),
        "head_dim": decoder.head_width,
    }


def transducer_mapping(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of a ``ParakeetRNNTConfig`` or a ``ParakeetTDTConfig`` about its layers.

    Raises:
        ValueError: transformers cannot express the transducer; the message lists all reasons.
    """
    transducer = config.transducer
    if transducer is None:
        raise ValueError(
            "`transducer` must be given for a Parakeet transducer, but is null: this model is "
            "exported as a Canary, or as a Parakeet CTC model."
        )
    refuse(
        "transformers",
        {
            f"transducer.predictor={transducer.predictor} (only lstm)": (
                transducer.predictor != "lstm"
            ),
            f"transducer.joint={transducer.joint}, not transducer.width={transducer.width}": (
                transducer.joint != transducer.width
            ),
        },
    )
    fields = _TRANSDUCER.write(transducer)
    if transducer.durations is not None:
        fields["durations"] = list(transducer.durations)
    return fields


def feature_mapping(config: FeatureConfig) -> dict[str, Any]:
    """Return the content of ``preprocessor_config.json``."""
    return {
        "feature_extractor_type": "ParakeetFeatureExtractor",
        "feature_size": config.mel_bins,
        **_FEATURES.write(config),
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
    }
