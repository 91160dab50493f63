"""Prefetching: calls on threads while the caller works on earlier results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")

_AHEAD = 1000  # blocks that may wait, some minutes; then the recorder is blocked


def prefetch(
    call: Callable[[A], B], items: Iterable[A], *, workers: int, ahead: int | None = None
) -> Generator[B, None, None]:
    """Yield ``call(item)`` for each item, in order, while later calls run on threads."""
    iterator = iter(items)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="prefetch")
    try:
        first = islice(iterator, 2 * workers if ahead is None else ahead)
        waiting: deque[Future[B]] = deque(pool.submit(call, item) for item in first)
        while waiting:
            result = waiting.popleft().result()
            waiting.extend(pool.submit(call, item) for item in islice(iterator, 1))
            yield result
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def ahead(blocks: Iterable[B]) -> Iterator[B]:
    """Yield the same blocks, read on a thread, so that a recorder need not wait."""
    source = iter(blocks)
    for block in prefetch(lambda _: next(source, None), count(), workers=1, ahead=_AHEAD):
        if block is None:
            return
        yield block
