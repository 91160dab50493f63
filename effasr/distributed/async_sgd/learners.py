"""Learners: groups of ranks that train without waiting for the other groups.

Within a learner, ranks exchange gradients as with ddp. Learners share a queue of work items
(`WorkQueue`): each takes the next item when it is ready, so that a slow learner delays nobody and
an epoch still has each utterance once. Learners synchronize for a validation, a checkpoint, the end
of the run or a request to stop: no learner begins an item beyond that step, items that were not
begun go to the learner that arrives first, and when all are finished the remaining learners
(`Membership`) continue together.

With G learners, a step of the plan consists of G updates, each on one G-th of its data.
"""

import logging
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from effasr.distributed.async_sgd.gossip.config import GossipConfig
from effasr.distributed.async_sgd.membership import Membership, WorkQueue
from effasr.distributed.failures import TrainingFailed
from effasr.distributed.process_group import NCCL, DistributedContext

log = logging.getLogger(__name__)


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
