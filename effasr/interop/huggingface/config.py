"""Configurations: this project's on one side, transformers' JSON files on the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from effasr.data.features.log_mel import FeatureConfig
from effasr.model.asr import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import EncoderConfig
from effasr.model.transducer import TransducerConfig

# What transformers 5.23 fills in for a field that a file leaves out.
_ENCODER_DEFAULTS = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "intermediate_size": 4096,
    "conv_kernel_size": 9,
    "subsampling_conv_channels": 256,
    "num_mel_bins": 80,
    "scale_input": True,
    "attention_bias": True,
    "convolution_bias": True,
    "dropout": 0.1,
    "activation_dropout": 0.1,
    "attention_dropout": 0.1,
    "dropout_positions": 0.0,
}
_ENCODER_FIXED = {
    "hidden_act": "silu",
    "subsampling_factor": 8,
    "subsampling_conv_kernel_size": 3,
    "subsampling_conv_stride": 2,
}
_DECODER_DEFAULTS = {
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "intermediate_size": 4096,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "attention_bias": True,
    "attention_dropout": 0.0,
}
_DECODER_FIXED = {"hidden_act": "relu"}
_TRANSDUCER_DEFAULTS = {
    "decoder_hidden_size": 640,
    "num_decoder_layers": 2,
    "hidden_act": "relu",
    "durations": (0, 1, 2, 3, 4),
}
_FEATURE_DEFAULTS = {
    "feature_size": 80,
    "sampling_rate": 16_000,
    "hop_length": 160,
    "n_fft": 512,
    "win_length": 400,
    "preemphasis": 0.97,
}


def read_encoder(mapping: Mapping[str, Any]) -> EncoderConfig:
    """Read a ``ParakeetEncoderConfig``.

    Raises:
        ValueError: It asks for something that this encoder has not.
    """
    get = reader("encoder_config", mapping, _ENCODER_DEFAULTS, _ENCODER_FIXED)
    return EncoderConfig(
        width=get("hidden_size"),
        layers=get("num_hidden_layers"),
        heads=get("num_attention_heads"),
        feed_forward=get("intermediate_size"),
        conv_kernel=get("conv_kernel_size"),
        subsampling_channels=get("subsampling_conv_channels"),
        scale_input=get("scale_input"),
        bias=get("attention_bias"),
        convolution_bias=get("convolution_bias"),
        input_dropout=float(get("dropout")),
        activation_dropout=float(get("activation_dropout")),
        attention_dropout=float(get("attention_dropout")),
        position_dropout=float(get("dropout_positions")),
    )


def read_decoder(mapping: Mapping[str, Any], *, tie_embeddings: bool) -> DecoderConfig:
    """Read a ``CanaryDecoderConfig``.

    Raises:
        ValueError: It asks for something that this decoder has not.
    """
    get = reader("decoder_config", mapping, _DECODER_DEFAULTS, _DECODER_FIXED)
    heads = get("num_attention_heads")
    if mapping.get("num_key_value_heads") not in (None, heads):
        raise ValueError(
            f"`decoder_config.num_key_value_heads` must be {heads}, as `num_attention_heads` is, "
            f"but is {mapping['num_key_value_heads']}: grouped queries are not supported."
        )
    return DecoderConfig(
        width=get("hidden_size"),
        layers=get("num_hidden_layers"),
        heads=heads,
        head_dim=get("head_dim"),
        feed_forward=get("intermediate_size"),
        max_positions=get("max_position_embeddings"),
        bias=get("attention_bias"),
        tie_embeddings=tie_embeddings,
        attention_dropout=float(get("attention_dropout") or 0.0),
    )


def read_transducer(mapping: Mapping[str, Any]) -> TransducerConfig:
    """Read a ``ParakeetRNNTConfig`` or ``ParakeetTDTConfig``.

    Raises:
        ValueError: It asks for something that this transducer has not.
    """
    values = {**_TRANSDUCER_DEFAULTS, **mapping}
    if values["hidden_act"] not in ("relu", "tanh"):
        raise ValueError(f"`hidden_act` must be relu or tanh, but is {values['hidden_act']}.")
    tdt = mapping.get("model_type") == "parakeet_tdt"
    return TransducerConfig(
        predictor="lstm",
        width=values["decoder_hidden_size"],
        layers=values["num_decoder_layers"],
        joint=values["decoder_hidden_size"],
        activation=values["hidden_act"],
        durations=tuple(values["durations"]) if tdt else None,
    )


def read_features(mapping: Mapping[str, Any], mel_bins: int) -> FeatureConfig:
    """Read the settings of a ``ParakeetFeatureExtractor``.

    Args:
        mapping: Of ``preprocessor_config.json``; empty where a model comes without.
        mel_bins: Of the encoder.

    Raises:
        ValueError: The two do not fit together.
    """
    values = {**_FEATURE_DEFAULTS, "feature_size": mel_bins, **mapping}
    if values["feature_size"] != mel_bins:
        raise ValueError(
            f"`feature_size` must be num_mel_bins = {mel_bins}, as in config.json, but is "
            f"{values['feature_size']} in the preprocessor's configuration."
        )
    return FeatureConfig(
        sample_rate=values["sampling_rate"],
        mel_bins=mel_bins,
        n_fft=values["n_fft"],
        window=values["win_length"],
        hop=values["hop_length"],
        preemphasis=float(values["preemphasis"] or 0.0),
    )


def encoder_mapping(config: ModelConfig) -> dict[str, Any]:
    """The fields of a ``ParakeetEncoderConfig``.

    Raises:
        ValueError: The encoder or its features cannot be expressed; the message says all reasons.
    """
    encoder = config.encoder
    if not isinstance(encoder, EncoderConfig):
        raise ValueError(
            f"`encoder.kind` must be fastconformer for a Canary or a Parakeet, but is "
            f"{encoder.kind}: transformers has such encoders in Whisper models only."
        )
    refuse(
        {
            f"position={encoder.position} (only relative)": encoder.position != "relative",
            f"conv_norm={encoder.conv_norm} (only batch_norm)": encoder.conv_norm != "batch_norm",
            "subsampling_norm": encoder.subsampling_norm,
            f"input_positions={encoder.input_positions} (only 0)": encoder.input_positions != 0,
            "features.normalize=False": not config.features.normalize,
        }
    )
    return {
        "model_type": "parakeet_encoder",
        "hidden_size": encoder.width,
        "num_hidden_layers": encoder.layers,
        "num_attention_heads": encoder.heads,
        "num_key_value_heads": encoder.heads,
        "intermediate_size": encoder.feed_forward,
        "conv_kernel_size": encoder.conv_kernel,
        "subsampling_conv_channels": encoder.subsampling_channels,
        "num_mel_bins": config.features.mel_bins,
        "scale_input": encoder.scale_input,
        "attention_bias": encoder.bias,
        "convolution_bias": encoder.convolution_bias,
        "dropout": encoder.input_dropout,
        "activation_dropout": encoder.activation_dropout,
        "attention_dropout": encoder.attention_dropout,
        "dropout_positions": encoder.position_dropout,
        "layerdrop": 0.0,
        **_ENCODER_FIXED,
    }


def decoder_mapping(config: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """The fields of a ``CanaryDecoderConfig``.

    Raises:
        ValueError: The decoder cannot be expressed; the message says all reasons.
    """
    decoder, width = config.decoder, config.encoder.width
    if decoder is None:
        raise ValueError(
            "`decoder` must be given for a Canary model, but is null: this model has a CTC head "
            "only, which is exported as a Parakeet CTC model."
        )
    refuse(
        {
            f"decoder.width={decoder.width}, not encoder.width={width}": decoder.width != width,
            f"decoder.width={decoder.width}, not a multiple of heads={decoder.heads}": (
                decoder.width % decoder.heads != 0
            ),
        }
    )
    return {
        "model_type": "canary_decoder",
        "vocab_size": vocab_size,
        "hidden_size": decoder.width,
        "num_hidden_layers": decoder.layers,
        "num_attention_heads": decoder.heads,
        "num_key_value_heads": decoder.heads,
        "head_dim": decoder.head_width,
        "intermediate_size": decoder.feed_forward,
        "max_position_embeddings": decoder.max_positions,
        "attention_bias": decoder.bias,
        "attention_dropout": decoder.attention_dropout,
        **_DECODER_FIXED,
    }


def transducer_mapping(config: ModelConfig) -> dict[str, Any]:
    """The fields of a ``ParakeetRNNTConfig``, or ``ParakeetTDTConfig``, that tell its layers.

    Raises:
        ValueError: The transducer cannot be expressed; the message says all reasons.
    """
    transducer = config.transducer
    if transducer is None:
        raise ValueError(
            "`transducer` must be given for a Parakeet transducer, but is null: this model is "
            "exported as a Canary, or as a Parakeet CTC model."
        )
    refuse(
        {
            f"transducer.predictor={transducer.predictor} (only lstm)": (
                transducer.predictor != "lstm"
            ),
            f"transducer.joint={transducer.joint}, not transducer.width={transducer.width}": (
                transducer.joint != transducer.width
            ),
        }
    )
    fields = {
        "decoder_hidden_size": transducer.width,
        "num_decoder_layers": transducer.layers,
        "hidden_act": transducer.activation,
    }
    if transducer.durations is not None:
        fields["durations"] = list(transducer.durations)
    return fields


def feature_mapping(config: FeatureConfig) -> dict[str, Any]:
    """The content of ``preprocessor_config.json``."""
    return {
        "feature_extractor_type": "ParakeetFeatureExtractor",
        "feature_size": config.mel_bins,
        "sampling_rate": config.sample_rate,
        "hop_length": config.hop,
        "n_fft": config.n_fft,
        "win_length": config.window,
        "preemphasis": config.preemphasis,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
    }


def reader(
    where: str, mapping: Mapping[str, Any], defaults: Mapping[str, Any], fixed: Mapping[str, Any]
) -> Any:
    """Give what reads a field of a mapping, with a default where it is left out.

    Args:
        where: Of the mapping, for messages.
        mapping: Of a file.
        defaults: For what it leaves out.
        fixed: What it may only be.

    Raises:
        ValueError: It is something else.
    """
    for key, only in fixed.items():
        if mapping.get(key, only) != only:
            raise ValueError(f"`{where}.{key}` must be {only}, but is {mapping[key]}.")
    return {**defaults, **mapping}.__getitem__


def refuse(reasons: Mapping[str, bool]) -> None:
    """Check that no reason holds against an export.

    Raises:
        ValueError: Some do; the message says all.
    """
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ValueError(
            f"this model cannot be exported, because transformers has no {'; no '.join(found)}."
        )
