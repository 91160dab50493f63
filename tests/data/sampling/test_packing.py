from collections import Counter
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effasr.data.batch import StaticShape
from effasr.data.sampling.packing import plan_epoch, suggest_token_budget
from effasr.data.sampling.plan import EpochPlan, UtteranceLengths


def lengths_of(frames: list[int], tokens: list[int]) -> UtteranceLengths:
    return UtteranceLengths(np.array(frames, np.int32), np.array(tokens, np.int32))


def commands(count: int, seed: int = 0) -> UtteranceLengths:
    """Like short spoken commands: 0.2 to 13 s, median 2.2 s, five tokens a second."""
    rng = np.random.default_rng(seed)
    seconds = np.clip(np.exp(rng.normal(np.log(2.2), 0.75, count)), 0.2, 13)
    tokens = 5 + np.maximum(1, np.round(5 * seconds * np.exp(rng.normal(0, 0.25, count))))
    return UtteranceLengths(np.ceil(12.5 * seconds).astype(np.int32), tokens.astype(np.int32))


def everything(plan: EpochPlan) -> np.ndarray:
    return np.concatenate([plan.indices, plan.deferred])


@st.composite
def problems(draw: st.DrawFn) -> tuple[UtteranceLengths, StaticShape, int]:
    shape = StaticShape(
        draw(st.integers(1, 120)), draw(st.integers(1, 60)), draw(st.integers(1, 12))
    )
    pair = st.tuples(st.integers(0, shape.frame_budget), st.integers(0, shape.token_budget))
    frames, tokens = zip(*draw(st.lists(pair, min_size=1, max_size=80)), strict=True)
    return lengths_of(list(frames), list(tokens)), shape, draw(st.integers(1, 5))


@settings(deadline=None, max_examples=150)
@given(problems(), st.integers(0, 2**63), st.integers(0, 1000))
def test_every_plan_is_sound(
    problem: tuple[UtteranceLengths, StaticShape, int], seed: int, epoch: int
) -> None:
    lengths, shape, micro_batches = problem
    plan = plan_epoch(lengths, shape=shape, micro_batches=micro_batches, seed=seed, epoch=epoch)
    assert sorted(everything(plan).tolist()) == list(range(len(lengths)))
    assert plan.num_steps >= 1
    rows = 0
    frames = tokens = 0
    for step in range(plan.num_steps):
        batches = plan.step(step)
        assert len(batches) == micro_batches
        for batch in batches:
            assert len(batch) <= shape.max_sequences
            assert lengths.frames[batch].sum() <= shape.frame_budget
            assert lengths.tokens[batch].sum() <= shape.token_budget
            # Only the one partial step of an epoch without a full step may have empty ones.
            assert len(batch) or (plan.num_steps == 1 and not len(plan.deferred))
            frames += int(lengths.frames[batch].sum())
            tokens += int(lengths.tokens[batch].sum())
            rows += 1
    assert plan.padding_frames == pytest.approx(1 - frames / (rows * shape.frame_budget))
    assert plan.padding_tokens == pytest.approx(1 - tokens / (rows * shape.token_budget))
    again = plan_epoch(lengths, shape=shape, micro_batches=micro_batches, seed=seed, epoch=epoch)
    np.testing.assert_array_equal(again.indices, plan.indices)
    np.testing.assert_array_equal(again.offsets, plan.offsets)


@pytest.mark.parametrize(
    ("budget", "count", "most"), [(250, 4000, 0.02), (8000, 12_000, 0.005), (24_000, 20_000, 0.005)]
)
def test_little_padding_in_frames_and_tokens(budget: int, count: int, most: float) -> None:
    lengths = commands(count)
    token_budget = suggest_token_budget(lengths, budget)
    shape = StaticShape(budget, token_budget, budget // 8)
    fits = lengths.tokens <= token_budget
    kept = UtteranceLengths(lengths.frames[fits], lengths.tokens[fits])
    assert len(kept) >= 0.999 * count
    plan = plan_epoch(kept, shape=shape, micro_batches=1, seed=0, epoch=0)
    assert plan.padding_frames <= most
    assert plan.padding_tokens <= most
    assert len(plan.deferred) <= 1.5 * count / plan.num_steps


@pytest.mark.parametrize("factor", [0.7, 1.5])
def test_the_other_budget_having_rows_to_spare_costs_nothing(factor: float) -> None:
    lengths = commands(4000)
    shape = StaticShape(500, int(factor * suggest_token_budget(lengths, 500)), 60)
    plan = plan_epoch(lengths, shape=shape, micro_batches=1, seed=0, epoch=0)
    assert min(plan.padding_frames, plan.padding_tokens) <= 0.005


def test_epochs_and_seeds_differ() -> None:
    lengths, shape = commands(300), StaticShape(250, 140, 40)
    orders = {
        tuple(plan_epoch(lengths, shape=shape, micro_batches=2, seed=seed, epoch=epoch).indices)
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9


def test_nobody_starves() -> None:
    """What is hard to place waits longest, but even in a small corpus it is mostly planned."""
    lengths = commands(700)
    shape = StaticShape(250, suggest_token_budget(lengths, 250), 31)
    epochs = 20
    deferred = Counter[int]()
    for epoch in range(epochs):
        plan = plan_epoch(lengths, shape=shape, micro_batches=4, seed=0, epoch=epoch)
        deferred.update(plan.deferred.tolist())
    assert sum(deferred.values()) <= 0.04 * epochs * len(lengths)
    assert max(deferred.values()) <= 0.5 * epochs
    long = np.flatnonzero(lengths.frames >= np.quantile(lengths.frames, 0.95)).tolist()
    assert sum(deferred[index] for index in long) <= 0.2 * epochs * len(long)


def test_an_utterance_that_fills_the_budget_is_planned() -> None:
    lengths = lengths_of([100] + [7] * 200, [3] + [2] * 200)
    shape = StaticShape(100, 40, 20)
    planned = [
        0 in plan_epoch(lengths, shape=shape, micro_batches=1, seed=0, epoch=epoch).indices
        for epoch in range(20)
    ]
    assert sum(planned) >= 18


def test_a_corpus_under_one_step_is_kept_in_a_partial_one() -> None:
    lengths = lengths_of([10, 10, 10], [2, 2, 2])
    plan = plan_epoch(lengths, shape=StaticShape(20, 10, 5), micro_batches=4, seed=0, epoch=0)
    assert plan.num_steps == 1
    assert sorted(len(batch) for batch in plan.step(0)) == [0, 0, 1, 2]
    assert plan.deferred.size == 0


def test_a_half_filled_last_step_is_deferred() -> None:
    lengths = lengths_of([10] * 25, [2] * 25)
    plan = plan_epoch(lengths, shape=StaticShape(100, 20, 10), micro_batches=1, seed=0, epoch=0)
    assert plan.num_steps == 2
    assert (plan.padding_frames, plan.padding_tokens) == (0.0, 0.0)
    assert len(plan.deferred) == 5


def test_steps_outside_the_epoch_are_refused() -> None:
    plan = plan_epoch(
        lengths_of([1], [1]), shape=StaticShape(1, 1, 1), micro_batches=1, seed=0, epoch=0
    )
    with pytest.raises(IndexError, match="step 1 of an epoch of 1 steps"):
        plan.step(1)


@pytest.mark.parametrize(
    ("frames", "tokens", "message"),
    [
        (
            [5, 21, 22],
            [1, 1, 1],
            r"fit in `frame_budget` = 20, but 2 have more frames: 1 \(21\), 2",
        ),
        ([5, 5], [1, 11], r"fit in `token_budget` = 10, but 1 have more tokens: 1 \(11\)"),
        ([], [], "must hold at least one utterance"),
        ([-1], [1], r"`frames\[0\]` must be at least 0, but is -1"),
        ([1, 2], [1], "`tokens` must have 2 entries, as `frames` has, but has 1"),
    ],
)
def test_what_cannot_be_planned(frames: list[int], tokens: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_epoch(
            lengths_of(frames, tokens),
            shape=StaticShape(20, 10, 5),
            micro_batches=1,
            seed=0,
            epoch=0,
        )


def test_wrong_arguments_are_refused() -> None:
    lengths, shape = lengths_of([1], [1]), StaticShape(1, 1, 1)
    with pytest.raises(ValueError, match="`micro_batches` must be at least 1, but is 0"):
        plan_epoch(lengths, shape=shape, micro_batches=0, seed=0, epoch=0)
    with pytest.raises(ValueError, match="`epoch` must be at least 0, but is -1"):
        plan_epoch(lengths, shape=shape, micro_batches=1, seed=0, epoch=-1)
    with pytest.raises(ValueError, match="`frames` must be int32"):
        UtteranceLengths(np.zeros(2), np.zeros(2, np.int32))


def test_the_suggested_token_budget_has_the_ratio_of_the_corpus() -> None:
    lengths = lengths_of([100] * 10, [30] * 10)
    assert suggest_token_budget(lengths, 1000) == 300
    # Never under what all but one in a thousand need.
    assert suggest_token_budget(lengths, 50) == 30
    outlier = lengths_of([100] * 5000, [30] * 4999 + [500])
    assert suggest_token_budget(outlier, 1000) == ceil(1000 * (30 * 4999 + 500) / 500_000)
    with pytest.raises(ValueError, match="must hold at least one frame"):
        suggest_token_budget(lengths_of([0], [3]), 10)
