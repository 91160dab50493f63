"""A name that the processes of a run agree on at every start, different from all earlier ones."""

import ctypes
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from effasr.checks import check
from effasr.distributed.failures import PeerFailed, record_failure, report_once_per_node

_POLL_S = 0.02


def agree_on_restart_id(store: Store, rank: int, size: int, timeout_s: float) -> str:
    """Agree on a name that no earlier start of the run had.

    torchrun's store outlives the processes and keeps what those before a restart wrote, such as
    the addresses on which they listened. torchrun gives nothing that distinguishes the two: the
    number of restarts stays the same when a node joins or leaves.

    Every process therefore writes a random name and waits for an answer to it. Rank 0 answers all
    names that it finds, including those of dead processes, until each rank has confirmed an answer.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"join/{rank}", own)
        try:
            name = store.get(f"welcome/{own}").decode()
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {rank}: rank 0 did not join within {timeout_s:g} s."
            ) from error
        store.set(f"ready/{name}/{rank}", "")
        return name
    joined = [f"join/{other}" for other in range(1, size)]
    ready = [f"ready/{own}/{other}" for other in range(1, size)]
    answered: set[bytes] = set()
    until = time.monotonic() + timeout_s
    while not store.check(ready):
        if time.monotonic() > until:
            missing = [n for n, key in enumerate(ready, 1) if not store.check([key])]
            raise RuntimeError(
                f"rank 0: not all {size} ranks joined within {timeout_s:g} s; missing: {missing}."
            )
        if store.check(joined):
            for name in set(store.multi_get(joined)) - answered:
                store.set(f"welcome/{bytes(name).decode()}", own)
                answered.add(name)
        time.sleep(_POLL_S)
    return own


# The processes of a run: how they join, exchange values and leave.

T = TypeVar("T")

NCCL = "cpu:gloo,cuda:nccl"  # The backend of processes that have one GPU each

DEFAULT_TIMEOUT = timedelta(seconds=600)  # How long a collective waits for another rank


@dataclass(frozen=True, slots=True)
class DistributedContext:
    """This process among those of a run or of a subgroup. With a size of 1, methods are no-ops."""

    rank: int  # Rank of this process in the group, from 0
    size: int  # Number of processes in the group
    device: torch.device  # Device of this process
    group: dist.ProcessGroup | None = None  # Process group; None for all processes of the run
    # Key-value store that all processes of the run share; None for a single process
    store: Store | None = None
    # A collective that waits longer than this for another rank raises an error
    timeout: timedelta = DEFAULT_TIMEOUT
    # Contexts that replaced this one after a loss of ranks, the newest last
    survivors: "list[DistributedContext]" = field(default_factory=list, repr=False, compare=False)

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files and reports to the user."""
        return self.rank == 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Replace ``tensor`` by its sum over all ranks; on a GPU the host does not wait."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather_tensor(self, tensor: Tensor) -> Tensor:
        """Return the tensors (S,) of all ranks one after another; the host does not wait."""
        gathered = tensor.new_empty(self.size * len(tensor))
        # torch 2.13 renamed it, and warns of the old name.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(gathered, tensor, group=self.group)
        return gathered

    def all_gather(self, value: T) -> list[T]:
        """Return the values (any picklable object) of all ranks, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]

    def broadcast(self, value: T) -> T:
        """Return the value (any picklable object) of rank 0 on every rank."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def barrier(self) -> None:
        """Wait for the other remaining ranks."""
        context = self.survivors[-1] if self.survivors else self
        if context.size > 1:
            dist.barrier(group=context.group)

    def subgroup(self, ranks: Sequence[int], backend: str | None = None) -> "DistributedContext":
        """Return the context of some ranks, all of which call this; no other rank needs to."""
        group = None
        if len(ranks) > 1:
            everyone = dist.get_process_group_ranks(self.group or dist.group.WORLD)
            local = [everyone[rank] for rank in ranks]
            group = self.new_group(local, backend=backend, use_local_synchronization=True)
        rank = list(ranks).index(self.rank)
        return DistributedContext(
            rank, len(ranks), self.device, group, self.store, timeout=self.timeout
        )

    def new_group(self, ranks: Sequence[int] | None = None, **options: Any) -> dist.ProcessGroup:
        """Return a process group with the timeout of this context, which torch does not inherit."""
        made = dist.new_group(ranks, timeout=self.timeout, **options)
        return cast(dist.ProcessGroup, made)


@contextmanager
def distributed_context(
    device: str = "auto",
    timeout_s: float = DEFAULT_TIMEOUT.total_seconds(),
    environment: Mapping[str, str] | None = None,
    *,
    on_host: bool = False,
) -> Iterator[DistributedContext]:
    """Join the processes that torchrun started; leave them when the block ends.

    Connections to the other processes remain open, unused, until this process ends.
    """
    if environment is None:
        os.environ.update(slurm_variables(os.environ))
        environment = os.environ
    with report_once_per_node(environment):
        rank, size = _rank_and_size(environment)
        own_device = _rank_device(device, environment)
    if own_device.type == "cuda":
        torch.cuda.set_device(own_device)
    if size == 1:
        yield DistributedContext(0, 1, own_device)
        return
    timeout = timedelta(seconds=timeout_s)
    try:
        shared, _, _ = next(rendezvous("env://", timeout=timeout))
    except RuntimeError as error:
        host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
        if "EADDRINUSE" not in str(error):
            raise RuntimeError(
                f"rank {rank} cannot join the others at {host}:{port} (`MASTER_ADDR`, "
                f"`MASTER_PORT`) within {timeout_s:g} s (training.timeout_s): start all "
                f"{size} ranks, with the address of the machine of rank 0. (PyTorch: "
                f"{' '.join(str(error).split())[:200]})"
            ) from error
        raise RuntimeError(
            f"`MASTER_PORT` must be a free port of {host}, but {port} is in use: set another, or "
            "end the run that has it."
        ) from error
    shared.set_timeout(timeout)
    # The store may still hold keys of processes before a restart.
    restart_id = agree_on_restart_id(PrefixStore("effasr", shared), rank, size, timeout_s)
    store = PrefixStore(f"effasr/{restart_id}", shared)
    by_nccl = own_device.type == "cuda" and not on_host
    dist.init_process_group(
        NCCL if by_nccl else "gloo",
        store=PrefixStore("process_group", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=own_device if by_nccl else None,
    )
    context = DistributedContext(
        rank, size, own_device, store=PrefixStore("run", store), timeout=timeout
    )
    try:
        yield context
        # So that no rank closes the store while another still uses it.
        context.barrier()
    except BaseException as error:
        # Before this process ends, which closes its connections and makes the others fail.
        earlier, reason = None, " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, Exception):
            losses = len(context.survivors)
            earlier = record_failure(context.store or store, rank, reason, losses)
        # NCCL's teardown would wait for lost peers; the end of the process suffices.
        _leave(destroy=own_device.type != "cuda")
        if earlier is not None:
            raise PeerFailed(earlier) from error
        raise
    _leave()


def _rank_and_size(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return rank and number of ranks; without any variable, those of a single process."""
    values = {name: environment.get(name, "") for name in ("RANK", "WORLD_SIZE")}
    if values["WORLD_SIZE"] not in ("", "1"):
        values |= {name: environment.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")}
    missing = [name for name, value in values.items() if not value]
    if missing and any(values.values()) and values != {"RANK": "", "WORLD_SIZE": "1"}:
        given = ", ".join(f"{name}={value}" for name, value in values.items() if value)
        raise ValueError(
            f"`{missing[0]}` must be set where {given} is: start with torchrun, which sets all, or "
            "unset them for one process."
        )
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not missing and not values.get(name, "0").isdecimal():
            raise ValueError(f"`{name}` must be a number, but is {values[name]!r}.")
    rank, size = int(values["RANK"] or 0), int(values["WORLD_SIZE"] or 1)
    rule = f"be below WORLD_SIZE, {size}, the number of processes"
    remedy = "start with torchrun, which numbers them from 0, or unset both for one process"
    check(rank < size, "RANK", rule, rank, remedy)
    if size > 1:
        _check_address(values["MASTER_ADDR"], int(values["MASTER_PORT"]))
    return rank, size


def _check_address(host: str, port: int) -> None:
    check(0 < port < 2**16, "MASTER_PORT", "be a port from 1 to 65535", port)
    try:
        socket.getaddrinfo(host, port)
    except socket.gaierror as error:
        # A name server that does not answer now may do so in a moment.
        if error.errno == socket.EAI_NONAME:
            raise ValueError(
                f"`MASTER_ADDR` must be a host that this machine knows, the one of rank 0, but is "
                f"{host!r}: set it to its name or address."
            ) from error


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a task that srun started without torchrun; else nothing."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    nodes = environment.get("SLURM_STEP_NODELIST", "")
    if tasks == "1" or not nodes or environment.get("RANK") or environment.get("WORLD_SIZE"):
        return {}
    # Such as gpu[003-005,9]: the first is gpu003.
    first = re.sub(r"\[(\w+).*", r"\1", re.split(r",(?![^\[]*\])", nodes)[0])
    port = 20000 + int(environment.get("SLURM_JOB_ID", "0")) % 10000
    count = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", tasks))
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": count[0] if count else tasks,
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first,
        "MASTER_PORT": environment.get("MASTER_PORT") or str(port),
    }


def _leave(*, destroy: bool = True) -> None:
    """Leave all process groups, without running the destructors of their C++ objects.

    The destructor of a gloo group waits for the group's threads, and these need the GIL to release
    the tensors of their last call. A `DistributedDataParallel` that outlives the group in Python
    holds the last reference to it, and its own destructor has the GIL: the process deadlocks
    (torch 2.13, within a few runs of two ranks). The groups of a process are therefore never
    deleted; their threads and connections end with the process. Processes with GPUs have gloo, too.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        # A reference in a variable would be dropped when the interpreter ends, with the GIL.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    if destroy:
        dist.destroy_process_group()


def choose_device(name: str) -> torch.device:
    """Return the device of ``auto``, ``cpu``, ``cuda``, or ``cuda:1`` for the second GPU."""
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
