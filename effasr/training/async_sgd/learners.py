"""Super-learners: groups of ranks that train together, and each group by itself.

Inside a learner all is as with ddp. What learners train on is claimed: each takes what comes next
when it has time, so that nobody waits for a slow one, and an epoch is still each utterance once
(`effasr.distributed.async_sgd.work_queue`). They meet where a validation or a checkpoint is due, at
the end, and when the run is to stop: nobody begins a claim beyond, what is not begun goes to
whoever arrives first, and when all is finished those that are left
(`effasr.distributed.async_sgd.membership`) go on together.

A step of the run is a step of the plan: with G learners, that many updates, one of each G-th part.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from effasr.distributed.async_sgd.gossip.config import GossipConfig
from effasr.distributed.async_sgd.membership import Members
from effasr.distributed.async_sgd.work_queue import Claims
from effasr.distributed.process_group import NCCL, World, forget_failure
from effasr.training.fault_tolerance.nonfinite_guard import TrainingFailed
from effasr.training.fault_tolerance.phase_tracker import LOADING

if TYPE_CHECKING:
    from effasr.data.loader import Loader
    from effasr.data.micro_batch_loader import MicroBatchRef, StepBatch

log = logging.getLogger(__name__)

_TRAIN, _OTHER, _PASS, _MEET, _WAIT, _FAIL = range(6)
_STOP = "stop"
_POLL_S = 0.03
# Well below any time after which a rank is taken for lost.
_WAIT_S = 0.5


class Learners:
    """The learner that this process belongs to, among all.

    Args:
        world: All ranks; learners are neighbours.
        size: Ranks of a learner.
        config: When one is lost.

    Attributes:
        world: The ranks that are left.
        own: Those of this learner, of which the first is its leader.
        count: Learners of the run, lost ones included.
        left: The numbers of those that met last.
        number: That of this one.
        made: Steps that this learner has made, besides those of the run before.
        step: That the run has come to.
        epoch: Of the step before that.
        position: Of that step: its epoch, and its number there.
        stopped: Whether the run ends here, for it was asked to.
    """

    def __init__(self, world: World, size: int, config: GossipConfig) -> None:
        first = world.rank - world.rank % size
        on_gpu = world.device.type == "cuda"
        self.world = world
        self.own = world.part(range(first, first + size), NCCL if on_gpu else None)
        self.count = world.size // size
        self.number = world.rank // size
        self.left = list(range(self.count))
        self.made = 0
        self.step = 0
        self.epoch = 0
        self.position = (0, 0)
        self.stopped = False
        self.members: Members | None = None
        self._config = config
        self._all = world
        self._claims: Claims | None = None
        self._begun = self._goal = 0
        self._begun_at = self._reached = self._done = 0
        self._taken = self._forgotten = 0
        self._halted = self._seated = False

    @property
    def store(self) -> Store:
        """Of the run."""
        assert self._all.store is not None
        return self._all.store

    @contextmanager
    def training(
        self,
        loader: Loader,
        step: int,
        position: tuple[int, int],
        goal: Callable[[int], int],
        *,
        begin: Callable[[], None],
        note: Callable[[str], None],
    ) -> Iterator[Iterator[StepBatch | None]]:
        """What this rank is to train on, one after the other; None where all have met.

        Args:
            loader: Of all ranks.
            step: The run begins with.
            position: Of this step: its epoch, and its number there.
            goal: Tells at which step learners meet, given that at which they go on.
            begin: Called whenever they go on.
            note: Told what is done between two steps.

        Raises:
            TrainingFailed: Another learner did.
        """
        self.step = self.made = self._done = step
        self.position = position
        self.epoch = position[0] - (step > 0 and position[1] == 0)
        self._calendar = _Calendar(loader, step, position)
        self._next_goal, self._begin, self._note = goal, begin, note
        leads = self.own.is_main
        if leads:
            first = step * self.count
            self._claims = Claims(PrefixStore("claims", self.store), self.number, first)
            self.members = Members(
                PrefixStore("members", self.store),
                self.number,
                self.count,
                self._config.timeout_s,
                self._tell,
            )
        self.store.add(f"made/{self.number}", 0)
        # Of all members there is a sign of life from here on.
        self._all.barrier()
        try:
            with self.members or nullcontext(), closing(self._work(loader)) as work:
                yield work
        except BaseException as error:
            if isinstance(error, TrainingFailed | ValueError):
                # What is wrong with the data or the settings is so for all.
                with suppress(RuntimeError):
                    self.store.compare_set("ending", "", str(error))
            raise

    def finish(self, claim: int, *, stopping: bool = False) -> int:
        """Say that a claim was trained, and whether a rank of this learner was asked to stop.

        Returns:
            The step that the run has come to, as far as was known when this claim was begun; the
            same on all ranks of the learner.

        Raises:
            LeftOut: The others go on without this learner.
        """
        self.made += 1
        if self._claims is not None:
            if self.members is not None:
                # One that others have given up must write nothing any more.
                self.members.check()
            self._claims.finish(claim)
            if stopping:
                self.store.compare_set("ending", "", _STOP)
            self.store.add(f"made/{self.number}", 1)
            done = self.store.add(f"finished/{self._begun_at}", 1) // self.count
            # The last of them is reached when all have met.
            self._done = min(self._begun_at + done, self._goal - 1)
        return self.step

    def made_by_all(self) -> list[int]:
        """Steps that each learner has made since this run was started."""
        keys = [f"made/{number}" for number in range(self.count)]
        return [int(value) for value in self.store.multi_get(keys)]

    def suspect(self, learner: int) -> None:
        """A connection to a learner broke; any thread of the leader may call it."""
        if self.members is not None:
            self.members.suspect(learner)

    def _work(self, loader: Loader) -> Generator[StepBatch | None, None, None]:
        with closing(loader.take(self._turns())) as loaded:
            self._open()
            self._note(LOADING)
            ahead = next(loaded)
            while True:
                move, value = self._agree(ahead.number)
                if move == _TRAIN:
                    yield ahead
                if move in (_TRAIN, _PASS):
                    self._taken += 1
                    self._note(LOADING)
                    ahead = next(loaded)
                elif move == _OTHER:
                    # Seldom, and out of order: not worth a place in the queue of the workers.
                    self._note(LOADING)
                    yield loader.load(self._turn(value))
                elif move == _WAIT:
                    self._note("waiting for other learners")
                else:
                    self._close(value)
                    yield None
                    self._open()

    def _turns(self) -> Iterator[MicroBatchRef]:
        """Of the claims that this learner reserves; its ranks ask for the same ones."""
        number = 0
        while True:
            key = self._reserved(number)
            if self._claims is None:
                claim = int(self.store.get(key))
            else:
                claim = self._claims.reserve()
                if self.own.size > 1:
                    self.store.set(key, str(claim))
            yield self._turn(claim)
            number += 1

    def _reserved(self, number: int) -> str:
        return f"reserved/{self.number}/{number}"

    def _turn(self, claim: int) -> MicroBatchRef:
        # Here, so that a model can be trained without the packages that read data.
        from effasr.data.micro_batch_loader import MicroBatchRef

        step, share = divmod(claim, self.count)
        return MicroBatchRef(*self._calendar(step), share + self.count * self.own.rank, claim)

    def _agree(self, ahead: int) -> tuple[int, int]:
        """What the leader decides to do next, on all ranks of the learner."""
        move = torch.zeros(3, dtype=torch.int64)
        failure = None
        if self._claims is not None:
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
        """What to do next, given the claim that this learner has reserved and loaded."""
        claims, members = self._claims, self.members
        assert claims is not None
        assert members is not None
        until = time.monotonic() + _WAIT_S
        while time.monotonic() < until:
            members.check()
            limit = self._limit(members)
            if limit is not None and not self._seated:
                if ahead < limit * self.count:
                    mine = claims.begin(ahead)
                    if mine:
                        self._begun = max(self._begun, ahead // self.count + 1)
                    return (_TRAIN if mine else _PASS), ahead
                open_ = claims.unfinished(self._begun_at * self.count, limit * self.count)
                # The last of them first: their owners begin with the first.
                for claim in reversed(open_):
                    if claims.begin(claim) or claims.seize(claim, members.lost):
                        self._begun = max(self._begun, claim // self.count + 1)
                        return _OTHER, claim
                self._seated = not open_
                self._reached = limit
            if self._seated and (present := members.meet()) is not None:
                self.left = present
                return _MEET, self._reached
            time.sleep(_POLL_S)
        return _WAIT, 0

    def _limit(self, members: Members) -> int | None:
        """The step where all meet; None while those that are to stop agree on it.

        Raises:
            TrainingFailed: A learner failed for a reason that holds for all.
        """
        store = self.store
        if not store.check(["ending"]):
            return self._goal
        reason = store.get("ending").decode()
        if reason != _STOP:
            raise TrainingFailed(reason)
        if not self._halted:
            # From here on this learner begins nothing, but what others have begun with it.
            store.set(f"halted/{self.number}", str(self._begun))
            self._halted = True
        if not store.check(["limit"]):
            keys = [f"halted/{number}" for number in (self.number, *members.left)]
            if not store.check(keys):
                return None
            store.compare_set("limit", "", str(max(map(int, store.multi_get(keys)))))
        return min(self._goal, int(store.get("limit")))

    def _open(self) -> None:
        """Begin to train towards the next meeting."""
        self._begun_at = self._begun = self._done = self.step
        self._goal = self._next_goal(self.step)
        self._seated = False
        self._begin()

    def _close(self, reached: int) -> None:
        """Find those that are left, and agree with them where the run is."""
        self.left, size = self.own.broadcast(self.left), self.own.size
        ranks = [size * learner + rank for learner in self.left for rank in range(size)]
        if len(ranks) < self.world.size:
            self.world = self._all.part(ranks)
            self._all.left.append(self.world)
            forget_failure(self.store)
        # One that saw the request to stop late may have gone further, and all that is finished.
        seen = self.world.gather((reached, self._halted))
        self.step = max(step for step, _ in seen)
        self.stopped = any(halted for _, halted in seen)
        if self._claims is not None:
            self._claims.forget()
            for number in range(self._forgotten, self._taken if size > 1 else 0):
                self.store.delete_key(self._reserved(number))
            self._forgotten = self._taken
        self.position = self._calendar(self.step)
        if self.step > self._begun_at:
            self.epoch = self._calendar(self.step - 1)[0]

    def _tell(self, learner: int) -> None:
        log.warning(
            "learner %d is lost, near step %d: the others go on, and train what it has left. Of "
            "what it had trained, that is kept which reached a neighbour.",
            learner,
            self.step,
        )


class _Calendar:
    """Finds the place of a step of the run in the epochs.

    Args:
        loader: Has the plans.
        step: Of the run.
        position: Its place: epoch, and number there.
    """

    def __init__(self, loader: Loader, step: int, position: tuple[int, int]) -> None:
        epoch, number = position
        self._loader = loader
        self._first = epoch
        # Of each epoch from the first on, the step with which it begins, and the end of the last.
        self._begins = [step - number]

    def __call__(self, step: int) -> tuple[int, int]:
        """Epoch, and number there."""
        while step >= self._begins[-1] or len(self._begins) < 2:
            epoch = self._first + len(self._begins) - 1
            self._begins.append(self._begins[-1] + self._loader.plan(epoch).num_steps)
        place = bisect.bisect_right(self._begins, step) - 1
        return self._first + place, step - self._begins[place]
