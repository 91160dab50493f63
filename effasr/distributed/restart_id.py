"""What the processes that meet now call themselves, unlike those that met before them."""

from __future__ import annotations

import time
import uuid

from torch.distributed import Store  # type: ignore[attr-defined]

_POLL_S = 0.02


def agree(store: Store, rank: int, size: int, timeout_s: float) -> str:
    """Agree on a name that no processes had before.

    torchrun's store outlives the processes and keeps what those before a restart wrote, such as the
    addresses where they listened. Neither the number of restarts tells them apart, which stays as
    it was when a node comes or goes, nor anything else that torchrun says.

    So every process writes a name of its own, and waits for an answer to this very name. Rank 0
    answers all names that it finds, those of the dead as well, until each rank has said that it
    got an answer.

    Args:
        store: That all see.
        rank: Of this process.
        size: How many meet.
        timeout_s: How long to wait.

    Raises:
        RuntimeError: Not all came.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"join/{rank}", own)
        try:
            name = store.get(f"welcome/{own}").decode()
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {rank}: rank 0 did not come within {timeout_s:g} s."
            ) from error
        store.set(f"ready/{name}/{rank}", "")
        return name
    joined = [f"join/{other}" for other in range(1, size)]
    ready = [f"ready/{own}/{other}" for other in range(1, size)]
    answered: set[bytes] = set()
    until = time.monotonic() + timeout_s
    while not store.check(ready):
        if time.monotonic() > until:
            missing = [n for n, key in enumerate(ready, 1) if not store.check([key])]
            raise RuntimeError(
                f"rank 0: not all of {size} ranks came within {timeout_s:g} s; missing: {missing}."
            )
        if store.check(joined):
            for name in set(store.multi_get(joined)) - answered:
                store.set(f"welcome/{bytes(name).decode()}", own)
                answered.add(name)
        time.sleep(_POLL_S)
    return own
