"""The Whisper model of each package, read from the checkpoint that was prepared for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from effasr.interop.huggingface.checkpoint import import_model
from effasr.model.asr import ASRModel
from whisper_bench.settings import Settings


def effasr_model(settings: Settings, minimum_s: float) -> ASRModel:
    """Import the checkpoint, without augmentation, whose draws no two systems share."""
    config, classes, state = import_model(settings.imported)
    config = replace(
        config,
        features=replace(config.features, minimum_s=float(minimum_s)),
        spec_augment=replace(config.spec_augment, freq_masks=0, time_masks=0),
    )
    return ASRModel.from_state_dict(config, classes, state)


def transformers_model(settings: Settings) -> Any:
    """Load what effasr exported."""
    from transformers import WhisperForConditionalGeneration

    _quiet()
    return WhisperForConditionalGeneration.from_pretrained(settings.exported)


def feature_extractor(settings: Settings) -> Any:
    """Return the feature extractor of transformers; it pads utterances to the model's window."""
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor.from_pretrained(settings.exported)


def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
