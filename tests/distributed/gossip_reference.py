"""Learners whose device runs behind their host."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.distributed import HashStore

from effasr.distributed.async_sgd.gossip.mixer import Mixer
from effasr.distributed.async_sgd.gossip.sockets import SocketTransport


class DelayedCopyEvent:
    def __init__(self, device: "Device"):
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


def connect(*learners: int, timeout_s: float = 20.0, tls=(None, None)) -> list[SocketTransport]:
    """Learners, each with all of the other kind, which may have another certificate."""
    store = HashStore()
    with ThreadPoolExecutor(8) as pool:
        made = [
            pool.submit(
                SocketTransport,
                store,
                n,
                [o for o in learners if (o - n) % 2],
                timeout_s,
                tls[n % 2],
            )
            for n in learners
        ]
        return [future.result() for future in made]
