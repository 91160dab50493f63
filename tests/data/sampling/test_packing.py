import hashlib
from collections import Counter
from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effasr.data.batch import StaticShape
from effasr.data.sampling.cost import CANARY_180M_FLASH
from effasr.data.sampling.filling import Utterances, fill
from effasr.data.sampling.packing import (
    EpochEnd,
    imbalance,
    nodes_of,
    plan_epoch,
    suggest_node_budget,
    suggest_token_budget,
    with_sequences,
)
from effasr.data.sampling.plan import EpochPlan, UtteranceLengths, hashes, shuffled

PINNED = {"carry": "3311c9068466c001", "exact": "2bd087d6e6e62293"}


def lengths_of(frames: list[int], tokens: list[int]) -> UtteranceLengths:
    return UtteranceLengths(np.array(frames, np.int32), np.array(tokens, np.int32))


def commands(count: int, seed: int = 0) -> UtteranceLengths:
    """Like short spoken commands: 0.2 to 13 s, median 2.2 s, five tokens a second."""
    rng = np.random.default_rng(seed)
    seconds = np.clip(np.exp(rng.normal(np.log(2.2), 0.75, count)), 0.2, 13)
    tokens = 5 + np.maximum(1, np.round(5 * seconds * np.exp(rng.normal(0, 0.25, count))))
    return UtteranceLengths(np.ceil(12.5 * seconds).astype(np.int32), tokens.astype(np.int32))


def speech(count: int) -> UtteranceLengths:
    """Like read sentences: 1.3 to 35 s, median 6 s, tokens of pieces of words."""
    rng = np.random.default_rng(0)
    seconds = np.clip(np.exp(rng.normal(np.log(5.9), 0.6, count)), 1.3, 35)
    tokens = 5 + np.maximum(1, np.round(3.5 * seconds * np.exp(rng.normal(0, 0.2, count))))
    return UtteranceLengths(np.ceil(12.5 * seconds).astype(np.int32), tokens.astype(np.int32))


def planned(lengths: UtteranceLengths, shape: StaticShape, **options: Any) -> EpochPlan:
    return plan_epoch(lengths, shape=shape, **{"micro_batches": 1, "seed": 0, "epoch": 0} | options)


def costs(lengths, plan, cost=CANARY_180M_FLASH) -> np.ndarray:
    """Of each micro-batch."""
    ends = np.append(0, np.cumsum(cost.of(lengths.frames, lengths.tokens)[plan.indices]))
    return np.diff(ends[plan.offsets])


@st.composite
def problems(draw: st.DrawFn) -> tuple[UtteranceLengths, StaticShape, int]:
    shape = StaticShape(
        draw(st.integers(1, 120)), draw(st.integers(1, 60)), draw(st.integers(1, 12))
    )
    pair = st.tuples(st.integers(0, shape.frame_budget), st.integers(0, shape.token_budget))
    frames, tokens = zip(*draw(st.lists(pair, min_size=1, max_size=50)), strict=True)
    most = max(1, *(f * u for f, u in zip(frames, tokens, strict=True)), 1)
    shape = replace(shape, node_budget=draw(st.none() | st.integers(most, 4 * most)))
    return lengths_of(list(frames), list(tokens)), shape, draw(st.integers(1, 5))


@settings(deadline=None, max_examples=10)
@given(problems(), st.integers(0, 2**63), st.sampled_from(["carry", "exact"]))
def test_every_plan_is_sound(
    problem: tuple[UtteranceLengths, StaticShape, int], seed: int, epoch_end: EpochEnd
) -> None:
    """Within budgets, and each utterance once in each pass, whatever is planned before."""
    lengths, shape, micro_batches = problem
    seen = Counter[int]()
    for epoch in range(3):
        options = {"micro_batches": micro_batches, "seed": seed, "epoch_end": epoch_end}
        plan = planned(lengths, shape, epoch=epoch, **options)
        batches = [batch for step in range(plan.num_steps) for batch in plan.step(step)]
        assert len(batches) == plan.num_steps * micro_batches >= micro_batches
        for batch in batches:
            assert len(batch) <= shape.max_sequences
            assert lengths.frames[batch].sum() <= shape.frame_budget
            assert lengths.tokens[batch].sum() <= shape.token_budget
            if shape.node_budget is not None:
                nodes = nodes_of(lengths.frames[batch], lengths.tokens[batch])
                assert nodes.sum() <= shape.node_budget
            seen.update(batch.tolist())
        deferred = set(plan.deferred.tolist())
        assert not deferred or epoch_end == "carry"
        assert all(seen[i] == epoch + 1 - (i in deferred) for i in range(len(lengths)))
        frames = int(lengths.frames[plan.indices].sum())
        tokens = int(lengths.tokens[plan.indices].sum())
        rows = len(batches) * shape.frame_budget, len(batches) * shape.token_budget
        assert plan.padding_frames == pytest.approx(1 - frames / rows[0])
        assert plan.padding_tokens == pytest.approx(1 - tokens / rows[1])


@pytest.mark.parametrize("epoch_end", ["carry", "exact"])
def test_a_node_budget_limits_batches_that_would_exceed_it(epoch_end: EpochEnd) -> None:
    """The longest utterances have many more nodes for a frame than others; none is lost."""
    lengths = commands(3000)
    free = StaticShape(1000, 560, 125)
    nodes = nodes_of(lengths.frames, lengths.tokens)
    budget = suggest_node_budget(lengths, 1000, lengths)
    mean = 1000 * nodes.sum() / lengths.frames.sum()
    assert 1.06 * mean < budget < 1.07 * mean + 1
    most, counts = {}, {}
    for shape in (free, replace(free, node_budget=budget)):
        plan = planned(lengths, shape, micro_batches=2, seed=1, epoch_end=epoch_end)
        sums = np.add.reduceat(nodes[plan.indices], plan.offsets[:-1])
        most[shape.node_budget], counts[shape.node_budget] = sums.max(), plan.num_steps
        together = np.concatenate([plan.indices, plan.deferred])
        assert sorted(together.tolist()) == list(range(len(lengths)))
    assert most[None] > budget >= most[budget]
    # The budget is loose enough to cost no more than a few steps.
    assert counts[budget] <= 1.03 * counts[None] + 1


@pytest.mark.parametrize("lengths", [speech(20_000), commands(3000), speech(7)])
def test_micro_batches_have_a_quarter_more_sequences_than_a_plan_needs(lengths) -> None:
    shape = StaticShape(2000, int(lengths.tokens.sum() * 2100 // lengths.frames.sum()), 250)
    assert with_sequences(shape, None, lengths) == shape
    assert with_sequences(shape, 3, lengths).max_sequences == 3
    limited = with_sequences(shape, "auto", lengths)
    assert limited.max_sequences % 8 == 0
    fullest = np.diff(planned(lengths, shape, epoch=1).offsets).max()
    if len(lengths) > 7:
        assert 1.15 * fullest <= limited.max_sequences <= 1.4 * fullest + 8
    assert fullest < limited.max_sequences < shape.max_sequences
    # Epochs of the shortest utterances alone, as shares may draw them, lose none and stay within.
    shortest = np.argsort(lengths.frames)[: len(lengths) // 4 + 1].astype(np.int32)
    drawn = np.repeat(shortest, 60)
    plan = planned(lengths, limited, epoch=2, population=drawn)
    assert sorted(plan.indices.tolist()) == sorted(drawn.tolist())
    assert np.diff(plan.offsets).max() <= limited.max_sequences


def test_an_utterance_above_the_node_budget_is_refused() -> None:
    shape = StaticShape(100, 50, 9, node_budget=399)
    with pytest.raises(ValueError, match=r"must fit in `node_budget` = 399, .*: 1 \(400\)"):
        planned(lengths_of([10, 20], [5, 20]), shape)
    assert suggest_node_budget(lengths_of([10], [1]), 20, lengths_of([10, 40], [1, 30])) == 1200
    with pytest.raises(ValueError, match="`usual` must hold at least one frame"):
        suggest_node_budget(lengths_of([0], [1]), 20, lengths_of([0], [1]))
    with pytest.raises(ValueError, match=r"`node_budget` must lie in 1 to .* but is 0"):
        StaticShape(100, 50, 9, node_budget=0)


@pytest.mark.extended
def test_a_large_node_budget_is_kept_in_coarse_units() -> None:
    """Beyond what 32 bits hold of many sums."""
    lengths = lengths_of([9000, 9100, 9200, 9300] * 20, [4000, 4100, 4200, 4300] * 20)
    budget = 2 * 9300 * 4300
    shape = StaticShape(40_000, 20_000, 99, node_budget=budget)
    plan = planned(lengths, shape, epoch_end="exact")
    nodes = nodes_of(lengths.frames, lengths.tokens)
    sums = np.add.reduceat(nodes[plan.indices], plan.offsets[:-1])
    assert budget > 2**22
    assert sums.max() <= budget
    assert sorted(plan.indices.tolist()) == list(range(80))


@pytest.mark.parametrize("epoch_end", PINNED)
def test_the_plan_is_pinned(epoch_end: EpochEnd) -> None:
    """A run that resumes on another machine, or with another numpy, must see the same plan."""
    random = hashes(3000, seed=0, epoch=0)
    frames = (10 + random % 90 + (random >> 20) % 40).astype(np.int32)
    tokens = (frames // 4 + 5 + (random >> 40) % 9).astype(np.int32)
    shape = StaticShape(1000, 320, 125)
    options = {"micro_batches": 4, "seed": 7, "epoch": 2, "epoch_end": epoch_end}
    plan = planned(UtteranceLengths(frames, tokens), shape, **options)
    digest = hashlib.sha256(plan.indices.astype("<i4").tobytes())
    digest.update(plan.offsets.astype("<i8").tobytes())
    assert digest.hexdigest()[:16] == PINNED[epoch_end]


@pytest.mark.parametrize(
    ("budget", "count", "most"), [(250, 4000, 0.02), (8000, 12_000, 0.002), (24_000, 20_000, 0.002)]
)
def test_little_padding_in_frames_and_tokens(budget: int, count: int, most: float) -> None:
    lengths = commands(count)
    token_budget = suggest_token_budget(lengths, budget)
    shape = StaticShape(budget, token_budget, budget // 8)
    fits = lengths.tokens <= token_budget
    selected = UtteranceLengths(lengths.frames[fits], lengths.tokens[fits])
    assert len(selected) >= 0.999 * count
    plan = planned(selected, shape)
    assert plan.padding_frames <= most
    assert plan.padding_tokens <= most
    assert len(plan.deferred) <= 1.2 * count / plan.num_steps


@pytest.mark.parametrize(("count", "budget"), [(2700, 8000), (5300, 8000), (5300, 24_000)])
def test_ranks_wait_for_nobody(count: int, budget: int) -> None:
    """As LibriSpeech's dev sets: eight ranks, a few steps an epoch."""
    lengths = speech(count)
    shape = StaticShape(budget, suggest_token_budget(lengths, budget), budget // 8)
    excess = []
    for epoch in range(6):
        plan = planned(lengths, shape, micro_batches=8, epoch=epoch)
        assert max(plan.padding_frames, plan.padding_tokens) <= 0.005
        excess.append(imbalance(costs(lengths, plan), 8, world_size=8))
    assert np.quantile(np.concatenate(excess), 0.99) <= 0.005


@pytest.mark.parametrize("epoch_end", ["carry", "exact"])
def test_a_corpus_under_one_step_is_spread_over_it(epoch_end: EpochEnd) -> None:
    lengths = lengths_of([10] * 11, [2] * 11)
    for epoch in range(3):
        shape = StaticShape(50, 20, 10)
        plan = planned(lengths, shape, micro_batches=4, epoch=epoch, epoch_end=epoch_end)
        assert plan.num_steps == 1
        assert sorted(len(batch) for batch in plan.step(0)) == [2, 3, 3, 3]
        assert plan.deferred.size == 0


def test_steps_outside_the_epoch_are_refused() -> None:
    plan = planned(lengths_of([1], [1]), StaticShape(1, 1, 1))
    with pytest.raises(IndexError, match="step 1 of an epoch of 1 steps"):
        plan.step(1)


ONE, TWO = ([1], [1]), ([1, 1], [1, 1])


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        (([5, 21, 22], [1] * 3), {}, r"`frame_budget` = 20, but 2 have more frames: 1 \(21\), 2"),
        (([5, 5], [1, 11]), {}, r"`token_budget` = 10, but 1 have more tokens: 1 \(11\)"),
        (([], []), {}, "must hold at least one utterance"),
        (([-1], [1]), {}, r"`frames\[0\]` must be at least 0, but is -1"),
        (([1, 2], [1]), {}, "`tokens` must have 2 entries, as `frames` has, but has 1"),
        (ONE, {"micro_batches": 0}, "`micro_batches` must be at least 1, but is 0"),
        (ONE, {"epoch": -1}, "`epoch` must be at least 0, but is -1"),
        (ONE, {"epoch_end": "drop"}, "`epoch_end` must be 'carry' or 'exact', but is 'drop'"),
        (
            ONE,
            {"epoch_end": "carry", "population": np.zeros(1, np.int32)},
            "`epoch_end` must be 'exact' for a `population`",
        ),
        (TWO, {"population": np.array([0, 2], np.int32)}, r"indices in 0 \.\. 1, but has 2"),
        (TWO, {"population": np.array([-1, 1], np.int32)}, r"indices in 0 \.\. 1, but has -1"),
        (TWO, {"population": np.array([0, 1])}, r"must be int32 \(p,\), but is int64"),
        (TWO, {"population": np.array([], np.int32)}, "must hold at least one utterance"),
    ],
)
def test_what_cannot_be_planned(lengths, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        planned(lengths_of(*lengths), StaticShape(20, 10, 5), **options)
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


def test_costs_are_balanced_where_their_sum_exceeds_int64() -> None:
    rng = np.random.default_rng(0)
    frames = rng.integers(50, 250, 2048).astype(np.int32)
    cost = rng.integers(2**28, 2**31, 2048)
    # They add up to a power of two, which wraps to 0 when all are 2**22 times as large.
    missing = 2**42 - cost.sum()
    cost += missing // 2048
    cost[-1] += missing % 2048
    shape = StaticShape(8000, 8000, 64)
    small, large = (
        fill(Utterances(frames, frames, values), shape, 64) for values in (cost, cost << 22)
    )
    assert small is not None
    assert large is not None
    assert (small.members == large.members).all()
    assert (small.starts == large.starts).all()


def test_imbalance() -> None:
    cost = np.array([1, 3, 3, 1, 0, 0, 0, 0])
    assert imbalance(cost, 4, 4).tolist() == [0.5, 0.0]
    assert imbalance(cost, 4, 2).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="`world_size` must divide `micro_batches` = 4, but is 3"):
        imbalance(cost, 4, 3)


ORDER = [0, 3, 5, 7, 6, 2, 1, 4]


def test_the_order_is_pinned() -> None:
    """A run that resumes with another version must see the same order."""
    assert shuffled(8, seed=0, epoch=0).tolist() == ORDER
    assert shuffled(8, seed=-1, epoch=0).tolist() == shuffled(8, seed=2**64 - 1, epoch=0).tolist()


def test_places_are_spread_evenly() -> None:
    places = np.array([np.argsort(shuffled(20, 0, epoch)) for epoch in range(2000)])
    assert np.abs(places.mean(axis=0) - 9.5).max() < 0.6  # standard error 0.13
