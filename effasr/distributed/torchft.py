"""Replicas that come and go between two steps, by torchft: a step is made by those that are there.

Each process is a replica of its own, started alone, with TORCHFT_LIGHTHOUSE naming torchft's
lighthouse. Per step it asks who takes part, computes its share of the micro-batches, and asks
whether all went well: otherwise nothing is changed, and the step is made once more by those that
are left. As losses are sums over the counts of a whole step, the update is the same on any number
of replicas, and no micro-batch is lost with one that dies. A new replica is given the state of the
others. It is for loops of one's own around `effasr.training.step.train_step`; `effasr train`
recovers by checkpoints instead.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from effasr.distributed.process_group import World


def why_not_torchft() -> str | None:
    """The reason for which torchft cannot be used, or None. Nothing of it is imported.

    Of its releases, 0.2.0 does not do: where one replica dies, its `DistributedDataParallel` ends
    the others.
    """
    try:
        importlib.metadata.version("torchft-nightly")
    except importlib.metadata.PackageNotFoundError:
        return "torchft-nightly is not installed (pip install 'effasr[torchft]')"
    return None


class Replicas:
    """This process among the replicas of a run.

    Args:
        device: Of this process.
        state: What a new replica needs: of the model, the optimizer and so on.
        restore: Takes it.
        min_replicas: Fewer do not make a step, but wait for more.
        timeout_s: How long a replica waits for another before it takes it for lost.
        name: Of this replica, for torchft's log.
        lighthouse: Its address; by default that in TORCHFT_LIGHTHOUSE.

    Raises:
        ValueError: torchft-nightly is not installed, or there is no address.
    """

    def __init__(
        self,
        device: torch.device,
        state: Callable[[], Any],
        restore: Callable[[Any], None],
        *,
        min_replicas: int = 1,
        timeout_s: float = 60.0,
        name: str = "replica",
        lighthouse: str | None = None,
    ) -> None:
        reason = why_not_torchft()
        if reason is not None:
            raise ValueError(f"`Replicas` cannot be used here: {reason}.")
        lighthouse = lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE")
        if not lighthouse:
            raise ValueError(
                "`lighthouse` must be the address of torchft's lighthouse, but neither it nor "
                "TORCHFT_LIGHTHOUSE is given: start one with `torchft_lighthouse`."
            )
        self._device = device
        library = importlib.import_module("torchft")
        timeout = timedelta(seconds=timeout_s)
        on_gpu = device.type == "cuda"
        group = (library.ProcessGroupNCCL if on_gpu else library.ProcessGroupGloo)(timeout=timeout)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._manager = library.Manager(
            pg=group,
            state_dict=state,
            load_state_dict=restore,
            min_replica_size=min_replicas,
            # The share of a replica depends on who takes part, which must be known before.
            use_async_quorum=False,
            timeout=timeout,
            quorum_timeout=timeout,
            connect_timeout=timeout,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self._store.port,
            lighthouse_addr=lighthouse,
            replica_id=name,
        )
        managed = importlib.import_module("torchft.process_group").ManagedProcessGroup
        self._group = managed(self._manager)

    @property
    def step(self) -> int:
        """How many steps were made, by this replica or by those whose state it was given."""
        return self._manager.current_step()

    def begin(self) -> World:
        """Meet the replicas that make the next step; take their state if this one is behind.

        Returns:
            This process among them. Its sums do not fail where another dies: they are wrong then,
            which `commit` knows.
        """
        self._manager.start_quorum()
        rank = self._manager.participating_rank()
        size = self._manager.num_participants()
        return World(rank, size, self._device, self._group)

    def commit(self) -> bool:
        """Whether the step is to be made: all replicas say that nothing failed; once per step."""
        return self._manager.should_commit()

    def replicate(self, model: nn.Module) -> nn.Module:
        """Wrap a model so that its backward averages gradients over the replicas of the step."""
        library = importlib.import_module("torchft")
        return library.DistributedDataParallel(
            self._manager, model, gradient_as_bucket_view=True, broadcast_buffers=False
        )

    def close(self) -> None:
        """Leave the others."""
        self._manager.shutdown(wait=False)
