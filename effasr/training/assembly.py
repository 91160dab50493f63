"""From a configuration to the parts that train."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from effasr import checkpoint
from effasr.data.corpus import Corpus
from effasr.data.features import SAMPLE_RATE, FeatureConfig
from effasr.data.tokenizer import Tokenizer, load_tokenizer
from effasr.distributed.batch_norm import running_statistics
from effasr.distributed.process_group import World
from effasr.distributed.replicate import replicate
from effasr.model.asr import ASRModel, ModelConfig
from effasr.optim.adamw import build_adamw
from effasr.optim.ema import WeightAverage
from effasr.optim.groups import parameter_groups
from effasr.optim.schedules import learning_rate_ratio
from effasr.training.config import TrainConfig, resolve_losses
from effasr.training.graph import MicroBatchGraph
from effasr.training.objective import Objective
from effasr.training.step import Trainee, run_micro_batch


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint to go on from: its folder, and the state beside the weights."""

    path: Path
    state: dict[str, Any]


def resolve(config: TrainConfig, saved: Saved | None) -> TrainConfig:
    """The configuration with nothing left open: what config.yaml holds.

    Raises:
        ValueError: The model and the losses do not fit each other.
    """
    source = _source_of_model(config, saved)
    if source is not None and config.init_from is not None and config.model == ModelConfig():
        config = replace(config, model=checkpoint.read_description(source).model)
    _check_features(config.model.features)
    loss = resolve_losses(config.loss, config.model)
    return replace(config, loss=loss, training=replace(config.training, restart=False))


def _check_features(features: FeatureConfig) -> None:
    """What the data are planned and loaded for; a filter bank for another rate would not show."""
    for name, loaded in (("sample_rate", SAMPLE_RATE), ("hop", FeatureConfig().hop)):
        if getattr(features, name) != loaded:
            raise ValueError(
                f"`model.features.{name}` must be {loaded}, with which training loads audio, "
                f"but is {getattr(features, name)}."
            )


def find_tokenizer(config: TrainConfig, saved: Saved | None) -> Tokenizer:
    """That of the checkpoint, of the model to begin with, or of ``data.tokenizer``.

    Raises:
        ValueError: There is none, or there are two.
    """
    source = _source_of_model(config, saved)
    if config.init_from is not None and config.data.tokenizer:
        raise ValueError(
            f"`data.tokenizer` must be left out where `init_from` is given, because the model has "
            f"its own, but is {config.data.tokenizer!r}."
        )
    if source is not None:
        return checkpoint.read_tokenizer(source)
    if not config.data.tokenizer:
        raise ValueError(
            "`data.tokenizer` must be a folder that `effasr tokenizer` wrote, but is not given."
        )
    return load_tokenizer(config.data.tokenizer)


def _source_of_model(config: TrainConfig, saved: Saved | None) -> Path | None:
    if saved is not None:
        return saved.path
    return None if config.init_from is None else checkpoint.resolve(config.init_from)


def build_model(
    config: TrainConfig, vocab_size: int, saved: Saved | None, device: torch.device
) -> ASRModel:
    """The model, with weights drawn by the seed, or read.

    Raises:
        ValueError: Weights to read do not fit.
    """
    source = _source_of_model(config, saved)
    if source is not None:
        # A model of Hugging Face's may have more classes than its tokenizer has tokens.
        vocab_size = checkpoint.read_description(source).vocab_size
    torch.manual_seed(config.seed)
    model = ASRModel(config.model, vocab_size)
    if source is not None:
        checkpoint.load_weights(model, source)
    return model.to(device).train()


def build_trainee(config: TrainConfig, model: ASRModel, world: World) -> Trainee:
    """The model with its optimizer and everything else that a step needs."""
    groups = parameter_groups(model, config.optimizer.weight_decay, config.optimizer.exempt)
    decay = config.training.ema_decay
    peak, schedule, steps = config.optimizer.lr, config.schedule, config.training.max_steps
    if config.training.compile:
        # In place: the state dict keeps its names.
        model.compile(fullgraph=True, dynamic=False)
    trainee = Trainee(
        model=replicate(model, world),
        optimizer=build_adamw(groups, config.optimizer, world.device),
        learning_rate=lambda step: peak * learning_rate_ratio(schedule, step, steps),
        objective=Objective(config.loss, world.device),
        average=None if decay is None else WeightAverage(model, decay),
        statistics=running_statistics(model),
        world=world,
        autocast=make_autocast(config.training.precision, world.device),
        seed=config.seed,
        clip=config.training.clip,
        label_smoothing=config.loss.label_smoothing,
    )
    return _recorded(trainee, config.model) if config.training.cuda_graph else trainee


def _recorded(trainee: Trainee, model: ModelConfig) -> Trainee:
    """The trainee, whose micro-batches are a CUDA graph.

    Raises:
        ValueError: It is a transducer, it is not on a GPU, or there are several processes.
    """
    world = trainee.world
    if model.transducer is not None:
        raise ValueError(
            "`training.cuda_graph` cannot record a transducer, whose loss the host divides by "
            "lengths, but model.transducer is given: set it to false."
        )
    if world.device.type != "cuda":
        raise ValueError(
            f"`training.cuda_graph` needs a GPU, but the run is on {world.device.type}: set it to "
            "false."
        )
    if world.size > 1:
        raise ValueError(
            f"`training.cuda_graph` needs one process, but there are {world.size}: set it to false."
        )
    parameters = (p for p in trainee.model.parameters() if p.requires_grad)
    run = partial(run_micro_batch, trainee)
    graph = MicroBatchGraph(run, world.device, parameters, trainee.model.buffers())
    return replace(trainee, graph=graph)


def load_corpus(config: TrainConfig, tokenizer: Tokenizer, saved: Saved | None) -> Corpus:
    """The utterances to train on.

    Raises:
        ValueError: There are none, or they are not those of the checkpoint.
    """
    if not config.data.train:
        raise ValueError("`data.train` must name at least one manifest, but is empty.")
    decoder = config.model.decoder
    corpus = Corpus.load(
        config.data.train,
        tokenizer,
        config.data,
        ctc=config.model.ctc,
        max_frames=config.model.encoder.max_frames,
        max_positions=None if decoder is None else decoder.max_positions,
    )
    if saved is not None and saved.state["corpus"] != corpus.fingerprint:
        raise ValueError(
            "`data.train` must hold the very utterances, texts and order that the checkpoint was "
            "trained on, but it has changed. Restore it, choose another `name`, or begin anew "
            "with training.restart=true."
        )
    return corpus


def make_autocast(
    precision: str, device: torch.device
) -> Callable[[], AbstractContextManager[None]]:
    """What makes the context for a forward: ``auto``, ``float32`` or ``bfloat16``."""
    if precision == "auto":
        precision = "bfloat16" if device.type == "cuda" else "float32"
    if precision == "float32":
        return nullcontext
    return partial(torch.autocast, device.type, torch.bfloat16)  # type: ignore[return-value]
