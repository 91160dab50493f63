"""Published architectures."""

from dataclasses import replace
from typing import Any

from effasr.data.features.config import FeatureConfig
from effasr.data.features.spec_augment import SpecAugmentConfig
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig

_FEATURES = FeatureConfig(mel_bins=128)
_AUGMENT = SpecAugmentConfig(freq_masks=2, freq_width=27, time_masks=10, time_width=0.05)
_DROPOUTS = "input_dropout", "residual_dropout", "activation_dropout", "attention_dropout"
_COMMON: dict[str, Any] = {"width": 1024, "feed_forward": 4096, **dict.fromkeys(_DROPOUTS, 0.1)}
_ENCODER, _DECODER = FastConformerConfig(**_COMMON), DecoderConfig(**_COMMON)


def _canary(encoder: FastConformerConfig, decoder: DecoderConfig) -> ModelConfig:
    return ModelConfig(features=_FEATURES, spec_augment=_AUGMENT, encoder=encoder, decoder=decoder)


PRESETS: dict[str, ModelConfig] = {
    "canary_1b": _canary(
        replace(_ENCODER, layers=24), replace(_DECODER, layers=24, max_positions=512)
    ),
    "canary_1b_flash": _canary(replace(_ENCODER, layers=32), replace(_DECODER, layers=4)),
    "canary_180m_flash": _canary(
        replace(_ENCODER, width=512, feed_forward=2048, layers=17), replace(_DECODER, layers=4)
    ),
}
"""Architectures by name, with the sizes, dropouts and SpecAugment of NVIDIA's Canary recipes."""

PRESET_VOCABULARIES: dict[str, int] = {
    "canary_1b": 4_128,
    "canary_1b_flash": 5_248,
    "canary_180m_flash": 5_248,
}
"""Tokens of the published tokenizers: four languages of 1,024 pieces, and the special tokens."""
