import threading
import time

import pytest

from effasr.transcription.inputs.prefetch import prefetch


def test_order_is_kept_whichever_call_ends_first() -> None:
    def call(item: int) -> int:
        time.sleep(0.02 if item % 3 == 0 else 0.0)
        return item * item

    assert list(prefetch(call, range(20), workers=4)) == [item * item for item in range(20)]


def test_items_are_read_only_a_little_ahead() -> None:
    read = []

    def items():
        for item in range(100):
            read.append(item)
            yield item

    results = prefetch(str, items(), workers=2, ahead=3)
    assert next(results) == "0"
    assert len(read) <= 4
    results.close()


def test_an_error_is_raised_in_its_turn() -> None:
    results = prefetch(lambda item: 1 // item, [1, 1, 0, 1], workers=2)
    assert [next(results), next(results)] == [1, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_calls_run_at_the_same_time() -> None:
    barrier = threading.Barrier(2, timeout=5)
    assert len(list(prefetch(lambda _: barrier.wait(), range(2), workers=2))) == 2
