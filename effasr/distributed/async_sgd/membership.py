"""Membership of learners: heartbeats, lost learners, and the participants of synchronizations."""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import InitVar, dataclass
from typing import Self

from torch.distributed import Store  # type: ignore[attr-defined]

log = logging.getLogger(__name__)

BEAT_S = 1.0  # Seconds between two heartbeats

_SUSPECTED_S = 4 * BEAT_S
"""Seconds without a heartbeat after which a learner with a broken connection is lost."""


class EvictedError(RuntimeError):
    """The other learners considered this one lost and continue without it."""

    exit_code = os.EX_TEMPFAIL


@dataclass(eq=False)
class Membership:
    """The learners of a run; a thread of each leader sends a heartbeat to the store.

    A learner is lost when it reports a failure, when it was silent for ``timeout_s``, or when a
    connection to it broke and it is silent. Learners notice that at different times, so the
    remaining learners are determined at a synchronization, by the first learner that finds all of
    them there.
    """

    _store: Store
    _learner: int
    learners: InitVar[int]
    timeout_s: float
    on_lost: Callable[[int], None]

    def __post_init__(self, learners: int) -> None:
        self._others = [other for other in range(learners) if other != self._learner]
        self.lost: frozenset[int] = frozenset()  # Lost learners known to this one
        self._synchronizations = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)
        self._store.set(f"beat/{self._learner}", "0")

    def __enter__(self) -> Self:
        """Start the heartbeat; all learners were made before."""
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Stop the heartbeat; after an error, inform the others at once."""
        self._ended.set()
        # With a timeout, because the store may be gone.
        self._thread.join(2 * BEAT_S)
        if error is not None:
            try:
                self._store.set(f"gone/{self._learner}", "")
            except RuntimeError:
                log.debug("the store is gone as well")

    @property
    def remaining(self) -> list[int]:
        return [other for other in self._others if other not in self.lost]

    def suspect(self, learner: int) -> None:
        """Report that a connection to a learner broke; any thread may call this."""
        self._store.set(f"suspected/{learner}", "")

    def check(self) -> None:
        """Raise `EvictedError` if the others have synchronized without this learner."""
        key = f"present/{self._synchronizations}"
        if self._store.check([key]) and self._learner not in json.loads(self._store.get(key)):
            raise EvictedError(
                f"learner {self._learner} was silent for too long, and the others continue without "
                "it: if it was only slow, raise training.gossip.timeout_s."
            )

    def try_synchronize(self) -> list[int] | None:
        """Report the arrival of this learner; return those present, None while some are missing."""
        key = f"present/{self._synchronizations}"
        if not self._store.check([key]):
            self._store.set(self._arrival(self._learner), "")
            remaining = self.remaining
            if not all(self._store.check([self._arrival(other)]) for other in remaining):
                return None
            # Learners may know of different losses: the first one decides for all.
            self._store.compare_set(key, "", json.dumps(sorted([self._learner, *remaining])))
        self.check()
        present = json.loads(self._store.get(key))
        self._synchronizations += 1
        # Nobody waits for a learner that arrives later.
        self._lose({other for other in self._others if other not in present})
        return present

    def _arrival(self, learner: int) -> str:
        return f"arrived/{self._synchronizations}/{learner}"

    def _run(self) -> None:
        count, seen = 0, {other: (b"0", time.monotonic()) for other in self._others}
        while not self._ended.wait(BEAT_S):
            count += 1
            try:
                self._store.set(f"beat/{self._learner}", str(count))
                self._read_heartbeats(seen)
            except RuntimeError as error:
                # The training thread reports the loss of the store.
                log.debug("no heartbeat: %s", error)
                return

    def _read_heartbeats(self, seen: dict[int, tuple[bytes, float]]) -> None:
        """Compare the others' heartbeats with those ``seen`` before, each with its time."""
        remaining, now = self.remaining, time.monotonic()
        if not remaining:
            return
        for other, beat in zip(
            remaining, self._store.multi_get([f"beat/{n}" for n in remaining]), strict=True
        ):
            if beat != seen[other][0]:
                seen[other] = beat, now
        silent = {other: now - seen[other][1] for other in remaining}
        lost = {other for other in remaining if silent[other] > self.timeout_s}
        for other in remaining:
            for sign, patience in (("suspected", _SUSPECTED_S), ("gone", BEAT_S)):
                if silent[other] > patience and self._store.check([f"{sign}/{other}"]):
                    lost.add(other)
        self._lose(lost)

    def _lose(self, learners: set[int]) -> None:
        with self._lock:
            new = learners - self.lost
            self.lost |= learners
        for learner in sorted(new):
            self.on_lost(learner)


# A queue of work items that learners share while they train, each at its own speed.
#
# Item ``i`` is share ``i % G`` of plan step ``i // G``, with G learners. Each learner reserves the
# next free item a little ahead of its training, so that data can be loaded, begins it in its turn,
# and marks it as finished. Another learner may begin an item that is reserved but not begun, or
# seize one that a lost learner has begun. So each item below a limit is finished by exactly one
# learner, whatever the speeds of learners and whichever are lost.
#
# Keys in the store: ``reserved`` is a counter; ``begun/I`` holds the learner that began an item;
# ``done/I`` exists when it is finished.


class WorkQueue:
    """The queue, as the leader of one learner uses it."""

    def __init__(self, store: Store, learner: int, first: int) -> None:
        self._store = store
        self._name = str(learner)
        self._first = first
        self._finished: list[int] = []
        self._open: tuple[tuple[int, int], list[int]] | None = None

    def reserve(self) -> int:
        """Return the next item that no learner has reserved."""
        return self._first + self._store.add("reserved", 1) - 1

    def begin(self, item: int) -> bool:
        """Begin an item; return False if another learner has begun it."""
        owner = self._store.compare_set(f"begun/{item}", "", self._name)
        return owner.decode() == self._name

    def seize(self, item: int, lost: Collection[int]) -> bool:
        """Take over an item that a lost learner has begun; return False if none of them has."""
        key = f"begun/{item}"
        if not self._store.check([key]):
            return False
        owner = self._store.get(key).decode()
        if int(owner) not in lost:
            return False
        return self._store.compare_set(key, owner, self._name).decode() == self._name

    def finish(self, item: int) -> None:
        self._store.set(f"done/{item}", self._name)
        self._finished.append(item)

    def unfinished(self, begin: int, end: int) -> Sequence[int]:
        """Return the items from ``begin`` to below ``end`` that are not finished."""
        if self._open is None or self._open[0] != (begin, end):
            self._open = (begin, end), list(range(begin, end))
        self._open = (begin, end), self._missing(self._open[1])
        return self._open[1]

    def forget(self) -> None:
        """Delete the keys of the items that this learner has finished."""
        for item in self._finished:
            self._store.delete_key(f"begun/{item}")
            self._store.delete_key(f"done/{item}")
        self._finished = []

    def _missing(self, items: list[int]) -> list[int]:
        """Bisect the items; one request to the store checks whether all of a range are finished."""
        if not items or self._store.check([f"done/{item}" for item in items]):
            return []
        if len(items) == 1:
            return items
        middle = len(items) // 2
        return self._missing(items[:middle]) + self._missing(items[middle:])
