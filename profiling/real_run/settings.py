"""Sizes of the runs: on a GPU, and in a dry run on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from effasr.data.config import DataConfig
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.optim.schedules import ScheduleConfig
from effasr.training.config import EvaluationConfig, LoopConfig, TrainConfig
from real_run.corpus import Corpus


@dataclass(frozen=True)
class Size:
    """Sizes of the runs.

    Attributes:
        utterances: Utterances of the corpus.
        encoder: Fields of the encoder.
        decoder: Fields of the decoder.
        frame_budget: Frame budget of a micro-batch.
        steps: Steps of a run.
        checkpoint_every: Steps.
        killed_after: Step after which the run that is killed may be.
        quiet_steps: Quiet steps of the runs whose losses are compared with each other.
        calibrated_steps: Calibrated steps of the run at the calibrated budget.
        calibration: Fields of ``calibration``.
        workers: Processes that load audio.
        validated: Utterances of a validation.
    """

    utterances: int
    encoder: dict[str, Any]
    decoder: dict[str, Any]
    frame_budget: int
    steps: int
    checkpoint_every: int
    killed_after: int
    quiet_steps: int
    calibrated_steps: int
    calibration: tuple[str, ...]
    workers: int
    validated: int


_WIDE: dict[str, Any] = {"width": 512, "heads": 8, "feed_forward": 2048, "residual_dropout": 0.1}
_NARROW: dict[str, Any] = {"width": 16, "heads": 2, "feed_forward": 16, "residual_dropout": 0.1}
GPU = Size(
    utterances=600,
    encoder=_WIDE | {"layers": 6, "attention_dropout": 0.1},
    decoder=_WIDE | {"layers": 2, "attention_dropout": 0.1},
    frame_budget=4224,
    steps=60,
    checkpoint_every=15,
    killed_after=38,
    quiet_steps=20,
    calibrated_steps=300,
    # So that memory is what limits the budget, and not the corpus.
    calibration=("calibration.objective=memory", "calibration.target_bytes=4000000000"),
    workers=6,
    validated=16,
)
DRY = Size(
    utterances=40,
    encoder=_NARROW | {"layers": 1, "subsampling_channels": 4},
    decoder=_NARROW | {"layers": 1},
    frame_budget=200,
    steps=40,
    checkpoint_every=8,
    killed_after=18,
    quiet_steps=8,
    calibrated_steps=20,
    calibration=("calibration.objective=memory", "calibration.target_share=0.5"),
    workers=1,
    validated=2,
)


def train_config(size: Size, corpus: Corpus, runs: Path, *, device: str) -> TrainConfig:
    """Return the run of which all others are variants."""
    return TrainConfig(
        name="straight",
        output=str(runs),
        model=ModelConfig(
            encoder=FastConformerConfig(**size.encoder),
            decoder=DecoderConfig(**size.decoder),
            ctc=True,
        ),
        data=DataConfig(
            train=str(corpus.train),
            validation=str(corpus.dev),
            tokenizer=str(corpus.tokenizer),
            frame_budget=size.frame_budget,
            workers=size.workers,
        ),
        schedule=ScheduleConfig(warmup_steps=max(1, size.steps // 4)),
        training=LoopConfig(
            max_steps=size.steps,
            log_every=1,
            validate_every=size.steps // 2,
            checkpoint_every=size.checkpoint_every,
            keep=10,
            ema_decay=0.9,
            device=device,  # type: ignore[arg-type]
            threads=1 if device == "cpu" else None,
            tensorboard=False,
            timeout_s=120.0,
            data_timeout_s=120.0,
        ),
        evaluation=EvaluationConfig(max_utterances=size.validated),
    )


def without_chance(config: TrainConfig) -> TrainConfig:
    """Return the configuration without dropout and SpecAugment, so that losses can be compared."""
    model = config.model
    off = {"residual_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    off["input_dropout"] = 0.0
    assert model.decoder is not None
    assert isinstance(model.encoder, FastConformerConfig)
    quiet = replace(
        model,
        spec_augment=replace(model.spec_augment, freq_masks=0, time_masks=0),
        encoder=replace(model.encoder, **off),
        decoder=replace(model.decoder, **off),
    )
    return replace(config, model=quiet)
