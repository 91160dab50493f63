"""Deferred updates: those of all layers of a stack take one launch.

No other layer reads the running statistics of one, so they may change after the last layer has run.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.torch_op import is_dispatched
from effasr_kernels.update_running_statistics.definition import OPERATION, UpdateArguments

_MOST = 64
"""Updates of one launch: with five addresses each, 2,560 of the 4,096 bytes of its arguments."""

_here = threading.local()


@contextmanager
def updates_together() -> Iterator[None]:
    """Let the updates of this thread wait inside the context, and run those of a kind together.

    Until its end, nothing may read the running statistics or change the tensors that were given. If
    the context raises, none is updated: a batch that is repeated then counts once. What compiled
    code calls does not wait, because compiled code uses the memory of its tensors again.
    """
    before = getattr(_here, "waiting", None)
    waiting: list[tuple[UpdateArguments, Backend | str | None]] = []
    _here.waiting = waiting
    try:
        yield
    finally:
        _here.waiting = before
    groups: dict[tuple[Backend | str | None, Hashable], list[UpdateArguments]] = {}
    for a, backend in waiting:
        groups.setdefault((backend, _kind(a)), []).append(a)
    for (backend, _), found in groups.items():
        for start in range(0, len(found), _MOST):
            first, *others = found[start : start + _MOST]
            OPERATION.select(first, backend).run(first, *others)


def wait(arguments: UpdateArguments, backend: Backend | str | None) -> bool:
    """Let an update wait if this is an eager call inside the context; return whether it does.

    Raises:
        RuntimeError: A tensor requires a gradient and grad mode is enabled.
    """
    waiting = None if is_dispatched() else getattr(_here, "waiting", None)
    if waiting is None:
        return False
    OPERATION.refuse_gradients(arguments)
    waiting.append((arguments, backend))
    return True


def _kind(a: UpdateArguments) -> Hashable:
    """What updates of one launch have in common."""
    return id(a.layout), a.momentum, a.mean.shape, a.mean.dtype, a.running_mean.dtype
