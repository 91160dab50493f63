"""The processes of one run: how they meet, what they tell each other, how they part."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from effasr.distributed.restart_id import agree

T = TypeVar("T")

NCCL = "cpu:gloo,cuda:nccl"
"""The backend of processes with a GPU each."""

_FIRST_FAILURE = "first_failure"

_GRACE_S = 0.1
"""For gloo's threads to let go of the last calls."""


class PeerFailed(RuntimeError):
    """Another process of the run says why it failed: this one need not."""


@dataclass(frozen=True, slots=True)
class World:
    """This process among those of the run, or of a part. With a size of 1, methods are no-ops.

    Attributes:
        rank: Of this process among them, from 0.
        size: Number of processes.
        device: Of this process.
        group: Of these processes, where they are not all of the run.
        store: What all processes of the run read and write; None where there is only one.
        left: What took this world's place when ranks of it were lost, the newest last.
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    store: Store | None = None
    left: list[World] = field(default_factory=list, repr=False, compare=False)

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files and talks to the user."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Replace ``tensor`` by its sum over all ranks; on a GPU the host does not wait."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]

    def broadcast(self, value: T) -> T:
        """The value of rank 0, on every rank."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def barrier(self) -> None:
        """Wait for the other ranks; for those that are left, where some are lost."""
        world = self.left[-1] if self.left else self
        if world.size > 1:
            dist.barrier(group=world.group)

    def part(self, ranks: Sequence[int], backend: str | None = None) -> World:
        """This process among some of the ranks, all of which call it, and no other needs to.

        Args:
            ranks: Of this world, ascending.
            backend: Of their group; None for that of all.
        """
        group = None
        if len(ranks) > 1:
            everyone = dist.get_process_group_ranks(self.group or dist.group.WORLD)
            own = [everyone[rank] for rank in ranks]
            group = cast(
                dist.ProcessGroup,
                dist.new_group(own, backend=backend, use_local_synchronization=True),
            )
        place = list(ranks).index(self.rank)
        return World(place, len(ranks), self.device, group, self.store)


@contextmanager
def joined(
    device: str = "auto",
    timeout_s: float = 600.0,
    environment: Mapping[str, str] | None = None,
    *,
    on_host: bool = False,
) -> Iterator[World]:
    """Meet the other processes that torchrun started; part when the block ends.

    Args:
        device: ``cpu``, ``cuda``, or ``auto``: a GPU where there is one. torchrun's LOCAL_RANK
            chooses which.
        timeout_s: A collective call that waits longer for another rank is an error, so that
            no rank waits forever for one that died or hangs.
        environment: Where to find RANK, LOCAL_RANK and WORLD_SIZE; ``os.environ`` by default.
            Without them, this process is alone.
        on_host: Whether the processes talk to each other through the host on a GPU, too, by gloo:
            a GPU's connections, by NCCL, are lost together when one of the processes is.

    Raises:
        ValueError: The device is unknown, or there is none for this rank.
        PeerFailed: An error came out of the block, but another rank failed before.
    """
    environment = os.environ if environment is None else environment
    rank = int(environment.get("RANK", 0))
    size = int(environment.get("WORLD_SIZE", 1))
    with one_voice(environment):
        here = _rank_device(device, environment)
    if here.type == "cuda":
        torch.cuda.set_device(here)
    if size == 1:
        yield World(0, 1, here)
        return
    timeout = timedelta(seconds=timeout_s)
    shared, _, _ = next(rendezvous("env://", timeout=timeout))
    shared.set_timeout(timeout)
    # The store may be full of what processes before these wrote.
    name = agree(PrefixStore("effasr", shared), rank, size, timeout_s)
    store = PrefixStore(f"effasr/{name}", shared)
    by_nccl = here.type == "cuda" and not on_host
    dist.init_process_group(
        NCCL if by_nccl else "gloo",
        store=PrefixStore("process_group", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=here if by_nccl else None,
    )
    world = World(rank, size, here, store=PrefixStore("run", store))
    try:
        yield world
        # So that no rank takes the store down while another still talks to it.
        world.barrier()
        _let_go()
    except BaseException as error:
        # Before this rank's connections close, for that makes the others fail.
        earlier, said = None, " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, Exception):
            earlier = earlier_failure(world.store or store, rank, said)
        # NCCL's teardown would wait for peers that may be gone; the end of the process will do.
        if here.type != "cuda":
            _let_go()
            dist.destroy_process_group()
        if earlier is not None:
            raise PeerFailed(earlier) from error
        raise
    dist.destroy_process_group()


def _let_go() -> None:
    """Wait, before a process group may end, until its threads have forgotten the last call.

    What ends the group holds the interpreter's lock and waits for these threads, and a thread needs
    the lock to let go of a call's tensors: gloo's barrier, followed at once by the end of the group
    or of a `DistributedDataParallel` that has it, left one process of two waiting for ever in 1 of
    12 cases (torch 2.13).
    """
    time.sleep(_GRACE_S)


@contextmanager
def one_voice(environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """For what all processes do alike before they meet: of a node's, the first tells an error.

    Args:
        environment: Where torchrun says which process this is; ``os.environ`` by default.

    Raises:
        PeerFailed: In the others, in place of the error.
    """
    environment = os.environ if environment is None else environment
    try:
        yield
    except (ValueError, OSError) as error:
        # LOCAL_WORLD_SIZE is there where LOCAL_RANK 0 is, too.
        if "LOCAL_WORLD_SIZE" in environment and int(environment.get("LOCAL_RANK", 0)):
            raise PeerFailed(str(error)) from error
        raise


def tell_torchrun(reason: str) -> None:
    """Let torchrun's summary, which ends what its user sees, say why this process failed."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        content = {"message": reason, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": content}))


def choose_device(name: str) -> torch.device:
    """The device that a user names: ``auto``, ``cpu``, ``cuda``, or ``cuda:1`` for the second GPU.

    Raises:
        ValueError: It is unknown, or is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or not (index.isdecimal() or name == kind):
        raise ValueError(
            f"`device` must be auto, cpu or cuda, but is {name!r}: cuda:1 is the second GPU."
        )
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("`device` must not be cuda here: PyTorch sees no GPU. Use cpu or auto.")
    if int(index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"`device` must be one of the {torch.cuda.device_count()} GPUs, of which the first is "
            f"cuda:0, but is {name}."
        )
    return torch.device("cuda", int(index or 0))


def _rank_device(name: str, environment: Mapping[str, str]) -> torch.device:
    """The device of this process among those of its node."""
    device = choose_device(name)
    if device.type == "cpu":
        return device
    local_rank = int(environment.get("LOCAL_RANK", 0))
    needed = int(environment.get("LOCAL_WORLD_SIZE", local_rank + 1))
    if needed > torch.cuda.device_count():
        raise ValueError(
            f"`device`: {needed} processes of this node need a GPU each, but there are "
            f"{torch.cuda.device_count()}. Start fewer processes per node."
        )
    return torch.device("cuda", local_rank)


def earlier_failure(store: Store, rank: int, reason: str) -> str | None:
    """What the first rank to fail said, unless this one is it, for this ``reason``.

    torchrun's store outlives the ranks. One that went down with its rank cannot tell any more.
    """
    own = f"rank {rank}: {reason.removeprefix(f'rank {rank}: ')}"
    try:
        first = store.compare_set(_FIRST_FAILURE, "", own).decode()
    except RuntimeError:
        return None
    return None if first == own else first


def forget_failure(store: Store) -> None:
    """Let one that fails later say why, where the run went on without the first that failed."""
    store.delete_key(_FIRST_FAILURE)
