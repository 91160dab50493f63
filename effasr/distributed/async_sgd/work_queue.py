"""Work that learners share out among themselves while they train, each as fast as it can.

A plan step of G learners is G shares. Claim ``c`` is share ``c % G`` of plan step ``c // G``. Each
learner reserves the next claim that nobody has, a little ahead of its training, so that data can
be loaded; it begins it when it comes to it, and says when it has finished it. What is reserved and
not begun another may begin instead, which has nothing left to do; and what one has begun that was
lost, another may seize. So of all claims below a limit each is finished by one learner, whatever
their speed, and whoever is lost.

The keys in the store: ``reserved`` counts; ``begun/C`` is who began a claim; ``done/C`` is there
when it is finished.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch.distributed import Store  # type: ignore[attr-defined]


class Claims:
    """The claims of one learner. Only its leader has them.

    Args:
        store: That all leaders see; used by nothing else.
        learner: The number of this one.
        first: The claim to begin with.
    """

    def __init__(self, store: Store, learner: int, first: int) -> None:
        self._store = store
        self._name = str(learner)
        self._first = first
        self._finished: list[int] = []
        self._open: tuple[tuple[int, int], list[int]] | None = None

    def reserve(self) -> int:
        """The next claim that no learner has reserved."""
        return self._first + self._store.add("reserved", 1) - 1

    def begin(self, claim: int) -> bool:
        """Make a claim one's own; False if another has begun it."""
        owner = self._store.compare_set(f"begun/{claim}", "", self._name)
        return owner.decode() == self._name

    def seize(self, claim: int, lost: Collection[int]) -> bool:
        """Make a claim one's own that a lost learner has begun; False if none of them has."""
        key = f"begun/{claim}"
        if not self._store.check([key]):
            return False
        owner = self._store.get(key).decode()
        if int(owner) not in lost:
            return False
        return self._store.compare_set(key, owner, self._name).decode() == self._name

    def finish(self, claim: int) -> None:
        """Say that a claim needs nobody any more."""
        self._store.set(f"done/{claim}", self._name)
        self._finished.append(claim)

    def unfinished(self, begin: int, end: int) -> Sequence[int]:
        """Of the claims from ``begin`` to below ``end``, those that are not finished."""
        if self._open is None or self._open[0] != (begin, end):
            self._open = (begin, end), list(range(begin, end))
        self._open = (begin, end), self._missing(self._open[1])
        return self._open[1]

    def forget(self) -> None:
        """Let the store forget what this learner has finished: nobody will ask for it again."""
        for claim in self._finished:
            self._store.delete_key(f"begun/{claim}")
            self._store.delete_key(f"done/{claim}")
        self._finished = []

    def _missing(self, claims: list[int]) -> list[int]:
        """One question to the store tells whether all of some are finished."""
        if not claims or self._store.check([f"done/{claim}" for claim in claims]):
            return []
        if len(claims) == 1:
            return claims
        middle = len(claims) // 2
        return self._missing(claims[:middle]) + self._missing(claims[middle:])
