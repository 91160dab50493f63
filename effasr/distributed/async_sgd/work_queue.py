"""A queue of work items that learners share while they train, each at its own speed.

Item ``i`` is share ``i % G`` of plan step ``i // G``, with G learners. Each learner reserves the
next free item a little ahead of its training, so that data can be loaded, begins it in its turn,
and marks it as finished. Another learner may begin an item that is reserved but not begun, or seize
one that a lost learner has begun. So each item below a limit is finished by exactly one learner,
whatever the speeds of learners and whichever are lost.

Keys in the store: ``reserved`` is a counter; ``begun/I`` holds the learner that began an item;
``done/I`` exists when it is finished.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch.distributed import Store  # type: ignore[attr-defined]


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
        """Mark an item as finished."""
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
