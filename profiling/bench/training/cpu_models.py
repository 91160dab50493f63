"""Shapes of models that a CPU trains in seconds a step."""

from __future__ import annotations

from effasr.data.features.config import FeatureConfig
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.whisper_encoder import WhisperEncoderConfig

WHISPER_CLASSES = 51_865


def small(classes: int = 1024) -> tuple[ModelConfig, int]:
    """Return a FastConformer of four layers with a Transformer decoder."""
    encoder = FastConformerConfig(
        width=96, layers=4, heads=4, feed_forward=384, subsampling_channels=16
    )
    decoder = DecoderConfig(width=96, layers=2, heads=4, feed_forward=384)
    return ModelConfig(encoder=encoder, decoder=decoder), classes


def demo(classes: int = 256) -> tuple[ModelConfig, int]:
    """Return the widths and layers of ``recipes/demo.yaml``, with our own norms and losses."""
    encoder = FastConformerConfig(
        width=128, layers=3, heads=4, feed_forward=256, subsampling_channels=16
    )
    decoder = DecoderConfig(width=128, layers=2, heads=4, feed_forward=256, max_positions=256)
    return ModelConfig(
        features=FeatureConfig(mel_bins=64), encoder=encoder, decoder=decoder
    ), classes


def whisper_tiny(classes: int = WHISPER_CLASSES) -> tuple[ModelConfig, int]:
    """Whisper tiny, whose utterances are not filled up with silence."""
    features = FeatureConfig(
        kind="whisper",
        subsampling=2,
        minimum_s=0.0,
        n_fft=400,
        preemphasis=0.0,
        normalize=False,
    )
    encoder = WhisperEncoderConfig(
        width=384, layers=4, heads=6, feed_forward=1536, bias=True, key_bias=False, max_frames=1500
    )
    decoder = DecoderConfig(
        width=384,
        layers=4,
        heads=6,
        feed_forward=1536,
        max_positions=448,
        positions="learned",
        activation="gelu",
        embedding_norm=False,
        bias=True,
        key_bias=False,
        output_bias=False,
    )
    return ModelConfig(features=features, encoder=encoder, decoder=decoder), classes


CPU_MODELS = {"small": small, "demo": demo, "whisper_tiny": whisper_tiny}
