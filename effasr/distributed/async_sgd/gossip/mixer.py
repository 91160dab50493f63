"""Copies of a model's weights as one flat tensor in host memory."""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class CopyEvent(Protocol):
    """Completion of a copy, with the interface of a `torch.cuda.Event`."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class CompletedCopy:
    """A copy that was complete when the call returned."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Return at once."""


class FlatWeights:
    """Copies the concatenation of tensors to the host.

    From a GPU the copy overlaps with later computation: the weights are concatenated on the device
    and copied on a separate stream. This needs device memory for one more copy of them.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        if not any(tensor.numel() for tensor in tensors):
            raise ValueError("`tensors` must not be empty: there is nothing to average.")
        for index, tensor in enumerate(tensors):
            if tensor.dtype != torch.float32:
                raise ValueError(
                    f"`tensors` must be float32, but number {index} is {tensor.dtype}: what a "
                    "learner gets from others is small, and would be rounded away. Keep weights in "
                    "float32 and compute in autocast."
                )
            if tensor.device != tensors[0].device:
                raise ValueError(
                    f"`tensors` must be on one device, but number {index} is on {tensor.device} "
                    f"and the first on {tensors[0].device}."
                )
        self._tensors = list(tensors)
        self.device = tensors[0].device
        self.count = sum(tensor.numel() for tensor in tensors)
        if self.device.type == "cuda":
            self._gathered = torch.empty(self.count, device=self.device)
            self._stream = torch.cuda.Stream(self.device)
            self._copied = torch.cuda.Event()

    @torch.no_grad()
    def copy_to(self, host: Tensor) -> CopyEvent:
        """Copy the weights to ``host``: float32 (count,), pinned if the tensors are on a GPU."""
        rows = [tensor.detach().reshape(-1) for tensor in self._tensors]
        if self.device.type != "cuda":
            torch.cat(rows, out=host)
            return CompletedCopy()
        current = torch.cuda.current_stream(self.device)
        # The previous copy may still read the buffer that is overwritten here; an unrecorded event
        # counts as done.
        current.wait_event(self._copied)
        torch.cat(rows, out=self._gathered)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            host.copy_(self._gathered, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        return self._copied

    def settle(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


# Buffers of one learner and the arithmetic of asynchronous averaging.
#
# Two learners average by exchanging their weights and adding half the difference:
#
#     delta = (got - sent) / 2        on one side exactly the negative of the other's
#
# A delta is added and nothing is replaced, so an update made after ``sent`` was copied is kept. No
# update is lost, and the mean of all learners changes only by their own updates, however late
# deltas are applied. (Lian et al. 2018 replace the weights under a lock; without the lock, or if it
# is held too briefly, updates are lost.)
#
# The computing thread owns the weights. The other threads see the learner as
#
#     view = the weights as last published + every received delta that they do not contain
#
# so they average with the weights that the learner will have. The computing thread never waits for
# them: it publishes into its own buffer, and takes deltas only if no other thread is adding to
# them.

# Number of elements processed at a time, so that they stay in the processor's cache.
_PIECE = 1 << 20


@dataclass(slots=True, eq=False)
class _Published:
    """A copy of the weights. ``passed``: it lacks a delta that was taken since."""

    buffer: Tensor
    event: CopyEvent
    version: int
    passed: bool = False


@dataclass(slots=True)
class _Arrivals:
    """Received deltas not taken yet, and the versions of the weights they are based on."""

    count: int = 0
    versions: int = 0
    oldest: int = 0


class Mixer:
    """The buffers of one learner. The computing thread calls only `publish` and `take`.

    On the active side, one other thread calls `snapshot` and `average` in turn. On the passive
    side, any number of threads call `answer`.
    """

    def __init__(self, count: int, *, pinned: bool = False) -> None:
        empty = lambda: torch.zeros(count, pin_memory=pinned)
        self._view = empty()
        self._pending = empty()
        self._delta = empty()
        # Besides the view, there is one complete copy and one that is being filled.
        self._free = [empty(), empty()]
        self._copies: list[_Published] = []
        # Held during a pass over view and pending; the computing thread never waits for it.
        self._mixing = threading.Lock()
        # Held briefly while a buffer is handed over.
        self._handing = threading.Lock()
        self._view_version = 0
        self._arrivals = _Arrivals()
        # Signals that the device has read the last taken delta and that a copy contains it, namely
        # the copy after it. None until that copy exists.
        self._read: CopyEvent | None = CompletedCopy()
        self.count = count
        self.applied = 0  # Number of deltas taken
        # Sum over the taken deltas of the number of own updates between the copy of the weights
        # from which a delta is computed and the call that took it
        self.staleness_sum = 0
        self.staleness_max = 0  # Largest such number
        # Number of pieces left out of an exchange, on both sides, because of an infinity or NaN in
        # one learner
        self.non_finite = 0

    def publish(self, copy_to: Callable[[Tensor], CopyEvent], version: int) -> bool:
        """Copy the weights for others; return False if the previous copy is still in progress."""
        with self._handing:
            # A copy that is replaced each time before it completes would never be used.
            if self._copies and not self._copies[-1].event.query():
                return False
            self._forget(self._copies[:-1])
            if not self._free:
                self._forget(self._copies)
            buffer = self._free.pop()
        event = copy_to(buffer)
        with self._handing:
            self._copies.append(_Published(buffer, event, version))
            if self._read is None:
                # The device makes the copy after all previously queued work.
                self._read = event
        return True

    def take(self, version: int) -> Tensor | None:
        """Return the sum of the deltas that arrived, to be added to the weights before `publish`.

        float32 (count,), valid until the next call. None if no delta is available without waiting,
        or if one was taken since the last `publish`.
        """
        if not self._mixing.acquire(blocking=False):
            return None
        try:
            with self._handing:
                arrivals = self._arrivals
                if not arrivals.count or self._read is None or not self._read.query():
                    return None
                self._delta, self._pending = self._pending, self._delta
                self._arrivals = _Arrivals()
                self._read = None
                # A copy marked as passed earlier is no longer used, because a later one is
                # complete.
                for copy in self._copies:
                    copy.passed = True
        finally:
            self._mixing.release()
        self.applied += arrivals.count
        self.staleness_sum += version * arrivals.count - arrivals.versions
        self.staleness_max = max(self.staleness_max, version - arrivals.oldest)
        return self._delta

    def settle(self) -> None:
        """Let the next `take` return all deltas; needs idle threads and an idle device."""
        self._forget(self._copies)
        self._read = CompletedCopy()

    def snapshot(self) -> Tensor:
        """Return the view, float32 (count,), valid until `average` or the next call."""
        with self._handing:
            latest = self._copies[-1] if self._copies else None
        if latest is not None:
            latest.event.synchronize()
        with self._mixing:
            self._renew()
        return self._view

    def average(self, got: Tensor) -> None:
        """Move halfway to another learner's weights; ``got`` is overwritten by the earlier view."""
        with self._mixing:
            self._average(got)

    def answer(self, got: Tensor) -> None:
        """Do `snapshot` and `average` at once: ``got`` becomes the reply to the other learner."""
        with self._mixing:
            self._renew()
            self._average(got)

    def _renew(self) -> None:
        with self._handing:
            complete = [copy for copy in self._copies if copy.event.query()]
            if not complete:
                return
            latest = complete.pop()
            self._copies.remove(latest)
            self._forget(complete)
        # No delta can be taken meanwhile, so both stay unchanged.
        if self._arrivals.count:
            latest.buffer.add_(self._pending)
        if latest.passed:
            latest.buffer.add_(self._delta)
        old, self._view = self._view, latest.buffer
        self._view_version = latest.version
        with self._handing:
            self._free.append(old)

    def _forget(self, copies: Sequence[_Published]) -> None:
        for copy in list(copies):
            self._copies.remove(copy)
            self._free.append(copy.buffer)

    def _average(self, got: Tensor) -> None:
        first = not self._arrivals.count
        rows = (tensor.split(_PIECE) for tensor in (got, self._view, self._pending))
        for theirs, view, pending in zip(*rows, strict=True):
            delta = torch.sub(theirs, view).mul_(0.5)
            theirs.copy_(view)
            # Both sides see the same difference up to the sign, and so decide equally.
            if not all(math.isfinite(end.item()) for end in torch.aminmax(delta)):
                self.non_finite += 1
                delta.zero_()
            view.add_(delta)
            # The earlier content of the buffer was already taken.
            pending.copy_(delta) if first else pending.add_(delta)
        version = self._view_version
        self._arrivals.oldest = version if first else min(self._arrivals.oldest, version)
        self._arrivals.count += 1
        self._arrivals.versions += version
