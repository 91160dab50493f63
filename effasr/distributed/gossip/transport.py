"""How numbers get from one learner to another."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup  # type: ignore[attr-defined]

# gloo answers a wait that times out by closing the connections to all peers of the group, so none
# may. A peer whose process ends makes it fail at once all the same.
_FOREVER = timedelta(days=3650)

# Numbers of one message.
_LARGEST = 1 << 28


class PeerLost(Exception):
    """The other learner cannot be reached, and will not be again."""


class Transport(Protocol):
    """Messages in order between two learners; a message may wait for its receiver.

    Both raise `PeerLost`, and may be called from several threads at once, for different peers.
    """

    def send(self, tensor: Tensor, peer: int) -> None:
        """Return when ``tensor`` may be overwritten."""
        ...

    def receive(self, tensor: Tensor, peer: int) -> None:
        """Fill ``tensor``."""
        ...


class GlooTransport:
    """Messages of a process group of gloo, which nothing else uses.

    NCCL will not do: its messages have no tags, are launched by the thread that computes, and
    fail together.

    Args:
        group: Where learners have their number as rank.
        learner: Of this process.
        learners: Their number.

    Raises:
        ValueError: The group is another.
    """

    def __init__(self, group: ProcessGroup, learner: int, learners: int) -> None:
        if group.rank() != learner or group.size() != learners:
            raise ValueError(
                f"`group` must have learner {learner} of {learners} as its rank, but this process "
                f"is rank {group.rank()} of {group.size()} there: make it of the first process of "
                "each learner, in their order."
            )
        if dist.get_backend(group) != "gloo":
            raise ValueError(
                f"`group` must be of backend gloo, but is of {dist.get_backend(group)}: use "
                'torch.distributed.new_group(leaders, backend="gloo").'
            )
        self._group = group

    def send(self, tensor: Tensor, peer: int) -> None:
        """See `Transport`."""
        for piece in tensor.split(_LARGEST):
            try:
                work = dist.isend(piece, group=self._group, group_dst=peer)
                assert work is not None
                work.wait(_FOREVER)
            except RuntimeError as error:
                raise PeerLost(str(error)) from error

    def receive(self, tensor: Tensor, peer: int) -> None:
        """See `Transport`."""
        for piece in tensor.split(_LARGEST):
            try:
                work = dist.irecv(piece, group=self._group, group_src=peer)
                assert work is not None
                work.wait(_FOREVER)
            except RuntimeError as error:
                raise PeerLost(str(error)) from error
