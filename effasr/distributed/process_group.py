"""The processes of one run: how they meet, what they tell each other, how they part."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class World:
    """This process among those of the run. With a size of 1, every method is a no-op.

    Attributes:
        rank: Of this process, from 0.
        size: Number of processes.
        device: Of this process.
    """

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files and talks to the user."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Replace ``tensor`` by its sum over all ranks; on a GPU the host does not wait."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def broadcast(self, value: T) -> T:
        """The value of rank 0, on every rank."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]


@contextmanager
def joined(
    device: str = "auto", timeout_s: float = 600.0, environment: Mapping[str, str] | None = None
) -> Iterator[World]:
    """Meet the other processes that torchrun started; part when the block ends.

    Args:
        device: ``cpu``, ``cuda``, or ``auto``: a GPU where there is one. torchrun's LOCAL_RANK
            chooses which.
        timeout_s: A collective call that waits longer for another rank is an error, so that
            no rank waits forever for one that died or hangs.
        environment: Where to find RANK, LOCAL_RANK and WORLD_SIZE; ``os.environ`` by default.
            Without them, this process is alone.

    Raises:
        ValueError: The device is unknown, or there is none for this rank.
    """
    environment = os.environ if environment is None else environment
    rank = int(environment.get("RANK", 0))
    size = int(environment.get("WORLD_SIZE", 1))
    here = _choose_device(device, int(environment.get("LOCAL_RANK", 0)))
    if here.type == "cuda":
        torch.cuda.set_device(here)
    if size == 1:
        yield World(0, 1, here)
        return
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if here.type == "cuda" else "gloo",
        timeout=timedelta(seconds=timeout_s),
        device_id=here if here.type == "cuda" else None,
    )
    try:
        yield World(rank, size, here)
        # So that no rank takes the store down while another still talks to it.
        dist.barrier()
    except BaseException:
        # NCCL's teardown would wait for peers that may be gone; the end of the process will do.
        if here.type != "cuda":
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _choose_device(name: str, local_rank: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise ValueError(f"`device` must be auto, cpu or cuda, but is {name!r}.")
    if not torch.cuda.is_available():
        raise ValueError("`device` must not be cuda here: PyTorch sees no GPU. Use cpu or auto.")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"`device`: local rank {local_rank} needs its own GPU, but there are "
            f"{torch.cuda.device_count()}. Start fewer processes per node."
        )
    return torch.device("cuda", local_rank)
