"""Which runs may be CUDA graphs, and the recording of theirs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import nn

from effasr.distributed.flat_grad_all_reduce import GradientSum
from effasr.distributed.process_group import World
from effasr.model.asr import ModelConfig
from effasr.training.cuda_graph.graph import MicroBatchGraph
from effasr.training.step import Trainee, run_micro_batch


def check_recordable(model: ModelConfig, world: World) -> None:
    """Refuse what cannot be recorded.

    Raises:
        ValueError: It is a transducer, or not on a GPU.
    """
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


def recorded(trainee: Trainee, model: nn.Module) -> Trainee:
    """The trainee, whose micro-batches are a CUDA graph; of several ranks, each has one.

    Args:
        trainee: Its model is not replicated.
        model: The trainee's.
    """
    world = trainee.world
    # Before the recording, which keeps where gradients lie.
    total = GradientSum(model, world) if world.size > 1 else None
    parameters = (p for p in model.parameters() if p.requires_grad)
    buffers = list(model.buffers())
    if trainee.adascale is not None:
        buffers.append(trainee.adascale.square)
    run = partial(run_micro_batch, trainee)
    graph = MicroBatchGraph(run, world.device, parameters, buffers)
    return replace(trainee, graph=graph, total=total)
