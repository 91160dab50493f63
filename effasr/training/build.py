"""Builds the components of a resolved run."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from effasr import checkpoint
from effasr.checks import check
from effasr.data.batch import BatchTransfer
from effasr.distributed.averager import Averager, LocalUpdates
from effasr.distributed.batch_norm import running_statistics
from effasr.distributed.fsdp import watch_gradients
from effasr.distributed.grad_sync import FlatGradientSync, gradient_sync
from effasr.distributed.process_group import DistributedContext
from effasr.model.asr import ASRModel
from effasr.model.cost import recomputed_costs
from effasr.model.encoder import FastConformerEncoder
from effasr.model.learning_cost import learning_cost, learning_text_cost, unreached_layers
from effasr.nn.experts import ExpertFeedForward, ExpertUse
from effasr.nn.stack import apply_activation_checkpointing, compile_layers
from effasr.optim.adamw import build_adamw, build_lamb, parameter_groups
from effasr.optim.adascale import AdaScale
from effasr.optim.ema import WeightAverage
from effasr.optim.fused_adamw import FusedAdamW
from effasr.optim.loss_scale import LossScale
from effasr.optim.muon import Muon, Share, muon_groups
from effasr.optim.schedules import learning_rate_ratio, peak_learning_rate, relative_batch, scaled
from effasr.training import cuda_graph
from effasr.training.checkpointing.resume import Saved
from effasr.training.config import ASYNCHRONOUS, TrainConfig, adascale_scale
from effasr.training.fault_tolerance.phase_tracker import PhaseTracker
from effasr.training.kernels import select_backends
from effasr.training.loss import Objective
from effasr.training.metrics import Gauge
from effasr.training.step import StepConfig, TrainState, run_micro_batch
from effasr.training.step_stats import HostCopy, StepCosts
from effasr.training.strategies.parallelism import (
    SynchronousStrategy,
    check_residual_stream,
    distribute,
    has_weight_copies,
    narrow_dtype,
)
from effasr.training.strategies.parallelism import make_averager as default_averager
from effasr.training.strategies.weight_copies import WeightCopies
from effasr.training.untranscribed.teacher import Teacher
from effasr.training.weights import (
    joins_language_model,
    prepare_weights,
    replaces_tokenizer,
    source_of_model,
)

if TYPE_CHECKING:
    from effasr.training.diagnostics.monitor import CTCBaseline


def build_model(
    config: TrainConfig, vocab_size: int, saved: Saved | None, device: torch.device
) -> ASRModel:
    """Build the model, with weights that are initialised by the seed, or read."""
    source = source_of_model(config, saved)
    joins = saved is None and joins_language_model(config, source)
    if source is not None and not joins:
        description = checkpoint.read_description(source)
        if saved is not None or not replaces_tokenizer(config.data.tokenizer, source):
            # A model from Hugging Face may have more classes than its tokenizer has tokens.
            vocab_size = description.vocab_size
    torch.manual_seed(config.seed)
    model = ASRModel(config.model, vocab_size)
    language_model = model.language_model
    if language_model is not None and vocab_size > language_model.vocab_size:
        raise ValueError(
            "`data.tokenizer` must have at most the "
            f"{language_model.vocab_size} tokens of the language model, but has "
            f"{vocab_size}: use the tokenizer of its folder."
        )
    prepare_weights(model, config, source, saved)
    model = model.to(device).train()
    select_backends(model, config, device)
    return model


def build_strategy(config: TrainConfig, context: DistributedContext) -> SynchronousStrategy:
    if config.training.strategy in ASYNCHRONOUS and context.size > 1:
        # Imported here, as other runs need no sockets.
        from effasr.training.strategies.asynchronous import AsynchronousStrategy, form_learners

        if (learners := form_learners(config, context)) is not None:
            return AsynchronousStrategy(config, learners)
    return SynchronousStrategy(config, context)


def build_train_state(
    config: TrainConfig,
    model: ASRModel,
    context: DistributedContext,
    make_averager: Callable[[nn.Module, Optimizer, list[Tensor]], Averager] | None = None,
    learners: int = 1,
    baseline: "CTCBaseline | None" = None,
) -> TrainState:
    """Build the optimizer of a model and everything else that a step needs.

    The ranks of ``context``, one of several ``learners``, make a step together. ``make_averager``
    is by default that of a strategy in which all ranks make each step together.
    """
    is_recorded = cuda_graph.uses_graph(config, context.device)
    # From here on the choice is made.
    config = replace(config, training=replace(config.training, cuda_graph=is_recorded))
    settings = config.training
    each_item, recomputed = int(settings.activation_checkpointing), None
    if each_item:
        apply_activation_checkpointing(model, each_item)
        if model.language_model is not None:
            model.language_model.checkpoint_activations(each_item)
        idle = unreached_layers(model)
        recomputed = recomputed_costs(config.model, model.vocab_size, each_item, idle)
    if settings.compile and settings.strategy == "fsdp2":
        # Layer by layer, because the all-gather of parameters between layers is not compiled.
        compile_layers(model)
    elif settings.compile:
        # In place: the state dict keeps its names.
        model.compile(fullgraph=True, dynamic=False)
    if is_recorded:
        cuda_graph.check_recordable(config.model, context.device)
    costs = StepCosts(learning_cost(model), learning_text_cost(model), recomputed)
    wrapped = distribute(config, model, context)
    # The wrapper adds a prefix to parameter names, which checkpoints do not have.
    trained = model if isinstance(wrapped, DistributedDataParallel) else wrapped
    groups = parameter_groups(trained, config.optimizer.weight_decay, config.optimizer.exempt)
    optimizer = build_optimizer(trained, groups, config, context)
    statistics = running_statistics(trained)
    average, teacher = None, None
    if settings.ema_decay is not None:
        reference = settings.ema_reference_micro_batches
        ratio = relative_batch(config.data.micro_batches, reference)
        average = WeightAverage(trained, settings.ema_decay, ratio)
    autocast = make_autocast(settings.precision, context.device)
    is_float16 = narrow_dtype(settings.precision, context.device) == torch.float16
    if settings.teacher is not None and average is not None:
        teacher = Teacher(model, average, settings.teacher, autocast)
    if make_averager is None:
        averager = default_averager(config, trained, optimizer, statistics, context)
    else:
        averager = make_averager(trained, optimizer, statistics)
    peak = peak_learning_rate(config.optimizer, config.data.micro_batches)
    adascale = None
    if config.optimizer.adascale is not None:
        check(
            not is_float16,
            "optimizer.adascale",
            "be null in float16, where the loss has a factor that changes",
            "given",
            "set training.precision=bfloat16 or float32",
        )
        apart = context.size if isinstance(averager, LocalUpdates) else learners
        sharded = isinstance(trained, FSDPModule)
        adascale = AdaScale(
            () if sharded else trained.parameters(),
            config.optimizer.adascale,
            scale=adascale_scale(config, apart),
            # By which the step multiplies the loss.
            factor=context.size,
            device=context.device,
            copy=HostCopy,
            learners=learners,
        )
        if sharded:
            watch_gradients(trained, adascale.see)
    check_residual_stream(config, context.device)
    weights = None
    if has_weight_copies(config, context):
        # AdaScale has a hook for every gradient, ddp one for the last micro-batch alone.
        lazily, accumulate = not settings.compile, adascale is None
        weights = WeightCopies(trained, lazily=lazily, accumulate=accumulate)
    if isinstance(optimizer, FusedAdamW):
        optimizer.follow(average and average.by_parameter, weights and weights.follow_updates())
    grad_sync = gradient_sync(wrapped)
    if is_recorded and context.size > 1:
        # Before the recording, which keeps the addresses of gradients.
        grad_sync = FlatGradientSync(trained, context)
    masks_after = config.model.spec_augment.after_ctc
    blind = math.nan if baseline is None else baseline.loss
    objective = Objective(config.loss, context.device, masks_after, blind)
    if masks_after is not None:
        model.masks_on = objective.masks_on
    state = TrainState(
        config=StepConfig(
            learning_rate=lambda made: (
                peak * learning_rate_ratio(config.schedule, made, settings.known_steps)
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
        objective=objective,
        grad_sync=grad_sync,
        averager=averager,
        statistics=statistics,
        average=average,
        adascale=adascale,
        weights=weights,
        transfer=BatchTransfer(context.device) if context.device.type == "cuda" else None,
        phases=PhaseTracker(on_gpu=context.device.type == "cuda"),
        teacher=teacher,
        loss_scale=LossScale(context.device) if is_float16 else None,
    )
    if not is_recorded:
        return state
    parameters = (p for p in trained.parameters() if p.requires_grad)
    buffers = [*trained.buffers(), *([] if adascale is None else [adascale.square])]
    run = partial(run_micro_batch, state)
    encoder = model.encoder
    if not (isinstance(encoder, FastConformerEncoder) and len(encoder.config.context) > 1):
        encoder = None
    graph = cuda_graph.MicroBatchGraph(run, context.device, parameters, buffers, encoder=encoder)
    return replace(state, graph=graph)


def build_optimizer(
    model: nn.Module,
    groups: list[dict[str, Any]],
    config: TrainConfig,
    context: DistributedContext,
) -> Optimizer:
    settings = scaled(config.optimizer, config.data.micro_batches)
    if settings.name == "lamb":
        return build_lamb(groups, settings, context.device)
    if settings.name == "adamw":
        return build_adamw(groups, settings, context.device)
    share = Share()
    # Other strategies have gradients of their own on each rank.
    if context.size > 1 and config.training.strategy in ("ddp", "h_adpsgd"):
        share = Share(context.rank, context.size, context.all_gather_tensor)
    return Muon(
        muon_groups(model, groups),
        momentum=settings.momentum,
        share=share,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
    )


def build_gauges(state: TrainState) -> dict[str, Gauge]:
    """Return what counts further figures for metrics.jsonl, by name in a checkpoint."""
    gauges: dict[str, Gauge] = {}
    if state.loss_scale is not None:
        gauges["loss_scale"] = state.loss_scale
    # With fsdp2, this is not the model whose weights are published.
    model = cast(ASRModel, state.grad_sync.module)
    if model.best_rq is not None:
        # Imported here, as it reads audio.
        from effasr.training.untranscribed.pretraining import CodeUse

        gauges["code_use"] = CodeUse(model.best_rq)
    if state.teacher is not None:
        gauges["teacher"] = state.teacher
    if any(isinstance(module, ExpertFeedForward) for module in model.modules()):
        gauges["expert_use"] = ExpertUse(model)
    return gauges


def make_autocast(
    precision: str, device: torch.device
) -> Callable[[], AbstractContextManager[None]]:
    dtype = narrow_dtype(precision, device)
    if dtype is None:
        return nullcontext
    return partial(torch.autocast, device.type, dtype)  # type: ignore[return-value]
