"""Checks that a run can use CUDA graphs, and records its micro-batches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import nn

from effasr.distributed.grad_sync import FlatGradientSync
from effasr.distributed.process_group import DistributedContext
from effasr.model.config import ModelConfig
from effasr.training.cuda_graph.graph import MicroBatchGraph
from effasr.training.cuda_graph.rules import obstacles_of_model
from effasr.training.step import TrainState, run_micro_batch


def check_recordable(model: ModelConfig, context: DistributedContext) -> None:
    """Raise a ValueError for a model that cannot be recorded, or without a GPU."""
    for obstacle in obstacles_of_model(model, context.device):
        raise ValueError(obstacle.message)


def recorded(state: TrainState, model: nn.Module) -> TrainState:
    """Return the state with micro-batches that are recorded at the first step, on each rank."""
    context = state.context
    if context.size > 1:
        # Before the recording, which keeps the addresses of gradients.
        state = replace(state, grad_sync=FlatGradientSync(model, context))
    parameters = (p for p in model.parameters() if p.requires_grad)
    buffers = list(model.buffers())
    if state.adascale is not None:
        buffers.append(state.adascale.square)
    run = partial(run_micro_batch, state)
    return replace(state, graph=MicroBatchGraph(run, context.device, parameters, buffers))
