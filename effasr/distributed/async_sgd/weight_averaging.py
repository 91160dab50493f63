"""Averages the weights of a learner with those of its neighbours while it trains."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, ProcessGroup  # type: ignore[attr-defined]

from effasr.distributed.async_sgd.gossip.config import GossipConfig, neighbours
from effasr.distributed.async_sgd.gossip.gossip import Gossip, GossipCounters
from effasr.distributed.async_sgd.gossip.sockets import SocketTransport
from effasr.distributed.async_sgd.learners import Learners
from effasr.distributed.averager import Averager, add_flat, average_training_state


@torch.no_grad()
def consensus_distance(tensors: Sequence[Tensor], group: ProcessGroup | None = None) -> float:
    """Return the mean over learners of the squared distance from their mean, ``||x_i - mean||^2``.

    Below a critical value, learners train as one would (Kong et al. 2021, "Consensus Control for
    Decentralized Deep Learning").
    """
    learners = dist.get_world_size(group)
    total = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    for tensor in tensors:
        mean = tensor.detach().clone()
        dist.all_reduce(mean, group=group)
        mean.div_(learners)
        total += torch.sub(tensor, mean).double().square().sum()
    dist.all_reduce(total, group=group)
    return total.item() / learners


_REJECTED_CONNECTIONS = "gossip_strangers"
"""Key of the store: connections that all learners have dropped."""


@dataclass(eq=False)
class WeightAveraging(Averager):
    """Averages the weights of learners in pairs, in the background.

    Only parameters are exchanged. Each rank has its own running statistics of batch norms, as with
    ddp, and these are averaged when learners synchronize: a difference added to a variance that has
    changed since could make it negative.

    A learner of several ranks adds the same difference on each of them: its leader sends them 4
    bytes per parameter whenever one has arrived, and a flag in every step.
    """

    _model: nn.Module
    _optimizer: torch.optim.Optimizer
    _learners: Learners
    _config: GossipConfig
    seed: int

    def __post_init__(self) -> None:
        self._tensors = [p.detach() for p in self._model.parameters() if p.requires_grad]
        self._count = sum(tensor.numel() for tensor in self._tensors)
        self._gossip: Gossip | None = None
        self._synchronized = True
        self._running = False
        self._logged: GossipCounters | None = None
        self._exchanges_before = 0
        # Consensus distance at the last synchronization; None before
        self.distance: float | None = None
        self._connect()

    def start(self) -> None:
        """Begin to exchange weights, which are equal on all learners; moments exist already."""
        # Also on a learner that makes no step: either all average their state together, or none
        # does.
        self._synchronized = False
        if self._gossip is not None:
            self._gossip.start()
            self._running = True

    def before(self, step: int) -> None:
        self._add_received()

    def after(self, step: int) -> None:
        if self._gossip is not None:
            self._gossip.publish()

    def drain(self) -> None:
        """End the exchanges when learners have synchronized; replace neighbours that are lost."""
        if len(self._remaining) > len(self._learners.remaining):
            # `Gossip.drain` would wait for the learner that is lost.
            self.abandon()
            self._add_received()
            self._connect()
            return
        if self._gossip is not None:
            self._gossip.drain()
            self._running = False
        self._add_received()

    def abandon(self) -> None:
        """End the exchanges without waiting, after a failure or a loss of learners."""
        if self._gossip is not None:
            self._running = False
            self._gossip.abandon()

    def synchronize(self, others: Iterable[Tensor] = ()) -> None:
        context = self._learners.context
        if context.size == 1:
            self.distance = 0.0
        if self._synchronized or context.size == 1:
            return
        self.distance = consensus_distance(self._tensors, context.group)
        average_training_state(self._model, self._optimizer, others, context)
        self._synchronized = True

    def metrics(self) -> dict[str, Any]:
        """Return fields of metrics.jsonl about the leader's exchanges.

        ``gossip_exchanges``: exchanges in all. ``staleness``: own updates between the copy of the
        weights that a difference was computed from and its addition, mean since the last call.
        ``gossip_strangers``: connections to any learner that were dropped, because they were not of
        this run.
        """
        exchanges, count, stale = self._exchanges_before, 0, 0.0
        if self._gossip is not None:
            now, before = self._gossip.counters(), self._logged
            self._logged = now
            exchanges += now.exchanges
            count, stale = now.applied, _staleness(now)
            if before is not None:
                count, stale = count - before.applied, stale - _staleness(before)
        membership = self._learners.membership
        return {
            "gossip_exchanges": exchanges,
            "staleness": stale / count if count else None,
            "gossip_strangers": self._learners.store.add(_REJECTED_CONNECTIONS, 0),
            "learners_lost": sorted(membership.lost) if membership else [],
        }

    def _connect(self) -> None:
        """Connect the leader of this learner to its neighbours among the remaining learners."""
        learners = self._learners
        remaining = self._remaining = list(learners.remaining)
        if not learners.own.is_main:
            return
        if self._gossip is not None:
            self._exchanges_before += self._gossip.counters().exchanges
        self._gossip = self._logged = None
        if len(remaining) == 1:
            return
        index, config = remaining.index(learners.number), self._config
        transport = SocketTransport(
            # Fewer learners are left each time, so the prefix is new.
            PrefixStore(f"gossip/{len(remaining)}", learners.store),
            index,
            neighbours(config.topology, index, len(remaining)),
            config.timeout_s,
            config.tls,
        )
        # The learner that writes the metrics may not be one that listens.
        learners.store.add(_REJECTED_CONNECTIONS, transport.rejected_connections)
        self._gossip = Gossip(
            self._tensors,
            learner=index,
            learners=len(remaining),
            transport=transport,
            config=config,
            seed=self.seed,
            on_lost=self._suspect,
        )

    def _suspect(self, index: int) -> None:
        if self._running:
            self._learners.suspect(self._remaining[index])

    def _add_received(self) -> None:
        local, delta = self._learners.own, None
        if self._gossip is not None:
            delta = self._gossip.take()
        if local.size > 1:
            delta = _broadcast(delta, self._count, local.device, local.group)
        if delta is not None:
            add_flat(self._tensors, delta)


def _broadcast(
    delta: Tensor | None, count: int, device: torch.device, group: dist.ProcessGroup | None
) -> Tensor | None:
    """Send the leader's difference, if it has one, to the other ranks of its learner."""
    flag = torch.tensor([delta is not None])
    dist.broadcast(flag, group=group, group_src=0)
    if not flag.item():
        return None
    shared = torch.empty(count, device=device) if delta is None else delta.to(device)
    dist.broadcast(shared, group=group, group_src=0)
    return shared


def _staleness(counters: GossipCounters) -> float:
    return counters.applied * counters.staleness_mean if counters.applied else 0.0
