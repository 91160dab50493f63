"""Whisper's configurations: this project's on one side, transformers' JSON files on the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from effasr.data.features.log_mel import FeatureConfig
from effasr.interop.huggingface.config import reader, refuse
from effasr.model.asr import ModelConfig
from effasr.model.whisper_encoder import TransformerEncoderConfig

WHISPER_CLASS = "WhisperForConditionalGeneration"

# What transformers 5.23 fills in for a field that a file leaves out.
WHISPER_DEFAULTS = {
    "vocab_size": 51_865,
    "num_mel_bins": 80,
    "d_model": 384,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1_536,
    "decoder_layers": 4,
    "decoder_attention_heads": 6,
    "decoder_ffn_dim": 1_536,
    "max_source_positions": 1_500,
    "max_target_positions": 448,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "tie_word_embeddings": True,
}
WHISPER_FIXED = {"activation_function": "gelu", "scale_embedding": False}
_FEATURES = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "sampling_rate": 16_000,
    "hop_length": 160,
    "n_fft": 400,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": False,
}


def whisper_mapping(config: ModelConfig) -> dict[str, Any]:
    """The fields of a ``WhisperConfig``, but for those of the vocabulary.

    Raises:
        ValueError: The model cannot be expressed; the message says all reasons.
    """
    encoder, decoder = config.encoder, config.decoder
    if decoder is None or not isinstance(encoder, TransformerEncoderConfig):
        raise ValueError(
            "`decoder` must be given for a Whisper model, but is null: transformers has no CTC "
            "model with an encoder of kind transformer. Export ONNX graphs instead."
        )
    refuse(
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
        }
    )
    return {
        "architectures": [WHISPER_CLASS],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "num_mel_bins": config.features.mel_bins,
        "d_model": encoder.width,
        "encoder_layers": encoder.layers,
        "encoder_attention_heads": encoder.heads,
        "encoder_ffn_dim": encoder.feed_forward,
        "decoder_layers": decoder.layers,
        "decoder_attention_heads": decoder.heads,
        "decoder_ffn_dim": decoder.feed_forward,
        "num_hidden_layers": encoder.layers,
        "max_source_positions": encoder.max_frames,
        "max_target_positions": decoder.max_positions,
        "dropout": decoder.residual_dropout,
        "attention_dropout": decoder.attention_dropout,
        "activation_dropout": decoder.activation_dropout,
        "tie_word_embeddings": decoder.tie_embeddings,
        "dtype": "float32",
        **WHISPER_FIXED,
    }


def whisper_feature_mapping(config: ModelConfig) -> dict[str, Any]:
    """The content of ``preprocessor_config.json``.

    Raises:
        ValueError: transformers has no such features.
    """
    features, encoder = config.features, config.encoder
    assert isinstance(encoder, TransformerEncoderConfig)  # checked by whisper_mapping
    samples = encoder.max_frames * features.framing.samples
    seconds, rest = divmod(samples, features.sample_rate)
    refuse(
        {
            f"encoder.max_frames={encoder.max_frames}, not whole seconds": rest != 0,
            **{
                f"features.{name}={getattr(features, name)} (only {only})": (
                    getattr(features, name) != only
                )
                for name, only in (("sample_rate", 16_000), ("hop", 160), ("n_fft", 400))
            },
        }
    )
    return {
        **_FEATURES,
        "feature_size": features.mel_bins,
        "chunk_length": seconds,
        "n_samples": samples,
        "nb_max_frames": samples // features.hop,
        "processor_class": "WhisperProcessor",
    }


def read_whisper_features(
    mapping: Mapping[str, Any], mel_bins: int, max_source_positions: int
) -> FeatureConfig:
    """Read the settings of a ``WhisperFeatureExtractor``.

    Args:
        mapping: Of ``preprocessor_config.json``; empty where a model comes without.
        mel_bins: Of the encoder.
        max_source_positions: Of the encoder, whose length in seconds the silence must have.

    Raises:
        ValueError: The two do not fit together.
    """
    values = {"feature_size": mel_bins, "chunk_length": max_source_positions / 50, **mapping}
    fixed = {
        "sampling_rate": 16_000,
        "hop_length": 160,
        "n_fft": 400,
        "feature_size": mel_bins,
        # Else transformers would refuse its own features.
        "chunk_length": max_source_positions / 50,
    }
    get = reader("preprocessor_config", values, _FEATURES, fixed)
    return FeatureConfig(
        kind="whisper",
        sample_rate=get("sampling_rate"),
        subsampling=2,
        minimum_s=float(get("chunk_length")),
        mel_bins=mel_bins,
        n_fft=get("n_fft"),
        window=get("n_fft"),
        hop=get("hop_length"),
        preemphasis=0.0,
        normalize=False,
    )
