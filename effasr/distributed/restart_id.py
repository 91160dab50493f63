"""A name that the processes of a run agree on at every start, different from all earlier ones."""

from __future__ import annotations

import time
import uuid

from torch.distributed import Store  # type: ignore[attr-defined]

_POLL_S = 0.02


def agree_on_restart_id(store: Store, rank: int, size: int, timeout_s: float) -> str:
    """Agree on a name that no earlier start of the run had.

    torchrun's store outlives the processes and keeps what those before a restart wrote, such as
    the addresses on which they listened. torchrun gives nothing that distinguishes the two: the
    number of restarts stays the same when a node joins or leaves.

    Every process therefore writes a random name and waits for an answer to it. Rank 0 answers all
    names that it finds, including those of dead processes, until each rank has confirmed an answer.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"join/{rank}", own)
        try:
            name = store.get(f"welcome/{own}").decode()
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {rank}: rank 0 did not join within {timeout_s:g} s."
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
                f"rank 0: not all {size} ranks joined within {timeout_s:g} s; missing: {missing}."
            )
        if store.check(joined):
            for name in set(store.multi_get(joined)) - answered:
                store.set(f"welcome/{bytes(name).decode()}", own)
                answered.add(name)
        time.sleep(_POLL_S)
    return own
