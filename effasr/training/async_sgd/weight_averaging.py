"""How the weights of a learner and those of the others come together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from effasr.distributed.async_sgd.gossip.config import GossipConfig
from effasr.distributed.async_sgd.gossip.consensus import consensus_distance
from effasr.distributed.async_sgd.gossip.flat import apply
from effasr.distributed.async_sgd.gossip.gossip import Gossip, GossipCounters
from effasr.distributed.async_sgd.gossip.sockets import SocketTransport
from effasr.distributed.async_sgd.gossip.topology import neighbours
from effasr.distributed.averager import settle
from effasr.optim.adamw import apply_update, set_learning_rate
from effasr.training.async_sgd.learners import Learners


class Mixing:
    """The weights of a learner, averaged with its neighbours' while it trains; an `Averager`.

    Only parameters travel. Each rank has running statistics of its own batch norms, as with ddp,
    and these are averaged when learners meet: a difference added to a variance that has changed
    since could make it negative.

    A learner of several ranks adds the same difference on each of them: its leader sends them 4
    bytes per parameter whenever one has arrived, and a flag in every step.

    Args:
        model: Not replicated; the same on all ranks.
        optimizer: Of its parameters.
        learners: This one, and the others.
        config: Who averages with whom, and how often.
        seed: Of the run.

    Attributes:
        distance: The consensus distance when learners met last; None before.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        learners: Learners,
        config: GossipConfig,
        seed: int,
    ) -> None:
        self._config = config
        self._seed = seed
        self._model = model
        self._optimizer = optimizer
        self._learners = learners
        self._tensors = [p.detach() for p in model.parameters() if p.requires_grad]
        self._count = sum(tensor.numel() for tensor in self._tensors)
        self._gossip: Gossip | None = None
        self._settled = True
        self._running = False
        self._logged: GossipCounters | None = None
        self._exchanges_before = 0
        self.distance: float | None = None
        self._form()

    def is_local(self, step: int) -> bool:
        """False: the ranks of a learner exchange their gradients."""
        del step
        return False

    def start(self) -> None:
        """Begin to exchange weights; all learners have the same."""
        _fill(self._optimizer)
        # Not only where this learner makes a step: all settle together, or none does.
        self._settled = False
        if self._gossip is not None:
            self._gossip.start()
            self._running = True

    def before(self, step: int) -> None:
        """Add what has arrived from others."""
        del step
        self._take()

    def after(self, step: int) -> None:
        """Show the weights to others."""
        del step
        if self._gossip is not None:
            self._gossip.publish()

    def drain(self) -> None:
        """End the exchanges, when learners have met, and find new neighbours for lost ones."""
        if len(self._left) > len(self._learners.left):
            # One that is lost without a word would be waited for.
            self.abandon()
            self._take()
            self._form()
            return
        if self._gossip is not None:
            self._gossip.drain()
            self._running = False
        self._take()

    def abandon(self) -> None:
        """End the exchanges, whatever the others do: they are lost, or training failed."""
        if self._gossip is not None:
            self._running = False
            self._gossip.abandon()

    def settle(self, others: Iterable[Tensor] = ()) -> None:
        """Give all ranks the mean of their weights and moments, as a checkpoint holds them.

        Args:
            others: More to average.
        """
        world = self._learners.world
        if world.size == 1:
            self.distance = 0.0
        if self._settled or world.size == 1:
            return
        self.distance = consensus_distance(self._tensors, world.group)
        settle(self._model, self._optimizer, others, world)
        self._settled = True

    def line(self) -> dict[str, Any]:
        """What metrics.jsonl says of the leader's exchanges: in all, and since it was asked last.

        ``staleness``: Own updates between the copy of the weights that a difference was computed
        of, and its being added.
        """
        exchanges, count, stale = self._exchanges_before, 0, 0.0
        if self._gossip is not None:
            now, before = self._gossip.counters(), self._logged
            self._logged = now
            exchanges += now.exchanges
            count, stale = now.applied, _stale(now)
            if before is not None:
                count, stale = count - before.applied, stale - _stale(before)
        return {
            "gossip_exchanges": exchanges,
            "staleness": stale / count if count else None,
            "learners_lost": sorted(self._learners.members.lost) if self._learners.members else [],
        }

    def _form(self) -> None:
        """Let the leaders of those that are left be neighbours."""
        learners = self._learners
        left = self._left = list(learners.left)
        if not learners.own.is_main:
            return
        if self._gossip is not None:
            self._exchanges_before += self._gossip.counters().exchanges
        self._gossip = self._logged = None
        if len(left) == 1:
            return
        place, config = left.index(learners.number), self._config
        transport = SocketTransport(
            # There are fewer each time.
            PrefixStore(f"gossip/{len(left)}", learners.store),
            place,
            neighbours(config.topology, place, len(left)),
            config.timeout_s,
        )
        self._gossip = Gossip(
            self._tensors,
            learner=place,
            learners=len(left),
            transport=transport,
            config=config,
            seed=self._seed,
            on_lost=self._suspect,
        )

    def _suspect(self, place: int) -> None:
        """Called by the threads that exchange."""
        if self._running:
            self._learners.suspect(self._left[place])

    def _take(self) -> None:
        own, delta = self._learners.own, None
        if self._gossip is not None:
            delta = self._gossip.take()
        if own.size > 1:
            delta = _share(delta, self._count, own.device, own.group)
        if delta is not None:
            apply(self._tensors, delta)


def _share(
    delta: Tensor | None, count: int, device: torch.device, group: dist.ProcessGroup | None
) -> Tensor | None:
    """Give the leader's difference, if it has one, to the other ranks of its learner."""
    flag = torch.tensor([delta is not None])
    dist.broadcast(flag, group=group, group_src=0)
    if not flag.item():
        return None
    shared = torch.empty(count, device=device) if delta is None else delta.to(device)
    dist.broadcast(shared, group=group, group_src=0)
    return shared


def _stale(counters: GossipCounters) -> float:
    return counters.applied * counters.staleness_mean if counters.applied else 0.0


def _fill(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer make its moments, which it makes at its first update, zero.

    A learner so slow that it has made none would have nothing to be averaged.
    """
    groups: Sequence[dict[str, Any]] = optimizer.param_groups
    parameters = [p for group in groups for p in group["params"] if p.requires_grad]
    if all(parameter in optimizer.state for parameter in parameters):
        return
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    apply_update(optimizer, torch.zeros((), dtype=torch.bool, device=parameters[0].device))
    if parameters[0] not in optimizer.state:
        # One that cannot be told to leave out an update.
        set_learning_rate(optimizer, 0.0)
        optimizer.step()
    optimizer.zero_grad()
