"""Prefetching: calls on threads while the caller works on earlier results."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


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
