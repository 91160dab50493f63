"""Which learners are left, and how those that are find each other."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from torch.distributed import Store  # type: ignore[attr-defined]

log = logging.getLogger(__name__)

BEAT_S = 1.0
"""Between two signs of life."""

_SUSPECTED_S = 4 * BEAT_S
"""Without a sign of life from a learner to which another lost its connection."""


class LeftOut(RuntimeError):
    """The other learners took this one for lost, and have gone on."""

    exit_code = os.EX_TEMPFAIL


class Members:
    """The learners of a run: each leader says once in a while that it lives, in a thread.

    A learner is lost when it says so, when it was silent for ``timeout_s``, or when somebody's
    connection to it broke and it is silent. All see that a little apart in time, so who is left is
    decided at a meeting, by the first that finds all there who are not lost.

    Args:
        store: That all leaders see; used by nothing else.
        learner: The number of this one.
        learners: Their number at first.
        timeout_s: How long one may be silent.
        on_lost: Called with the number of one that is lost, once, by the thread.
    """

    def __init__(
        self,
        store: Store,
        learner: int,
        learners: int,
        timeout_s: float,
        on_lost: Callable[[int], None],
    ) -> None:
        self._store = store
        self._learner = learner
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._others = [other for other in range(learners) if other != learner]
        self._lost: frozenset[int] = frozenset()
        self._meeting = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="members", daemon=True)
        store.set(f"beat/{learner}", "0")

    def __enter__(self) -> Self:
        """Begin; all learners were made before."""
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End; after an error, let the others know at once."""
        self._ended.set()
        # Not for ever, for the store may be gone.
        self._thread.join(2 * BEAT_S)
        if error is not None:
            try:
                self._store.set(f"gone/{self._learner}", "")
            except RuntimeError:
                log.debug("the store is gone as well")

    @property
    def lost(self) -> frozenset[int]:
        """Those lost, as far as this learner knows."""
        return self._lost

    @property
    def left(self) -> list[int]:
        """The others, as far as this learner knows."""
        return [other for other in self._others if other not in self._lost]

    def suspect(self, learner: int) -> None:
        """Tell all that a connection to a learner broke; any thread may call it."""
        self._store.set(f"suspected/{learner}", "")

    def check(self) -> None:
        """Raises `LeftOut` if the others have met without this learner."""
        names = f"meeting/{self._meeting}"
        if self._store.check([names]) and self._learner not in json.loads(self._store.get(names)):
            raise LeftOut(
                f"learner {self._learner} was silent for too long, and the others go on without "
                "it: if it was only slow, raise training.gossip.timeout_s."
            )

    def meet(self) -> list[int] | None:
        """Say that this learner has arrived; who is there, or None as long as some are not.

        It is called again and again until all are there; then the next meeting begins.

        Raises:
            LeftOut: The others did not wait.
        """
        names = f"meeting/{self._meeting}"
        if not self._store.check([names]):
            self._store.set(self._seat(self._learner), "")
            left = self.left
            if not all(self._store.check([self._seat(other)]) for other in left):
                return None
            # Another may have seen more lost, or fewer: what the first has seen holds for all.
            self._store.compare_set(names, "", json.dumps(sorted([self._learner, *left])))
        self.check()
        present = json.loads(self._store.get(names))
        self._meeting += 1
        # Of those who would still come, none is waited for.
        self._lose({other for other in self._others if other not in present})
        return present

    def _seat(self, learner: int) -> str:
        return f"seat/{self._meeting}/{learner}"

    def _run(self) -> None:
        count, seen = 0, {other: (b"0", time.monotonic()) for other in self._others}
        while not self._ended.wait(BEAT_S):
            count += 1
            try:
                self._store.set(f"beat/{self._learner}", str(count))
                self._look(seen)
            except RuntimeError as error:
                # Without the store, the thread that trains will come to know.
                log.debug("no sign of life: %s", error)
                return

    def _look(self, seen: dict[int, tuple[bytes, float]]) -> None:
        """Compare the others' signs of life with those ``seen``, and since when."""
        left, now = self.left, time.monotonic()
        if not left:
            return
        for other, beat in zip(
            left, self._store.multi_get([f"beat/{n}" for n in left]), strict=True
        ):
            if beat != seen[other][0]:
                seen[other] = beat, now
        silent = {other: now - seen[other][1] for other in left}
        lost = {other for other in left if silent[other] > self._timeout_s}
        for other in left:
            for sign, patience in (("suspected", _SUSPECTED_S), ("gone", BEAT_S)):
                if silent[other] > patience and self._store.check([f"{sign}/{other}"]):
                    lost.add(other)
        self._lose(lost)

    def _lose(self, learners: set[int]) -> None:
        with self._lock:
            new = learners - self._lost
            self._lost |= learners
        for learner in sorted(new):
            self._on_lost(learner)
