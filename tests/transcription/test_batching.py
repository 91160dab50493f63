import random

import pytest

from effasr.transcription.batching import plan_batches


def test_every_utterance_once_within_the_budget() -> None:
    draw = random.Random(0)
    frames = [draw.randrange(1, 120) for _ in range(200)]
    batches = plan_batches(frames, 300, max_sequences=7)
    assert sorted(index for batch in batches for index in batch) == list(range(200))
    assert all(sum(frames[index] for index in batch) <= 300 for batch in batches)
    assert max(map(len, batches)) == 7
    lengths = [frames[index] for batch in batches for index in batch]
    assert lengths == sorted(lengths, reverse=True)


def test_one_that_exceeds_the_budget_is_alone() -> None:
    assert plan_batches([3, 50, 4, 2], 10) == [[1], [2, 0, 3]]


def test_equal_lengths_keep_their_order() -> None:
    assert plan_batches([5, 5, 5, 5], 10) == [[0, 1], [2, 3]]


def test_nothing_to_do() -> None:
    assert plan_batches([], 10) == []


@pytest.mark.parametrize("arguments", [(0, 4), (4, 0)])
def test_bounds_under_one_are_refused(arguments) -> None:
    with pytest.raises(ValueError, match="must be at least 1, but is 0"):
        plan_batches([1], *arguments)
