"""One learner among those that average their weights in the background."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from effasr.distributed.async_sgd.gossip.active import Active
from effasr.distributed.async_sgd.gossip.config import GossipConfig
from effasr.distributed.async_sgd.gossip.flat import FlatWeights
from effasr.distributed.async_sgd.gossip.mixer import Mixer
from effasr.distributed.async_sgd.gossip.passive import Passive
from effasr.distributed.async_sgd.gossip.peers import Peers
from effasr.distributed.async_sgd.gossip.topology import choose, is_active, neighbours
from effasr.distributed.async_sgd.gossip.transport import Transport

# Between two looks at threads that are about to end.
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class GossipCounters:
    """What happened since a learner was made.

    Attributes:
        updates: Calls of `Gossip.publish`.
        exchanges: With others, begun by either side.
        applied: Of these, whose difference was taken.
        bytes: Of weights, sent and received.
        staleness_mean: Own updates between the copy of the weights that a difference is of and the
            taking of it; nan before the first.
        staleness_max: The most.
        non_finite: Pieces of 2 ** 20 numbers that were left out of an exchange, for one learner
            had an infinity or NaN there.
        lost: Neighbours, in the order in which they were found to be lost.
    """

    updates: int
    exchanges: int
    applied: int
    bytes: int
    staleness_mean: float
    staleness_max: int
    non_finite: int
    lost: tuple[int, ...]


class Gossip:
    """Averages the weights of this learner with its neighbours', in threads of its own.

    For each update the thread that trains calls, in this order::

        delta = gossip.take()           # before the optimizer's update, or after the last publish
        if delta is not None:
            apply(tensors, delta)
        ...                             # the optimizer's update
        gossip.publish()

    It never waits for another learner, except in `drain`. All learners call `start` and `drain`
    equally often; what they do in between may differ in number.

    Takes, for n numbers, host memory for 6n of them, or 7n if passive with several neighbours; of a
    model on a GPU, 5n are pinned, and n more are on the GPU. A publication moves 4n bytes from the
    GPU to the host while the GPU computes on, and `apply` 4n back.

    Args:
        tensors: Weights and statistics of batch norms, float32, on one device; the same on all
            learners, in the same order, and with equal values at the first `start`.
        learner: The number of this one, from 0.
        learners: How many there are.
        transport: To the neighbours; used by nothing else.
        config: With whom and how often.
        seed: Of the choice of neighbours with topology ``random``.
        on_lost: Called with the number of a neighbour that is lost, by any thread.

    Raises:
        ValueError: An argument is invalid.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        learner: int,
        learners: int,
        transport: Transport,
        config: GossipConfig,
        seed: int = 0,
        on_lost: Callable[[int], None] | None = None,
    ) -> None:
        self._period = config.period
        self._weights = FlatWeights(tensors)
        self._peers = Peers(learner, neighbours(config.topology, learner, learners), on_lost)
        self._transport = transport
        self._mixer = Mixer(self._weights.count, pinned=self._weights.device.type == "cuda")
        common = (self._mixer, self._peers, transport, config.timeout_s)
        self._side = (
            Active(*common, functools.partial(choose, config.topology, seed, learner))
            if is_active(learner)
            else Passive(*common)
        )
        self._updates = 0
        self._running = False

    def start(self) -> None:
        """Publish the weights, and let exchanges begin.

        Raises:
            RuntimeError: They have begun already, or failed.
        """
        if self._running:
            raise RuntimeError("`start` must not be called between `start` and `drain`.")
        self._peers.check()
        self._mixer.publish(self._weights.copy_to, self._updates)
        # The first answer must not be given before there is anything to tell.
        self._mixer.snapshot()
        self._side.start()
        self._running = True

    def publish(self) -> None:
        """Let others see the weights, after an update of them; the host does not wait for a GPU.

        Only every ``period``-th call copies them. If the copy before is still under way, for the
        host is ahead of the GPU, the call does nothing, and the next one will.

        Raises:
            RuntimeError: An exchange failed, or `start` was not called.
        """
        self._check()
        self._updates += 1
        if self._updates % self._period:
            return
        if self._mixer.publish(self._weights.copy_to, self._updates):
            self._side.publish()

    def take(self) -> Tensor | None:
        """What others contributed; the caller adds it to the weights before it calls `publish`.

        Returns:
            float32 (count,) on the host, pinned if the weights are on a GPU, to be read before the
            next call of `publish` (of a copy to the GPU, to be begun); or None if nothing arrived
            that could be had without waiting, or something was taken since the weights were last
            copied. What is not returned now is part of what a later call returns, the one after
            `drain` at the latest.

        Raises:
            RuntimeError: An exchange failed.
        """
        self._check(running=False)
        return self._mixer.take(self._updates)

    def drain(self) -> None:
        """End all exchanges: when it returns, nothing is on its way, and `take` returns the rest.

        The neighbours must do so as well: an active learner is waited for until it drains.

        Raises:
            RuntimeError: An exchange failed, or `start` was not called.
        """
        self._check()
        self._side.stop()
        while self._side.is_running():
            self._peers.check()
            time.sleep(_LOOK_S)
        self._peers.check()
        self._weights.settle()
        self._mixer.settle()
        self._running = False

    def abandon(self) -> None:
        """End all exchanges at once, whatever the neighbours do; nothing can begin again.

        What arrived whole is part of what `take` returns.
        """
        self._peers.end()
        self._transport.close()
        self._side.stop()
        if self._running:
            while self._side.is_running():
                time.sleep(_LOOK_S)
            self._weights.settle()
            self._mixer.settle()
            self._running = False

    def counters(self) -> GossipCounters:
        """What happened so far."""
        mixer = self._mixer
        return GossipCounters(
            updates=self._updates,
            exchanges=self._side.exchanges,
            applied=mixer.applied,
            bytes=self._side.bytes,
            staleness_mean=mixer.staleness_sum / mixer.applied if mixer.applied else math.nan,
            staleness_max=mixer.staleness_max,
            non_finite=mixer.non_finite,
            lost=self._peers.lost,
        )

    def _check(self, running: bool = True) -> None:
        """Raise what a thread could not."""
        self._peers.check()
        if running and not self._running:
            raise RuntimeError("`start` must be called before `publish` and `drain`.")
