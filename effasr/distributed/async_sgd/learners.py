"""Learners: groups of ranks that train without waiting for the other groups.

Within a learner, ranks exchange gradients as with ddp. Learners share a queue of work items
(`WorkQueue`): each takes the next item when it is ready, so that a slow learner delays nobody and
an epoch still has each utterance once. Learners synchronize for a validation, a checkpoint, the end
of the run or a request to stop: no learner begins an item beyond that step, items that were not
begun go to the learner that arrives first, and when all are finished the remaining learners
(`Membership`) continue together.

With G learners, a step of the plan consists of G updates, each on one G-th of its data.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import InitVar, dataclass
from typing import Generic, Protocol, Self, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from effasr.distributed.async_sgd.gossip.config import GossipConfig
from effasr.distributed.failures import TrainingFailed
from effasr.distributed.process_group import NCCL, DistributedContext

# Membership of learners: heartbeats, lost learners, and the participants of synchronizations.


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


class WorkData(Protocol):
    @property
    def number(self) -> int: ...


T = TypeVar("T", bound=WorkData)
T_co = TypeVar("T_co", bound=WorkData, covariant=True)

_TRAIN, _OTHER, _PASS, _SYNC, _WAIT, _FAIL = range(6)
_STOP = "stop"
_POLL_S = 0.03
# Well below any timeout of a lost rank.
_WAIT_S = 0.5


class WorkLoader(Protocol, Generic[T_co]):
    def take(self, items: Iterator[int]) -> Generator[T_co, None, None]:
        """Yield the data of each item; ``items`` is read ahead."""
        ...

    def load(self, item: int) -> T_co: ...

    def position(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step of the run, and its index there."""
        ...


class Learners:
    """The learner of this process: ``size`` neighbouring ranks among all."""

    def __init__(self, context: DistributedContext, size: int, config: GossipConfig) -> None:
        first = context.rank - context.rank % size
        on_gpu = context.device.type == "cuda"
        self.context = context  # All remaining ranks
        # Ranks of this learner, of which the first is the leader
        self.own = context.subgroup(range(first, first + size), NCCL if on_gpu else None)
        self.count = context.size // size  # Number of learners of the run, lost ones included
        self.number = context.rank // size  # Number of this learner
        # Numbers of the learners at the last synchronization
        self.remaining = list(range(self.count))
        # Steps that this learner has made, and those of the run before it was resumed
        self.made = 0
        self.step = 0  # Step that the run has reached
        self.epoch = 0  # Epoch of the step before
        self.position = (0, 0)  # Epoch of the next step, and its index there
        self.stopped = False  # Whether the run was asked to stop here
        self.membership: Membership | None = None
        self._config = config
        self._all = context
        self._queue: WorkQueue | None = None
        self._begun = self._sync_step = 0
        self._begun_at = self._reached = self._done = 0
        self._taken = self._forgotten = 0
        self._halted = self._arrived = False

    @property
    def store(self) -> Store:
        assert self._all.store is not None
        return self._all.store

    @contextmanager
    def training(
        self,
        loader: WorkLoader[T],
        step: int,
        next_sync_step: Callable[[int], int],
        *,
        on_begin: Callable[[], None],
        on_wait: Callable[[], None],
    ) -> Iterator[Iterator[T | None]]:
        """Yield an iterator of this rank's data; None where all learners have synchronized."""
        self.step = self.made = self._done = step
        self.position = loader.position(step)
        self.epoch = self.position[0] - (step > 0 and self.position[1] == 0)
        self._loader, self._next_sync_step = loader, next_sync_step
        self._on_begin, self._on_wait = on_begin, on_wait
        if self.own.is_main:
            first = step * self.count
            self._queue = WorkQueue(PrefixStore("work", self.store), self.number, first)
            self.membership = Membership(
                PrefixStore("members", self.store),
                self.number,
                self.count,
                self._config.timeout_s,
                self._warn_of_loss,
            )
        self.store.add(f"made/{self.number}", 0)
        # From here on, all members send heartbeats.
        self._all.barrier()
        try:
            with self.membership or nullcontext(), closing(self._work(loader)) as work:
                yield work
        except BaseException as error:
            if isinstance(error, TrainingFailed | ValueError):
                # Invalid data or settings concern all learners.
                with suppress(RuntimeError):
                    self.store.compare_set("ending", "", str(error))
            raise

    def finish(self, item: int, *, stopping: bool = False) -> int:
        """Report that an item was trained, and whether a rank of this learner was asked to stop."""
        self.made += 1
        if self._queue is not None:
            if self.membership is not None:
                # A learner that the others consider lost must not write any more.
                self.membership.check()
            self._queue.finish(item)
            if stopping:
                self.store.compare_set("ending", "", _STOP)
            self.store.add(f"made/{self.number}", 1)
            done = self.store.add(f"finished/{self._begun_at}", 1) // self.count
            # The last steps are complete only after the synchronization.
            self._done = min(self._begun_at + done, self._sync_step - 1)
        return self.step

    def steps_of_all(self) -> list[int]:
        """Return the steps that each learner has made since this start of the run."""
        keys = [f"made/{number}" for number in range(self.count)]
        return [int(value) for value in self.store.multi_get(keys)]

    def suspect(self, learner: int) -> None:
        """Report that a connection to a learner broke; any thread of the leader may call this."""
        if self.membership is not None:
            self.membership.suspect(learner)

    def _work(self, loader: WorkLoader[T]) -> Generator[T | None, None, None]:
        with closing(loader.take(self._reserved_items())) as loaded:
            self._begin()
            ahead = next(loaded)
            while True:
                move, value = self._agree(ahead.number)
                if move == _TRAIN:
                    yield ahead
                if move in (_TRAIN, _PASS):
                    self._taken += 1
                    ahead = next(loaded)
                elif move == _OTHER:
                    # Rare, and out of order: loaded here instead of in the queue of the workers.
                    yield loader.load(value)
                elif move == _WAIT:
                    self._on_wait()
                else:
                    self._synchronize(value)
                    yield None
                    self._begin()

    def _reserved_items(self) -> Iterator[int]:
        """Yield the items that this learner reserves; its ranks yield the same ones."""
        number = 0
        while True:
            key = self._reservation(number)
            if self._queue is None:
                item = int(self.store.get(key))
            else:
                item = self._queue.reserve()
                if self.own.size > 1:
                    self.store.set(key, str(item))
            yield item
            number += 1

    def _reservation(self, number: int) -> str:
        return f"reserved/{self.number}/{number}"

    def _agree(self, ahead: int) -> tuple[int, int]:
        """Broadcast the leader's decision about the next action to all ranks of the learner."""
        move = torch.zeros(3, dtype=torch.int64)
        failure = None
        if self._queue is not None:
            try:
                move = torch.tensor((*self._decide(ahead), self._done))
            except TrainingFailed as error:
                move[0], failure = _FAIL, error
        if self.own.size > 1:
            dist.broadcast(move, group=self.own.group, group_src=0)
        kind, value, self.step = move.tolist()
        if kind == _FAIL:
            raise failure or TrainingFailed(self.store.get("ending").decode())
        return kind, value

    def _decide(self, ahead: int) -> tuple[int, int]:
        queue, membership = self._queue, self.membership
        assert queue is not None
        assert membership is not None
        until = time.monotonic() + _WAIT_S
        while time.monotonic() < until:
            membership.check()
            limit = self._limit(membership)
            if limit is not None and not self._arrived:
                if ahead < limit * self.count:
                    return (_TRAIN if self._try_begin(queue, ahead) else _PASS), ahead
                unfinished = queue.unfinished(self._begun_at * self.count, limit * self.count)
                # Backwards, because the learners that reserved them begin with the first.
                for item in reversed(unfinished):
                    if self._try_begin(queue, item, membership.lost):
                        return _OTHER, item
                self._arrived = not unfinished
                self._reached = limit
            if self._arrived and (present := membership.try_synchronize()) is not None:
                self.remaining = present
                return _SYNC, self._reached
            time.sleep(_POLL_S)
        return _WAIT, 0

    def _try_begin(self, queue: WorkQueue, item: int, lost: frozenset[int] = frozenset()) -> bool:
        """Begin an item that no other learner has begun, except lost ones."""
        if not queue.begin(item) and not (lost and queue.seize(item, lost)):
            return False
        self._begun = max(self._begun, item // self.count + 1)
        return True

    def _limit(self, membership: Membership) -> int | None:
        """Return the step at which all synchronize; None while learners agree on a stop."""
        store = self.store
        if not store.check(["ending"]):
            return self._sync_step
        reason = store.get("ending").decode()
        if reason != _STOP:
            raise TrainingFailed(reason)
        if not self._halted:
            # From here on this learner begins nothing beyond the steps that others have begun.
            store.set(f"halted/{self.number}", str(self._begun))
            self._halted = True
        if not store.check(["limit"]):
            keys = [f"halted/{number}" for number in (self.number, *membership.remaining)]
            if not store.check(keys):
                return None
            store.compare_set("limit", "", str(max(map(int, store.multi_get(keys)))))
        return min(self._sync_step, int(store.get("limit")))

    def _begin(self) -> None:
        self._begun_at = self._begun = self._done = self.step
        self._sync_step = self._next_sync_step(self.step)
        self._arrived = False
        self._on_begin()

    def _synchronize(self, reached: int) -> None:
        """Agree with the remaining learners on the step that the run has reached."""
        self.remaining, size = self.own.broadcast(self.remaining), self.own.size
        ranks = [size * learner + rank for learner in self.remaining for rank in range(size)]
        if len(ranks) < self.context.size:
            self.context = self._all.subgroup(ranks)
            self._all.survivors.append(self.context)
        # A learner that saw the request to stop late may be ahead; all of its items are finished.
        seen = self.context.all_gather((reached, self._halted))
        self.step = max(step for step, _ in seen)
        self.stopped = any(halted for _, halted in seen)
        if self._queue is not None:
            self._queue.forget()
            for number in range(self._forgotten, self._taken if size > 1 else 0):
                self.store.delete_key(self._reservation(number))
            self._forgotten = self._taken
        self.position = self._loader.position(self.step)
        if self.step > self._begun_at:
            self.epoch = self._loader.position(self.step - 1)[0]

    def _warn_of_loss(self, learner: int) -> None:
        log.warning(
            "learner %d is lost, near step %d: the others continue and train its other items. Its "
            "last updates are kept if they reached a neighbour.",
            learner,
            self.step,
        )
