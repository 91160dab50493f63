"""What a CUDA graph of a micro-batch cannot contain, and so where ``cuda_graph: auto`` has none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from effasr.model.config import ModelConfig
from effasr.model.encoder import FastConformerConfig
from effasr.training.config import TrainConfig


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A reason why micro-batches cannot be recorded.

    Attributes:
        setting: The field that it comes from; ``training.device`` for the device.
        reason: Why, in a few words.
        message: The error where it is requested nevertheless.
    """

    setting: str
    reason: str
    message: str


def uses_graph(config: TrainConfig, device: torch.device) -> bool:
    """Return whether a run on a device records its micro-batches: as requested, or wherever it can.

    A request that cannot be met raises its ValueError where the run is resolved or built.
    """
    if config.training.cuda_graph == "auto":
        return not obstacles(config, device)
    return config.training.cuda_graph


def obstacles(config: TrainConfig, device: torch.device) -> list[Obstacle]:
    """Return every reason against a graph for a run on a device; none where it can be recorded."""
    return [
        *obstacles_of_strategy(config),
        *obstacles_of_batches(config),
        *obstacles_of_model(config.model, device),
    ]


def obstacles_of_strategy(config: TrainConfig) -> Iterator[Obstacle]:
    """Yield the obstacle of ``training.strategy``."""
    if config.training.strategy == "fsdp2":
        yield Obstacle(
            "training.strategy",
            "fsdp2 gathers parameters during the forward, which a graph cannot record",
            "`training.cuda_graph` must be false with training.strategy fsdp2, whose all-gather of "
            "parameters it cannot record, but is true: set it to false, or use ddp.",
        )


def obstacles_of_batches(config: TrainConfig) -> Iterator[Obstacle]:
    """Yield the obstacles of batches without one static shape, and of recomputed layers."""
    training, data = config.training, config.data
    if data.text_share is not None:
        yield Obstacle(
            "data.text_share",
            "batches of text have a shape of their own",
            "`training.cuda_graph` must be false where `data.text_share` is given, because batches "
            "of text have a shape of their own, but is true: set it to false.",
        )
    if training.activation_checkpointing:
        yield Obstacle(
            "training.activation_checkpointing",
            "the random numbers of a layer cannot be rewound while a graph is recorded",
            "`training.activation_checkpointing` must be false with training.cuda_graph, because "
            "the random numbers of a layer cannot be rewound while a graph is recorded, but is "
            f"{training.activation_checkpointing}: set either to false.",
        )
    if data.strategy != "packed":
        yield Obstacle(
            "data.strategy",
            f"batches of {data.strategy} have a shape each",
            f"`training.cuda_graph` must be false for `data.strategy` = {data.strategy}, "
            "whose batches have a shape each, but is true: set it to false, or train with "
            "strategy packed.",
        )


def obstacles_of_model(model: ModelConfig, device: torch.device) -> Iterator[Obstacle]:
    """Yield the obstacles of the model and the device."""
    if device.type == "cuda" and (reason := _reason_of_language_model(model)) is not None:
        yield Obstacle(
            "model.language_model",
            reason,
            f"`training.cuda_graph` must be false for this language model, because {reason}, but "
            "is true: set it to false, or choose another language model.",
        )
    if isinstance(model.encoder, FastConformerConfig) and len(model.encoder.context) > 1:
        count = len(model.encoder.context)
        yield Obstacle(
            "model.encoder.context",
            "a graph has one context, and each step draws one of several",
            "`training.cuda_graph` must be false where `model.encoder.context` has several, of "
            f"which each step draws one, but it has {count}: set it to false, or train with one.",
        )
    if device.type != "cuda":
        yield Obstacle(
            "training.device",
            f"the run is on {device.type}, and graphs need a GPU",
            f"`training.cuda_graph` needs a GPU, but the run is on {device.type}: set it to false.",
        )


def _reason_of_language_model(model: ModelConfig) -> str | None:
    """Return why transformers' modules cannot be recorded; None where they can, or are unknown."""
    if model.language_model is None or model.language_model.architecture is None:
        return None
    # Imported here, because transformers takes seconds.
    from effasr.model.language_model.architecture import host_read

    found = host_read(model.language_model.architecture)
    return None if found is None else f"transformers' modules read a value from the GPU ({found})"
