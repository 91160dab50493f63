"""Continuous batching: a queue before a fixed number of slots, and when more is admitted."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

from effasr.checks import check
from effasr.decoding.decoded import Decoded

# Share of the slots that must be free before more is admitted, which is read together.
_ADMITTED_SHARE = 1 / 8


class Item(Protocol):
    """What takes a slot; ``name`` is returned with the result."""

    name: Any

    def result(self) -> Decoded: ...


T = TypeVar("T", bound=Item)


class SlotEngine(ABC, Generic[T]):
    """Decodes in a fixed number of slots; what ends leaves its slot to the next that waits."""

    def __init__(self, slots: int) -> None:
        check(slots >= 1, "slots", "be at least 1", slots, "nothing could enter")
        self.slots = slots
        self._waiting: deque[T] = deque()
        self._unfinished: dict[int, T] = {}  # in order of submission

    @property
    def unfinished(self) -> list[Any]:
        return [item.name for item in self._unfinished.values()]

    def results(self, *, drain: bool = True) -> Iterator[tuple[Any, Decoded]]:
        """Yield names and results as they finish; without ``drain``, only until all have a slot."""
        while self._waiting or (drain and self._unfinished):
            for item in self._step():
                del self._unfinished[id(item)]
                yield item.name, item.result()

    def _enqueue(self, items: Iterable[T]) -> None:
        for item in items:
            self._waiting.append(item)
            self._unfinished[id(item)] = item

    def _take_admissible(self, running: int) -> list[T]:
        """Remove from the queue what enters now, the longest waiting first."""
        entering = self._fitting(list(islice(self._waiting, self.slots - running)), running)
        remaining = len(self._waiting) - len(entering)
        if running and remaining and len(entering) < _ADMITTED_SHARE * (running + len(entering)):
            return []
        for _ in entering:
            self._waiting.popleft()
        return entering

    @abstractmethod
    def _fitting(self, waiting: Sequence[T], running: int) -> list[T]:
        """Return the first of these that fit into memory together; at least one if none runs."""

    @abstractmethod
    def _step(self) -> list[T]:
        """Admit what waits, continue all by a token, and return what has ended."""
