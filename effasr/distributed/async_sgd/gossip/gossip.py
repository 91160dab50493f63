"""One learner of a group that averages weights in the background."""

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from effasr.distributed.async_sgd.gossip.config import GossipConfig, choose, is_active, neighbours
from effasr.distributed.async_sgd.gossip.exchange import Active, Passive, Peers
from effasr.distributed.async_sgd.gossip.mixer import FlatWeights, Mixer
from effasr.distributed.async_sgd.gossip.sockets import SocketTransport

# Polling interval for threads that are about to end.
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class GossipCounters:
    updates: int  # Number of calls of `Gossip.publish`
    exchanges: int  # Number of exchanges, begun by either side
    applied: int  # Number of exchanges whose difference was added to the weights
    bytes: int  # Bytes of weights, sent and received
    # Mean number of own updates between the copy of the weights from which a difference is computed
    # and the addition of the difference; nan before the first
    staleness_mean: float
    staleness_max: int  # Largest such number
    # Number of pieces of 2 ** 20 elements left out of an exchange because of an infinity or NaN in
    # one learner
    non_finite: int
    lost: tuple[int, ...]  # Lost neighbours, in the order of their loss


class Gossip:
    """Averages the weights of this learner with its neighbours' in background threads.

    For each update the training thread calls, in this order::

        delta = gossip.take()           # before the optimizer's update, or after the last publish
        if delta is not None:
            add_flat(tensors, delta)
        ...                             # the optimizer's update
        gossip.publish()

    It never waits for another learner, except in `drain`. All learners must call `start` and
    `drain` equally often; the number of calls in between may differ.

    For n elements it needs host memory for 6n, or 7n if passive with several neighbours. For a
    model on a GPU, 5n of them are pinned, and n more are on the GPU. A publication copies 4n bytes
    from the GPU to the host while the GPU computes, and `add_flat` copies 4n bytes back.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        learner: int,
        learners: int,
        transport: SocketTransport,
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
        if self._running:
            raise RuntimeError("`start` must not be called between `start` and `drain`.")
        self._peers.check()
        self._mixer.publish(self._weights.copy_to, self._updates)
        # The first answer requires a published copy.
        self._mixer.snapshot()
        self._side.start()
        self._running = True

    def publish(self) -> None:
        """Publish the weights on every ``period``-th call, unless the last copy is in progress."""
        self._check()
        self._updates += 1
        if self._updates % self._period:
            return
        if self._mixer.publish(self._weights.copy_to, self._updates):
            self._side.publish()

    def take(self) -> Tensor | None:
        """Return the contribution of others, to be added to the weights before `publish`.

        float32 (count,) on the host, pinned if the weights are on a GPU, to be read before the next
        `publish`. None if nothing is available without waiting, or if `take` returned a
        contribution since the weights were last copied: the rest comes at the latest after `drain`.
        """
        self._check(running=False)
        return self._mixer.take(self._updates)

    def drain(self) -> None:
        """End all exchanges; waits until active neighbours drain. The next `take` has the rest."""
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
        """End all exchanges for good, at once; `take` still returns what arrived completely."""
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
        self._peers.check()
        if running and not self._running:
            raise RuntimeError("`start` must be called before `publish` and `drain`.")
