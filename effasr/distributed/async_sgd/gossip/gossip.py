"""One learner of a group that averages weights in the background."""

import functools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from effasr.distributed.async_sgd.gossip.config import GossipConfig, choose, is_active, neighbours
from effasr.distributed.async_sgd.gossip.mixer import FlatWeights, Mixer
from effasr.distributed.async_sgd.gossip.sockets import PeerLost, SocketTransport

# Tracks the remaining neighbours and the errors of the threads that exchange with them.


log = logging.getLogger(__name__)


class Peers:
    """The neighbours of one learner; ``on_lost`` is called once per lost one, from any thread."""

    def __init__(
        self,
        learner: int,
        neighbours: Sequence[int],
        on_lost: Callable[[int], None] | None,
    ) -> None:
        self.learner = learner
        self.living = tuple(neighbours)  # Remaining neighbours, in ascending order
        self.lost: tuple[int, ...] = ()  # Lost neighbours, in the order of their loss
        self._on_lost = on_lost
        self._error: Exception | None = None
        self._ended = False
        self._lock = threading.Lock()

    def lose(self, peer: int, reason: str) -> None:
        """Mark a neighbour as lost, and log the reason."""
        with self._lock:
            if peer in self.lost or self._ended:
                return
            self.living = tuple(other for other in self.living if other != peer)
            self.lost += (peer,)
        left = ", ".join(map(str, self.living))
        several = "s" if len(self.living) > 1 else ""
        log.warning(
            "learner %d lost learner %d, and %s: %s",
            self.learner,
            peer,
            f"continues with learner{several} {left}" if left else "has no other: continues alone",
            reason,
        )
        if self._on_lost is not None:
            self._on_lost(peer)

    def end(self) -> None:
        """Ignore later losses of neighbours, because this learner ends its exchanges."""
        with self._lock:
            self._ended = True

    def fail(self, peer: int | None, error: Exception) -> None:
        with self._lock:
            if self._error is None:
                partner = "" if peer is None else f" with learner {peer}"
                failure = RuntimeError(
                    f"the exchange of learner {self.learner}{partner} failed: "
                    f"{type(error).__name__}: {error}"
                )
                failure.__cause__ = error
                self._error = failure

    def check(self) -> None:
        if self._error is not None:
            raise self._error


# Messages between two learners.
#
# The active learner sends a header, int64 (2,): a kind and the number of elements. After EXCHANGE
# it sends its weights and receives the weights of the passive learner from before the averaging.
# After STOP it sends nothing until both have started again. ALIVE has no further content.

EXCHANGE, ALIVE, STOP = 1, 2, 3


def header(kind: int, count: int) -> Tensor:
    return torch.tensor([kind, count])


def blank() -> Tensor:
    return torch.zeros(2, dtype=torch.int64)


def read(message: Tensor, count: int, *, learner: int, peer: int) -> int:
    """Return the kind of a header received by ``learner`` from ``peer``."""
    kind, theirs = message.tolist()
    if kind not in (EXCHANGE, ALIVE, STOP):
        raise ValueError(f"a message of unknown kind {kind}: something else uses the group.")
    if theirs != count:
        raise ValueError(
            f"learner {learner} averages {count} numbers, but learner {peer} {theirs}: start all "
            "learners with the same model."
        )
    return kind


@dataclass(eq=False)
class _Side:
    """What begins or answers the exchanges of a learner."""

    mixer: Mixer
    peers: Peers
    transport: SocketTransport
    timeout_s: float

    def __post_init__(self) -> None:
        self.exchanges = 0  # Number of completed exchanges
        self.bytes = 0  # Bytes of weights, sent and received

    def publish(self) -> None:
        """Do nothing: the active neighbours begin exchanges."""

    def stop(self) -> None:
        """Do nothing: each neighbour reports when it has finished."""

    def _count(self, weights: Tensor) -> None:
        self.bytes += 2 * weights.nbytes
        self.exchanges += 1


# The active side of gossip averaging, which begins exchanges.

# Largest silence towards a neighbour, as a fraction of its timeout.
_SIGN_OF_LIFE = 1 / 4


@dataclass(eq=False)
class Active(_Side):
    """Performs one exchange per publication, or as many as the network allows, in one thread."""

    choose: Callable[[Sequence[int], int], int]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._changed = threading.Condition()
        self._published = False
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._published = self._stopping = False
        self._thread = threading.Thread(target=self._run, name="gossip", daemon=True)
        self._thread.start()

    def publish(self) -> None:
        """Request an exchange, which follows the one in progress, if any."""
        with self._changed:
            self._published = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Announce to the neighbours that no exchange follows the one in progress."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        peer = None
        try:
            got, told = torch.empty(self.mixer.count), time.monotonic()
            while (kind := self._next()) != STOP:
                if kind == EXCHANGE and self.peers.living:
                    peer = self.choose(self.peers.living, self.exchanges)
                    self._exchange(peer, got)
                # With many neighbours, one may not be chosen for longer than its timeout.
                if time.monotonic() - told >= self.timeout_s * _SIGN_OF_LIFE:
                    self._send_all(ALIVE)
                    told = time.monotonic()
            self._send_all(STOP)
        except Exception as error:
            self.peers.fail(peer, error)

    def _next(self) -> int:
        """Wait for the next action and return its message kind."""
        with self._changed:
            # A passive learner cannot distinguish a long computation from a lost learner.
            self._changed.wait_for(
                lambda: self._published or self._stopping, timeout=self.timeout_s * _SIGN_OF_LIFE
            )
            if self._stopping:
                return STOP
            published, self._published = self._published, False
            return EXCHANGE if published else ALIVE

    def _exchange(self, peer: int, got: Tensor) -> None:
        sent = self.mixer.snapshot()
        try:
            self.transport.send(header(EXCHANGE, sent.numel()), peer, self.timeout_s)
            self.transport.send(sent, peer, self.timeout_s)
            self.transport.receive(got, peer, self.timeout_s)
        except PeerLost as lost:
            self.peers.lose(peer, str(lost))
            return
        self.mixer.average(got)
        self._count(got)

    def _send_all(self, kind: int) -> None:
        for peer in self.peers.living:
            try:
                self.transport.send(header(kind, self.mixer.count), peer, self.timeout_s)
            except PeerLost as lost:
                self.peers.lose(peer, str(lost))


# The passive side of gossip averaging, which answers exchanges.

# Number of concurrent exchanges: one is received while another is answered.
_BUFFERS = 2

# An active neighbour is silent while it waits for other learners, up to their timeout.
_PATIENCE = 3


@dataclass(eq=False)
class Passive(_Side):
    """Answers each neighbour in a thread; one may be silent for ``_PATIENCE`` timeouts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._patience_s = _PATIENCE * self.timeout_s
        self._buffers: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(min(_BUFFERS, len(self.peers.living))):
            self._buffers.put(torch.empty(self.mixer.count))
        self._threads: dict[int, threading.Thread] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        self._threads = {
            peer: threading.Thread(
                target=self._run, args=(peer,), name=f"gossip with {peer}", daemon=True
            )
            for peer in self.peers.living
        }
        for thread in self._threads.values():
            thread.start()

    def is_running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads.values())

    def _run(self, peer: int) -> None:
        try:
            self._serve(peer)
        except Exception as error:
            self.peers.fail(peer, error)

    def _serve(self, peer: int) -> None:
        message = blank()
        try:
            while True:
                self.transport.receive(message, peer, self._patience_s)
                kind = read(message, self.mixer.count, learner=self.peers.learner, peer=peer)
                if kind == STOP:
                    return
                if kind == EXCHANGE:
                    self._exchange(peer)
        except PeerLost as lost:
            self.peers.lose(peer, str(lost))

    def _exchange(self, peer: int) -> None:
        buffer = self._buffers.get()
        try:
            self.transport.receive(buffer, peer, self._patience_s)
            self.mixer.answer(buffer)
            self.transport.send(buffer, peer, self._patience_s)
        finally:
            self._buffers.put(buffer)
        with self._lock:
            self._count(buffer)


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
