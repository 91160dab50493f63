"""Averaging in pairs as matrices, and learners whose device runs behind their host."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable

import torch

from effasr.distributed.async_sgd.gossip.mixer import Mixer
from effasr.distributed.async_sgd.gossip.sockets import PeerLost
from effasr.distributed.async_sgd.gossip.topology import is_active, neighbours


def edges(topology: str, learners: int) -> list[tuple[int, int]]:
    return [
        (active, passive)
        for active in range(0, learners, 2)
        for passive in neighbours(topology, active, learners)
        if is_active(active)
    ]


class DelayedCopyEvent:
    def __init__(self, device: Device):
        self._device = device
        self.completed = False

    def query(self) -> bool:
        return self.completed

    def synchronize(self):
        while not self.completed:
            self._device.advance()


class Device:
    """Does what it is asked to in order, but later: reads and writes buffers only then."""

    def __init__(self):
        self._work: list[Callable[[], None]] = []

    def ask(self, work: Callable[[], None]):
        self._work.append(work)

    def advance(self):
        if self._work:
            self._work.pop(0)()

    def finish(self):
        while self._work:
            self.advance()


class Learner:
    """A learner on such a device, whose host calls its mixer as training would."""

    def __init__(self, weights: torch.Tensor):
        self.weights = weights
        self.mixer = Mixer(weights.numel())
        self.device = Device()
        self.updates = 0
        self.publish()
        self.mixer.snapshot()

    def update(self, by: float):
        self.device.ask(lambda: self.weights.add_(by))
        self.updates += 1

    def publish(self):
        self.mixer.publish(self._copy_to, self.updates)

    def _copy_to(self, buffer: torch.Tensor) -> DelayedCopyEvent:
        event = DelayedCopyEvent(self.device)
        # Nobody may look at it before it is there.
        buffer.fill_(float("nan"))

        def copy():
            buffer.copy_(self.weights)
            event.completed = True

        self.device.ask(copy)
        return event

    def take(self):
        delta = self.mixer.take(self.updates)
        if delta is not None:
            self.device.ask(lambda: self.weights.add_(delta))

    def settle(self):
        self.device.finish()
        self.mixer.settle()
        self.take()
        self.device.finish()


class MemoryNetwork:
    """Learners in threads of one process. A message waits for its receiver."""

    def __init__(self, delay_s: float = 0.0):
        self._delay_s = delay_s
        self._boxes: dict[tuple[int, int], queue.Queue] = {}
        self._lock = threading.Lock()
        self.dead: set[int] = set()
        # Neither hear nor are heard, though nothing says so.
        self.cut: set[int] = set()

    def _box(self, sender: int, receiver: int) -> queue.Queue:
        with self._lock:
            return self._boxes.setdefault((sender, receiver), queue.Queue())

    def idle(self) -> bool:
        return all(not box.unfinished_tasks for box in self._boxes.values())

    def at(self, learner: int) -> MemoryTransport:
        return MemoryTransport(self, learner)

    def check(self, learner: int, peer: int, until: float):
        while {learner, peer} & self.cut and time.monotonic() < until:
            time.sleep(0.002)
        if time.monotonic() >= until:
            raise PeerLost("it has been silent")
        if {learner, peer} & self.dead:
            raise PeerLost("Connection closed by peer. Perhaps it crashed.")

    def travel(self):
        if self._delay_s:
            time.sleep(random.uniform(0, self._delay_s))


class MemoryTransport:
    def __init__(self, network: MemoryNetwork, learner: int):
        self._network = network
        self._learner = learner

    def send(self, tensor: torch.Tensor, peer: int, timeout_s: float):
        until = time.monotonic() + timeout_s
        self._network.travel()
        self._check(peer, until)
        box = self._network._box(self._learner, peer)
        box.put(tensor.clone())
        while box.unfinished_tasks:
            self._check(peer, until)
            time.sleep(0.0005)

    def receive(self, tensor: torch.Tensor, peer: int, timeout_s: float):
        until = time.monotonic() + timeout_s
        box = self._network._box(peer, self._learner)
        while True:
            self._check(peer, until)
            try:
                message = box.get(timeout=0.002)
                break
            except queue.Empty:
                pass
        assert message.shape == tensor.shape
        assert message.dtype == tensor.dtype
        tensor.copy_(message)
        box.task_done()

    def close(self):
        self._network.dead.add(self._learner)

    def _check(self, peer: int, until: float):
        self._network.check(self._learner, peer, until)
