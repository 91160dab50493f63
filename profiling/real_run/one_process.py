"""``effasr train`` in one process that is wrapped as one of several are.

    python profiling/real_run/one_process.py RECIPE [path.to.field=value ...]

A run with one process exchanges nothing, so that on a machine with one GPU nothing of what several
need would run. Here a process group of one is made, by NCCL on a GPU and by gloo elsewhere, and the
model is wrapped for it: replicated with ``training.strategy=ddp``, sharded with ``fsdp2``.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from effasr.cli.main import main as effasr
from effasr.distributed.ddp import replicate
from effasr.distributed.fsdp import shard
from effasr.distributed.process_group import NCCL, DistributedContext
from effasr.training import build
from effasr.training.config import TrainConfig
from effasr.training.strategies.parallelism import is_bfloat16


def wrap(config: TrainConfig, model: nn.Module, context: DistributedContext) -> nn.Module:
    """Wrap a model as `effasr.training.strategies.parallelism.distribute` does on several ranks."""
    if config.training.strategy == "fsdp2":
        trained = copy.deepcopy(model)
        model.cpu()
        in_bfloat16 = is_bfloat16(config.training.precision, context.device)
        wrapped = shard(trained, context, torch.bfloat16 if in_bfloat16 else None)
    else:
        # Any size but one; the group decides among how many gradients are averaged.
        wrapped = replicate(model, replace(context, size=0))
    kinds = " ".join(kind.__name__ for kind in type(wrapped).__mro__)
    kind = "FSDPModule" if "FSDPModule" in kinds else type(wrapped).__name__
    sys.stdout.write(f"one_process: {kind} by {dist.get_backend_config()}\n")
    return wrapped  # type: ignore[return-value]


def check_collectives(device: torch.device) -> None:
    """Call what a run of several processes calls.

    Raises:
        RuntimeError: A result is wrong.
    """
    numbers = torch.arange(5.0, device=device)
    summed = numbers.clone()
    dist.all_reduce(summed)
    dist.broadcast(summed, src=0)
    gathered: list[object] = [None]
    dist.all_gather_object(gathered, {"rank": 0})
    said = ["word"]
    dist.broadcast_object_list(said, src=0)
    dist.barrier()
    if not torch.equal(summed, numbers) or gathered != [{"rank": 0}] or said != ["word"]:
        raise RuntimeError(f"collective calls gave {summed}, {gathered} and {said}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; returns the exit code of `effasr train`."""
    given = sys.argv[1:] if arguments is None else arguments
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        NCCL if on_gpu else "gloo",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        device_id=device if on_gpu else None,
    )
    check_collectives(device)
    build.distribute = wrap
    code = effasr(["train", *given])
    dist.barrier()
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
