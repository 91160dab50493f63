"""Builds the components of a run from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from effasr import checkpoint
from effasr import config as configuration
from effasr.data.features.config import FeatureConfig
from effasr.data.features.frame_geometry import SAMPLE_RATE
from effasr.data.tokenizer import NoTokenizer, Tokenizer, load_tokenizer
from effasr.distributed.averager import Averager
from effasr.distributed.batch_norm import running_statistics
from effasr.distributed.grad_sync import gradient_sync
from effasr.distributed.process_group import DistributedContext
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.cost import recomputed_costs
from effasr.model.learning_cost import learning_cost, learning_text_cost, unreached_layers
from effasr.nn.experts import ExpertFeedForward, ExpertUse
from effasr.nn.stack import apply_activation_checkpointing, compile_layers
from effasr.optim.adamw import build_adamw, build_lamb, parameter_groups
from effasr.optim.adascale import AdaScale
from effasr.optim.batch_scaling import peak_learning_rate, relative_batch
from effasr.optim.ema import WeightAverage
from effasr.optim.schedules import learning_rate_ratio
from effasr.training.checkpointing.resume import Saved
from effasr.training.config import TrainConfig, resolve_losses
from effasr.training.cuda_graph.recording import check_recordable, recorded
from effasr.training.cuda_graph.rules import obstacles_of_batches, uses_graph
from effasr.training.fault_tolerance.phase_tracker import PhaseTracker
from effasr.training.language_model import (
    check_vocabulary,
    resolve_language_model,
)
from effasr.training.loss import Objective
from effasr.training.starting.vocabulary import replaces_tokenizer
from effasr.training.starting.weights import check_trained, joins_language_model, prepare_weights
from effasr.training.step import StepConfig, TrainState
from effasr.training.step_stats import HostCopy, StepCosts
from effasr.training.strategies.parallelism import (
    check_strategy,
    distribute,
    has_weight_copies,
    is_bfloat16,
)
from effasr.training.strategies.parallelism import make_averager as default_averager
from effasr.training.strategies.weight_copies import WeightCopies
from effasr.training.untranscribed.checks import check_text
from effasr.training.untranscribed.gauge import CodeUse, Gauge
from effasr.training.untranscribed.teacher import Teacher


def resolve(config: TrainConfig, saved: Saved | None) -> TrainConfig:
    """Return the configuration with all defaults resolved, as config.yaml has it.

    ``data.frame_budget: auto`` of a run that begins stays, because it needs the corpus: see
    `effasr.training.calibration.calibrate.settle`.

    Raises:
        ValueError: Settings contradict each other.
    """
    source = _source_of_model(config, saved)
    if config.data.frame_budget == "auto" and saved is not None:
        config = _with_saved_budgets(config, saved)
    text_encoder = config.model.text_encoder
    is_default = config.model == ModelConfig(text_encoder=text_encoder)
    if source is not None and config.init_from is not None and is_default:
        model = checkpoint.read_description(source).model
        model = replace(model, text_encoder=text_encoder or model.text_encoder)
        config = replace(config, model=model)
    if config.model.language_model is not None:
        config = resolve_language_model(config, saved)
    _check_features(config.model.features)
    _check_static_shapes(config)
    check_strategy(config)
    check_trained(config)
    check_text(config)
    if config.optimizer.adascale is not None:
        _adascale_scale(config)
    loss = resolve_losses(config.loss, config.model)
    return replace(config, loss=loss, training=replace(config.training, restart=False))


def _with_saved_budgets(config: TrainConfig, saved: Saved) -> TrainConfig:
    """Return the configuration with the budgets that the run began with."""
    before = configuration.complete(TrainConfig, saved.state["config"])["data"]
    names = ("frame_budget", "token_budget", "max_sequences")
    return replace(config, data=replace(config.data, **{name: before[name] for name in names}))


def _check_features(features: FeatureConfig) -> None:
    """Check the sample rate and hop that the data are planned and loaded for."""
    for name, loaded in (("sample_rate", SAMPLE_RATE), ("hop", FeatureConfig().hop)):
        if getattr(features, name) != loaded:
            raise ValueError(
                f"`model.features.{name}` must be {loaded}, with which training loads audio, "
                f"but is {getattr(features, name)}."
            )


def _check_static_shapes(config: TrainConfig) -> None:
    """Check that batches have one shape where a step is recorded or compiled."""
    if config.training.cuda_graph is True:
        for obstacle in obstacles_of_batches(config):
            raise ValueError(obstacle.message)
    if config.training.compile and config.data.strategy != "packed":
        raise ValueError(
            f"`training.compile` must be false for `data.strategy` = {config.data.strategy}, "
            "whose batches have a shape each, but is true: set it to false, or train with "
            "strategy packed."
        )


def find_tokenizer(config: TrainConfig, saved: Saved | None) -> Tokenizer:
    """Return the tokenizer of the checkpoint, or of ``data.tokenizer``, or of ``init_from``.

    Raises:
        ValueError: None is given.
    """
    if config.model.best_rq is not None:
        return NoTokenizer()
    source = _source_of_model(config, saved)
    if saved is None and joins_language_model(config, source):
        assert config.model.language_model is not None
        return load_tokenizer(config.data.tokenizer or config.model.language_model.path)
    own = None if source is None else checkpoint.read_tokenizer(source)
    # A run that goes on has the tokenizer of its checkpoint.
    is_kept = saved is not None or not config.data.tokenizer
    if own is not None and is_kept and not isinstance(own, NoTokenizer):
        if saved is not None:
            _check_tokenizer(config, saved, own)
        return own
    if not config.data.tokenizer:
        raise ValueError(
            "`data.tokenizer` must be a folder that `effasr tokenizer` wrote, but is not given."
        )
    return load_tokenizer(config.data.tokenizer)


def _check_tokenizer(config: TrainConfig, saved: Saved, own: Tokenizer) -> None:
    """Check that a tokenizer of another path is that of the checkpoint.

    Raises:
        ValueError: It is another one, or cannot be read.
    """
    before, now = saved.state["config"]["data"].get("tokenizer"), config.data.tokenizer
    if now and now != before and load_tokenizer(now).pieces() != own.pieces():
        raise ValueError(
            f"`data.tokenizer` must stay the one of the checkpoint, from {before}, but {now} has "
            "other pieces: leave it, or begin anew with training.restart=true."
        )


def _source_of_model(config: TrainConfig, saved: Saved | None) -> Path | None:
    if saved is not None:
        return saved.path
    return None if config.init_from is None else checkpoint.resolve(config.init_from)


def build_model(
    config: TrainConfig, vocab_size: int, saved: Saved | None, device: torch.device
) -> ASRModel:
    """Build the model, with weights that are initialised by the seed, or read.

    Raises:
        ValueError: Weights to read do not fit, or there is nothing to freeze or to adapt.
    """
    source = _source_of_model(config, saved)
    joins = saved is None and joins_language_model(config, source)
    if source is not None and not joins:
        description = checkpoint.read_description(source)
        keeps_outputs = description.model.best_rq is None or config.model.best_rq is not None
        is_replaced = saved is None and replaces_tokenizer(config.data.tokenizer, source)
        if keeps_outputs and not is_replaced:
            # A model from Hugging Face may have more classes than its tokenizer has tokens.
            vocab_size = description.vocab_size
    torch.manual_seed(config.seed)
    model = ASRModel(config.model, vocab_size)
    check_vocabulary(model)
    prepare_weights(model, config, source, is_resumed=saved is not None)
    return model.to(device).train()


def build_train_state(
    config: TrainConfig,
    model: ASRModel,
    context: DistributedContext,
    make_averager: Callable[[nn.Module, Optimizer, list[Tensor]], Averager] | None = None,
) -> TrainState:
    """Build the optimizer of a model and everything else that a step needs.

    Args:
        config: Configuration of the run.
        model: Model on the device.
        context: The ranks that make a step together.
        make_averager: Builds the averager from the model, the optimizer and the statistics of batch
            norms; by default that of a strategy in which all ranks make each step together.
    """
    is_recorded = uses_graph(config, context.device)
    # From here on the choice is made.
    config = replace(config, training=replace(config.training, cuda_graph=is_recorded))
    settings = config.training
    every, recomputed = int(settings.activation_checkpointing), None
    if every:
        apply_activation_checkpointing(model, every)
        if model.language_model is not None:
            model.language_model.checkpoint_activations(every)
        idle = unreached_layers(model)
        recomputed = recomputed_costs(config.model, model.vocab_size, every, idle)
    if settings.compile and settings.strategy == "fsdp2":
        # Layer by layer, because the all-gather of parameters between layers is not compiled.
        compile_layers(model)
    elif settings.compile:
        # In place: the state dict keeps its names.
        model.compile(fullgraph=True, dynamic=False)
    if is_recorded:
        check_recordable(config.model, context)
    costs = StepCosts(learning_cost(model), learning_text_cost(model), recomputed)
    wrapped = distribute(config, model, context)
    # The wrapper adds a prefix to parameter names, which checkpoints do not have.
    trained = model if isinstance(wrapped, DistributedDataParallel) else wrapped
    groups = parameter_groups(trained, config.optimizer.weight_decay, config.optimizer.exempt)
    build_optimizer = build_lamb if config.optimizer.name == "lamb" else build_adamw
    optimizer = build_optimizer(groups, config.optimizer, context.device)
    statistics = running_statistics(trained)
    average = _average(config, trained)
    autocast = make_autocast(settings.precision, context.device)
    teacher = None
    if settings.teacher is not None and average is not None:
        teacher = Teacher(model, average, settings.teacher, autocast)
    if make_averager is None:
        averager = default_averager(config, trained, optimizer, statistics, context)
    else:
        averager = make_averager(trained, optimizer, statistics)
    peak = peak_learning_rate(config.optimizer, config.data.micro_batches)
    state = TrainState(
        config=StepConfig(
            learning_rate=lambda made: (
                peak * learning_rate_ratio(config.schedule, made, settings.max_steps)
            ),
            autocast=autocast,
            costs=costs,
            seed=config.seed,
            clip=settings.clip,
            label_smoothing=config.loss.label_smoothing,
        ),
        context=context,
        model=wrapped,
        optimizer=optimizer,
        objective=Objective(config.loss, context.device),
        grad_sync=gradient_sync(wrapped),
        averager=averager,
        statistics=statistics,
        average=average,
        adascale=_adascale(config, trained, context),
        phases=PhaseTracker(on_gpu=context.device.type == "cuda"),
        teacher=teacher,
    )
    state = replace(state, weights=_weight_copies(state, trained, config))
    return recorded(state, trained) if is_recorded else state


def _weight_copies(state: TrainState, model: nn.Module, config: TrainConfig) -> WeightCopies | None:
    if not has_weight_copies(config, state.context):
        return None
    # A hook for every gradient is that of adascale; that of ddp, for the last micro-batch alone.
    settings, accumulate = config.training, state.adascale is None
    return WeightCopies(model, lazily=not settings.compile, accumulate=accumulate)


def build_gauges(state: TrainState) -> dict[str, Gauge]:
    """Return what counts further figures for metrics.jsonl, by name in a checkpoint."""
    gauges: dict[str, Gauge] = {}
    # With fsdp2, this is not the model whose weights are published.
    model = cast(ASRModel, state.grad_sync.module)
    if model.best_rq is not None:
        gauges["code_use"] = CodeUse(model.best_rq)
    if state.teacher is not None:
        gauges["teacher"] = state.teacher
    if any(isinstance(module, ExpertFeedForward) for module in model.modules()):
        gauges["expert_use"] = ExpertUse(model)
    return gauges


def _average(config: TrainConfig, model: nn.Module) -> WeightAverage | None:
    decay, reference = config.training.ema_decay, config.training.ema_reference_micro_batches
    if decay is None:
        return None
    return WeightAverage(model, decay, relative_batch(config.data.micro_batches, reference))


def _adascale(
    config: TrainConfig, model: nn.Module, context: DistributedContext
) -> AdaScale | None:
    settings = config.optimizer.adascale
    if settings is None:
        return None
    return AdaScale(
        model.parameters(),
        settings,
        scale=_adascale_scale(config),
        # As in `effasr.training.step.run_micro_batch`.
        factor=context.size,
        device=context.device,
        copy=HostCopy,
    )


def _adascale_scale(config: TrainConfig) -> float:
    """Return the ratio of the batch to the reference batch.

    Raises:
        ValueError: It is below 1, or a step has too few micro-batches for a variance.
    """
    optimizer, count = config.optimizer, config.data.micro_batches
    assert optimizer.adascale is not None
    if count < 2:
        raise ValueError(
            f"`data.micro_batches` must be at least 2 with optimizer.adascale, which measures how "
            f"their gradients differ, but is {count}: take more and smaller ones."
        )
    if optimizer.adascale.scale is not None:
        return optimizer.adascale.scale
    scale = relative_batch(count, optimizer.lr_reference_micro_batches)
    if scale < 1:
        raise ValueError(
            f"`optimizer.lr_reference_micro_batches` must be at most data.micro_batches, {count}, "
            f"with optimizer.adascale, but is {optimizer.lr_reference_micro_batches}."
        )
    return scale


def make_autocast(
    precision: str, device: torch.device
) -> Callable[[], AbstractContextManager[None]]:
    """Return a function that makes the autocast context of a forward."""
    if not is_bfloat16(precision, device):
        return nullcontext
    return partial(torch.autocast, device.type, torch.bfloat16)  # type: ignore[return-value]
