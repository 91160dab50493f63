"""Calibrations on disk, each under a fingerprint of everything that it depends on."""

import hashlib
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
from effasr.data.checksums import installed_version
from effasr.data.features.frame_geometry import Framing
from effasr.data.sampling.bucket_table import BucketTable
from effasr.training.calibration.workload import Population
from effasr.training.config import TrainConfig
from effasr.training.cuda_graph import uses_graph
from effasr.training.memory import total_bytes

log = logging.getLogger(__name__)

_FORMAT = 2

_PER_FRAMES = 1_000_000
"""A frame budget whose rows show the shares of spoken and written conversations."""


@dataclass(frozen=True, slots=True)
class Calibration:
    fingerprint: str  # Fingerprint of ``made_for``
    made_for: dict[str, Any]  # Configuration and device that the calibration depends on
    frame_budget: int  # Encoder frames of a micro-batch
    token_budget: int  # Decoder tokens of a micro-batch
    max_sequences: int  # Utterances of a micro-batch
    limited_by: str  # ``memory``, ``throughput`` or ``corpus``
    largest_frame_budget: int  # Largest budget that fits by the memory model
    target_bytes: int  # Limit of the memory
    margin: float  # Share of it that predictions leave free
    predicted_bytes: int  # Predicted peak of the longest utterances together
    measured_bytes: int  # Measured peak of these
    prediction_error: float  # Relative error of the prediction
    audio_seconds_per_second: float  # Measured speed
    memory_model: dict[str, float]  # Bytes: fixed, per_frame
    speed_model: dict[str, float]  # Seconds of a micro-batch: fixed, per_frame
    # The table for ``sync_bucketed_2d``: rows of longest duration in seconds, most tokens,
    # utterances of a batch; empty for conversations
    bucket_batch_sizes: list[list[float]]
    trials: list[dict[str, Any]]  # Trials in order
    seconds: float  # Duration of the calibration

    def to_json(self) -> str:
        return json.dumps({"format": _FORMAT} | asdict(self), indent=1) + "\n"


def folder() -> Path:
    """Return the folder of calibrations: ``~/.cache/effasr/calibration``, or in XDG_CACHE_HOME."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        # A user without a home, as in containers: below a file nothing is found nor kept.
        cache = Path(os.devnull)
    return cache / "effasr" / "calibration"


def path_of(fingerprint: str) -> Path:
    return folder() / f"{fingerprint}.json"


def buckets_path_of(fingerprint: str) -> Path:
    """Return the file of its bucket table, as ``data.bucket_batch_sizes`` takes it."""
    return folder() / f"{fingerprint}.buckets.json"


def find(fingerprint: str) -> Calibration | None:
    """Return the calibration of a fingerprint, if there is a readable one."""
    path = path_of(fingerprint)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") == _FORMAT and content["fingerprint"] == fingerprint:
            return Calibration(**content)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("%s cannot be read (%s) and is made anew", path, error)
    return None


def save(calibration: Calibration, table: BucketTable | None, framing: Framing) -> Path | None:
    """Save a calibration and its bucket table, if any; return the path, or None if impossible."""
    path = path_of(calibration.fingerprint)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if table is not None:
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
    """Return everything that a calibration depends on, as JSON types."""
    training, name = config.training, f"cpu, {os.cpu_count()} cores"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "versions": {
            package: installed_version(package) for package in ("effasr", "torch", "triton")
        },
        "device": name,
        "device_bytes": total_bytes(device),
        "target_bytes": target,
        "calibration": configuration.to_mapping(config.calibration),
        "model": configuration.to_mapping(config.model),
        "vocab_size": vocab_size,
        "loss": configuration.to_mapping(config.loss),
        "optimizer": [config.optimizer.name, config.optimizer.implementation],
        "trained": [
            list(training.freeze) if training.freeze_steps is None else [],
            config.lora and configuration.to_mapping(config.lora),
        ],
        "training": {
            "precision": training.precision,
            "compile": training.compile,
            "cuda_graph": uses_graph(config, device),
            "bfloat16_weights": training.bfloat16_weights,
            "activation_checkpointing": int(training.activation_checkpointing),
            "averages": training.ema_decay is not None,
            "threads": training.threads,
        },
        "kernels": configuration.to_mapping(config.kernels),
        "accumulates": config.data.micro_batches > 1,
        "lengths": _statistics(population, config.data.micro_batches),
    }


def fingerprint(described: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def _statistics(population: Population, micro_batches: int) -> dict[str, Any]:
    """Return rounded statistics of the lengths: a corpus that grows by a little is the same."""
    frames, tokens = population.lengths.frames, population.lengths.tokens
    total = float(frames.sum(dtype=np.int64))
    return {
        **_statistics_of_texts(population),
        **_statistics_of_conversations(population),
        "longest_frames": int(frames.max()),
        "longest_tokens": int(tokens.max()),
        "mean_frames": _roughly(total / len(frames)),
        "tokens_per_frame": _roughly(float(tokens.sum(dtype=np.int64)) / max(total, 1.0)),
        "frames_of_a_micro_batch": _roughly(population.total_frames / micro_batches),
        "token_budget": population.token_budget,
        "max_sequences": population.max_sequences,
    }


def _statistics_of_texts(population: Population) -> dict[str, Any]:
    texts = population.texts
    if texts is None:
        return {}
    work = texts.work(population.lengths, population.shape(_PER_FRAMES))
    shape = work.shape
    budgets = _roughly(shape.frame_budget), _roughly(shape.token_budget)
    longest = shape.longest_frames, shape.longest_tokens
    return {"text": [texts.budget, work.aligned, *budgets, *longest]}


def _statistics_of_conversations(population: Population) -> dict[str, Any]:
    """Return the clips and the proportions of conversations; nothing for utterances."""
    conversations = population.conversations
    if conversations is None:
        return {}
    return {
        "shortest_clip": conversations.shortest_clip,
        "longest_clip": conversations.longest_clip,
        "most_clips": int(conversations.clip_counts.max()),
        "rows_of_a_frame_budget": _roughly(conversations.token_budget(_PER_FRAMES)),
    }


def _roughly(value: float) -> float:
    """Round to two digits."""
    return float(f"{value:.1e}")
