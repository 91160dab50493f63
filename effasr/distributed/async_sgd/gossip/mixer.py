"""Buffers of one learner, and the arithmetic of asynchronous averaging.

Two learners average by exchanging their weights and adding half the difference:

    delta = (got - sent) / 2        on one side exactly the negative of the other's

An update made since ``sent`` was copied stays, because a delta is added and nothing is replaced. So
no update is lost, and the mean of all learners changes by their own updates alone, however late
deltas are applied. (Lian et al. 2018 replace the weights under a lock; without it, or with a lock
that is held too briefly, updates are lost.)

The thread that computes owns the weights. The other threads see the learner as

    view = the weights as last published + every delta received that is not in them

so they average with what the learner will have. The thread that computes never waits for them: it
publishes into a buffer of its own, and takes deltas only if no other thread is adding to them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from effasr.distributed.async_sgd.gossip.flat import Landed, Landing

# Elements processed at a time, so that they stay in the processor's cache.
_PIECE = 1 << 20


@dataclass(slots=True, eq=False)
class _Published:
    """A copy of the weights. ``passed``: a delta was taken since, which it does not contain."""

    buffer: Tensor
    landing: Landing
    version: int
    passed: bool = False


@dataclass(slots=True)
class _Arrivals:
    """Deltas received and not yet taken, and the versions of the weights they are based on."""

    count: int = 0
    versions: int = 0
    oldest: int = 0


class Mixer:
    """The buffers of one learner. The thread that computes calls `publish` and `take` only.

    Of the other threads, either one calls `snapshot` and `average` in turn (the active side), or
    any number call `answer` (the passive side).

    Attributes:
        applied: Number of deltas taken.
        staleness_sum: Sum over them of the own updates between the copy of the weights that a delta
            is computed from and the delta's being taken.
        staleness_max: Largest of these numbers.
        non_finite: Number of pieces that were left out of an exchange, on both sides, because of an
            infinity or NaN in one learner.
    """

    def __init__(self, count: int, *, pinned: bool = False) -> None:
        empty = lambda: torch.zeros(count, pin_memory=pinned)
        self._view = empty()
        self._pending = empty()
        self._taken = empty()
        # Besides the view there are a complete copy and one that is being filled.
        self._free = [empty(), empty()]
        self._copies: list[_Published] = []
        # Held for a pass over view and pending; the computing thread never waits for it.
        self._mixing = threading.Lock()
        # Held briefly, to hand a buffer over.
        self._handing = threading.Lock()
        self._view_version = 0
        self._arrivals = _Arrivals()
        # Signals that the device has read the delta taken last, and that a copy contains it: the
        # copy that followed. None until there is one.
        self._read: Landing | None = Landed()
        self.count = count
        self.applied = 0
        self.staleness_sum = 0
        self.staleness_max = 0
        self.non_finite = 0

    def publish(self, copy_to: Callable[[Tensor], Landing], version: int) -> bool:
        """Copy the weights for others; return False if the copy before is still in progress."""
        with self._handing:
            # A copy that is always replaced before it completes would never be seen.
            if self._copies and not self._copies[-1].landing.query():
                return False
            self._forget(self._copies[:-1])
            if not self._free:
                self._forget(self._copies)
            buffer = self._free.pop()
        landing = copy_to(buffer)
        with self._handing:
            self._copies.append(_Published(buffer, landing, version))
            if self._read is None:
                # The device makes the copy after all work queued before.
                self._read = landing
        return True

    def take(self, version: int) -> Tensor | None:
        """Return the sum of the deltas that arrived, to be added to the weights before `publish`.

        Returns:
            float32 (count,), valid until the next call; None if nothing arrived, if it cannot be
            had without waiting, or if a delta was taken since the last `publish`.
        """
        if not self._mixing.acquire(blocking=False):
            return None
        try:
            with self._handing:
                arrivals = self._arrivals
                if not arrivals.count or self._read is None or not self._read.query():
                    return None
                self._taken, self._pending = self._pending, self._taken
                self._arrivals = _Arrivals()
                self._read = None
                # A copy marked as passed earlier is no longer used: a later one is complete.
                for copy in self._copies:
                    copy.passed = True
        finally:
            self._mixing.release()
        self.applied += arrivals.count
        self.staleness_sum += version * arrivals.count - arrivals.versions
        self.staleness_max = max(self.staleness_max, version - arrivals.oldest)
        return self._taken

    def settle(self) -> None:
        """Let the next `take` return all deltas; no other thread runs, and the device is idle."""
        self._forget(self._copies)
        self._read = Landed()

    def snapshot(self) -> Tensor:
        """Return the view, float32 (count,), valid until `average` or the next call."""
        with self._handing:
            latest = self._copies[-1] if self._copies else None
        if latest is not None:
            latest.landing.synchronize()
        with self._mixing:
            self._renew()
        return self._view

    def average(self, got: Tensor) -> None:
        """Move halfway to what another learner sent; ``got`` is overwritten by the view before."""
        with self._mixing:
            self._average(got)

    def answer(self, got: Tensor) -> None:
        """Call `snapshot` and `average` at once: ``got`` becomes the reply to the other learner."""
        with self._mixing:
            self._renew()
            self._average(got)

    def _renew(self) -> None:
        """Update the view to the latest publication."""
        with self._handing:
            complete = [copy for copy in self._copies if copy.landing.query()]
            if not complete:
                return
            latest = complete.pop()
            self._copies.remove(latest)
            self._forget(complete)
        # Nothing can be taken meanwhile, so both stay unchanged.
        if self._arrivals.count:
            latest.buffer.add_(self._pending)
        if latest.passed:
            latest.buffer.add_(self._taken)
        old, self._view = self._view, latest.buffer
        self._view_version = latest.version
        with self._handing:
            self._free.append(old)

    def _forget(self, copies: Sequence[_Published]) -> None:
        """Release the buffers of copies."""
        for copy in list(copies):
            self._copies.remove(copy)
            self._free.append(copy.buffer)

    def _average(self, got: Tensor) -> None:
        first = not self._arrivals.count
        rows = (tensor.split(_PIECE) for tensor in (got, self._view, self._pending))
        for theirs, view, pending in zip(*rows, strict=True):
            delta = torch.sub(theirs, view).mul_(0.5)
            theirs.copy_(view)
            # Both sides see the same difference up to the sign, and so decide alike.
            if not all(math.isfinite(end.item()) for end in torch.aminmax(delta)):
                self.non_finite += 1
                delta.zero_()
            view.add_(delta)
            # The earlier content of the buffer was taken.
            pending.copy_(delta) if first else pending.add_(delta)
        version = self._view_version
        self._arrivals.oldest = version if first else min(self._arrivals.oldest, version)
        self._arrivals.count += 1
        self._arrivals.versions += version
