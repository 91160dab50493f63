import random
import threading
import time

import pytest

from effasr.transcription.batching import plan_batches
from effasr.transcription.inputs.prefetch import prefetch


def test_every_utterance_once_within_the_budget() -> None:
    draw = random.Random(0)
    frames = [draw.randrange(1, 120) for _ in range(200)]
    batches = plan_batches(frames, 300, max_sequences=7)
    assert sorted(index for batch in batches for index in batch) == list(range(200))
    assert all(sum(frames[index] for index in batch) <= 300 for batch in batches)
    assert max(map(len, batches)) == 7
    lengths = [frames[index] for batch in batches for index in batch]
    assert lengths == sorted(lengths, reverse=True)


def test_batches_of_few() -> None:
    """What exceeds the budget is alone, equal lengths keep their order, and nothing is nothing."""
    assert plan_batches([3, 50, 4, 2], 10) == [[1], [2, 0, 3]]
    assert plan_batches([5, 5, 5, 5], 10) == [[0, 1], [2, 3]]
    assert plan_batches([], 10) == []


@pytest.mark.parametrize("arguments", [(0, 4), (4, 0)])
def test_bounds_under_one_are_refused(arguments) -> None:
    with pytest.raises(ValueError, match="must be at least 1, but is 0"):
        plan_batches([1], *arguments)


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
