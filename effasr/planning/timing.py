"""Measures the training speed of a recipe's model on this machine."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import torch

from effasr import config as configuration
from effasr.data.sampling.plan import UtteranceLengths
from effasr.training.calibration.calibrate import target_bytes
from effasr.training.calibration.trial import Request, measure
from effasr.training.calibration.workload import Population
from effasr.training.config import TrainConfig
from effasr.training.resolve import resolve_config

TIMED = 2
"""Number of timed micro-batches, after one that is not timed."""


def audio_seconds_per_second(
    config: TrainConfig,
    vocab_size: int,
    frames: np.ndarray,
    tokens: np.ndarray,
    device: torch.device,
) -> float | None:
    """Train a few steps in a separate process, on batches of these lengths.

    Audio loading is not measured, because it overlaps with training.

    Args:
        config: The recipe.
        vocab_size: Vocabulary size of its tokenizer.
        frames: int (n,), encoder frames of utterances of the corpus.
        tokens: int (n,), tokens of their texts including the prompt.
        device: Device to train on.

    Returns:
        Seconds of audio processed per second of training; None if memory does not suffice.

    Raises:
        TrialFailed: The trial failed for another reason.
    """
    settled = resolve_config(config, None)
    lengths = UtteranceLengths(frames.astype(np.int32), tokens.astype(np.int32))
    framing = settled.model.features.framing
    transducer = settled.model.transducer is not None
    work = Population.of(lengths, framing=framing, transducer=transducer).workload(
        settled.data.known_frame_budget, batches=TIMED
    )
    # The weights do not affect the time, and the trial has no run to continue.
    mapping = configuration.to_mapping(replace(settled, init_from=None))
    target = target_bytes(settled.calibration, device, os.environ)
    found = measure(Request(mapping, vocab_size, str(device), target, 1, work))
    return found.speed if found.fits else None


def duration_text(seconds: float) -> str:
    """Return a duration in minutes, hours or days, as text."""
    for unit, size in (("days", 86_400), ("hours", 3600)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(1, round(seconds / 60))} minutes"
