"""Calibrations on disk, each under the fingerprint of everything that it depends on."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from effasr import config as configuration
from effasr.data.atomic_files import write_atomically
from effasr.data.features.frame_geometry import Framing
from effasr.data.sampling.bucket_table import BucketTable
from effasr.training.calibration.workload import Population
from effasr.training.config import TrainConfig
from effasr.training.memory import total_bytes

log = logging.getLogger(__name__)

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Calibration:
    """What calibration.json holds.

    Attributes:
        fingerprint: Of what it was made for.
        made_for: The same in words.
        frame_budget: Encoder frames of a micro-batch.
        token_budget: Decoder tokens of a micro-batch.
        max_sequences: Utterances of a micro-batch.
        limited_by: What keeps the budget from being larger: ``memory``, ``throughput`` or
            ``corpus``.
        largest_frame_budget: What would fit by the model of memory.
        target_bytes: What must not be exceeded.
        margin: Share of it that predictions leave free.
        predicted_bytes: Peak that was predicted for the longest utterances together.
        measured_bytes: Peak that the replay of these took.
        prediction_error: Of the one as a share of the other.
        audio_seconds_per_second: Useful speech, measured.
        memory_model: Bytes: fixed, per_frame, per_token, per_cell.
        speed_model: Seconds of a micro-batch: fixed, per_frame.
        bucket_batch_sizes: The table for ``sync_bucketed_2d``: rows of longest duration in seconds,
            most tokens, utterances of a batch.
        trials: What was tried, in order.
        seconds: How long it took.
    """

    fingerprint: str
    made_for: dict[str, Any]
    frame_budget: int
    token_budget: int
    max_sequences: int
    limited_by: str
    largest_frame_budget: int
    target_bytes: int
    margin: float
    predicted_bytes: int
    measured_bytes: int
    prediction_error: float
    audio_seconds_per_second: float
    memory_model: dict[str, float]
    speed_model: dict[str, float]
    bucket_batch_sizes: list[list[float]]
    trials: list[dict[str, Any]]
    seconds: float

    def to_json(self) -> str:
        """As in the file."""
        return json.dumps({"format": _FORMAT} | asdict(self), indent=1) + "\n"


def folder() -> Path:
    """Where calibrations are kept: ``~/.cache/effasr/calibration``, or in XDG_CACHE_HOME."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "effasr" / "calibration"


def path_of(fingerprint: str) -> Path:
    """The file of a calibration."""
    return folder() / f"{fingerprint}.json"


def buckets_path_of(fingerprint: str) -> Path:
    """The bucket table beside it, as ``data.bucket_batch_sizes`` takes it."""
    return folder() / f"{fingerprint}.buckets.json"


def find(fingerprint: str) -> Calibration | None:
    """The calibration for this fingerprint, if there is one that can be read."""
    path = path_of(fingerprint)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") == _FORMAT and content["fingerprint"] == fingerprint:
            return Calibration(**content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("%s cannot be read (%s) and is made anew", path, error)
    return None


def save(calibration: Calibration, table: BucketTable, framing: Framing) -> Path | None:
    """Keep a calibration and its bucket table; the path, or None where that is not possible."""
    path = path_of(calibration.fingerprint)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        table.save(buckets_path_of(calibration.fingerprint), framing)
        write_atomically(path, calibration.to_json().encode())
    except OSError as error:
        log.warning(
            "the calibration cannot be kept in %s (%s): XDG_CACHE_HOME names another folder",
            path.parent,
            error.strerror,
        )
        return None
    return path


def describe(
    config: TrainConfig, vocab_size: int, population: Population, device: torch.device, target: int
) -> dict[str, Any]:
    """All that a calibration depends on, of types that JSON has.

    Args:
        config: Resolved.
        vocab_size: Of the tokenizer.
        population: Of the corpus: how long its longest are, and what is usual.
        device: That of training.
        target: Bytes.
    """
    training = config.training
    return {
        "versions": {name: _version(name) for name in ("effasr", "torch", "triton")},
        "device": _device_name(device),
        "device_bytes": total_bytes(device),
        "target_bytes": target,
        "calibration": configuration.to_mapping(config.calibration),
        "model": configuration.to_mapping(config.model),
        "vocab_size": vocab_size,
        "loss": configuration.to_mapping(config.loss),
        "optimizer": [config.optimizer.name, config.optimizer.implementation],
        "trained": [list(training.freeze), config.lora and configuration.to_mapping(config.lora)],
        "training": {
            "precision": training.precision,
            "compile": training.compile,
            "cuda_graph": training.cuda_graph,
            "activation_checkpointing": int(training.activation_checkpointing),
            "averages": training.ema_decay is not None,
            "threads": training.threads,
        },
        "accumulates": config.data.micro_batches > 1,
        "lengths": _statistics(population, config.data.micro_batches),
    }


def fingerprint(described: Mapping[str, Any]) -> str:
    """A short name for a description."""
    text = json.dumps(described, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _statistics(population: Population, micro_batches: int) -> dict[str, Any]:
    """Of the lengths, roughly: a corpus that grows by a little is still the same."""
    frames, tokens = population.lengths.frames, population.lengths.tokens
    total = float(frames.sum(dtype=np.int64))
    return {
        "longest_frames": int(frames.max()),
        "longest_tokens": int(tokens.max()),
        "mean_frames": _roughly(total / len(frames)),
        "tokens_per_frame": _roughly(float(tokens.sum(dtype=np.int64)) / max(total, 1.0)),
        "frames_of_a_micro_batch": _roughly(population.total_frames / micro_batches),
        "token_budget": population.token_budget,
        "max_sequences": population.max_sequences,
    }


def _roughly(value: float) -> float:
    """Two digits."""
    return float(f"{value:.1e}")


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {os.cpu_count()} cores"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
