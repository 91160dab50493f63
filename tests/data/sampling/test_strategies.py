"""All strategies by one interface, and the baselines against lhotse's own samplers."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lhotse import CutSet, MonoCut
from lhotse.dataset.sampling import DynamicBucketingSampler, SimpleCutSampler

from effasr.data.batch import StaticShape
from effasr.data.sampling.bucket_table import BucketTable
from effasr.data.sampling.options import STRATEGIES, StrategyOptions
from effasr.data.sampling.packing import suggest_token_budget
from effasr.data.sampling.plan import EpochPlan, Planner, UtteranceLengths, shuffled
from effasr.data.sampling.strategies import planner

BASELINES = STRATEGIES[1:]


def speech(count: int, seed: int = 0, longest: int = 200) -> UtteranceLengths:
    """Lengths as of read speech: many short ones, and tokens that follow the frames."""
    generator = np.random.default_rng(seed)
    frames = np.clip(generator.lognormal(4, 0.6, count), 8, longest)
    tokens = 4 + frames * generator.uniform(0.2, 0.5, count)
    return UtteranceLengths(frames.astype(np.int32), tokens.astype(np.int32))


SHAPE = StaticShape(frame_budget=800, token_budget=320, max_sequences=100)


def make(strategy: str, lengths: UtteranceLengths, **settings) -> Planner:
    options = settings.pop("options", {})
    settings = {"shape": SHAPE, "micro_batches": 4, "world_size": 4, "seed": 5} | settings
    return planner(strategy, lengths, options=StrategyOptions(**options), **settings)


def micro_batches(plan: EpochPlan) -> list[list[int]]:
    return [list(batch) for step in range(plan.num_steps) for batch in plan.step(step)]


@pytest.mark.parametrize("strategy", BASELINES)
@settings(max_examples=12, deadline=None)
@given(
    count=st.integers(20, 400),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 1000),
    ranks=st.integers(1, 5),
    rounds=st.integers(1, 3),
)
def test_each_utterance_is_planned_once_or_deferred(strategy, count, seed, epoch, ranks, rounds):
    lengths = speech(count, seed=seed % 100)
    settings = {"micro_batches": rounds * ranks, "world_size": ranks, "seed": seed}
    plan = make(strategy, lengths, **settings).plan(epoch)
    assert plan.num_steps >= 1
    assert sorted([*plan.indices, *plan.deferred]) == list(range(count))
    assert plan.indices.dtype == plan.deferred.dtype == np.int32
    assert [index for batch in micro_batches(plan) for index in batch] == list(plan.indices)
    assert len(plan.step(0)) == rounds * ranks
    if plan.num_steps > 1:
        assert all(micro_batches(plan))
    again = make(strategy, lengths, **settings).plan(epoch)
    assert micro_batches(again) == micro_batches(plan)


def cuts_for(lengths: UtteranceLengths, seed: int, epoch: int) -> CutSet:
    """Cuts as a training process would have them; a frame is a second, so that sums are exact."""
    order = shuffled(len(lengths), seed, epoch).tolist()
    return CutSet([MonoCut(str(i), 0, float(lengths.frames[i]), 0, supervisions=[]) for i in order])


@pytest.mark.parametrize("strategy", ["random", "bucketed", "sync_bucketed"])
def test_the_joined_plan_is_what_each_rank_s_own_sampler_draws(strategy) -> None:
    lengths, ranks, epoch = speech(600), 3, 2
    plan = make(strategy, lengths, micro_batches=ranks, world_size=ranks, options={"buckets": 6})
    joined = [[str(index) for index in batch] for batch in micro_batches(plan.plan(epoch))]
    edges = []
    if plan.buckets is not None:
        edges = [int(lengths.frames[plan.buckets == bucket].max()) for bucket in range(5)]
    for rank in range(ranks):
        cuts = cuts_for(lengths, 5, epoch)
        position = {"world_size": ranks, "rank": rank, "max_duration": SHAPE.frame_budget}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of a manifest that is not read lazily.
            if strategy == "random":
                sampler = SimpleCutSampler(cuts, **position)
            else:
                sync = strategy == "sync_bucketed"
                sampler = DynamicBucketingSampler(
                    cuts, **position, duration_bins=edges, seed=5, sync_buckets=sync
                )
        sampler.set_epoch(epoch)
        drawn = [[cut.id for cut in batch] for batch in sampler]
        local = joined[rank::ranks]
        assert len(local) > 10
        # Where the end of the data is uneven, lhotse divides it anew, and repeats utterances.
        assert len(drawn) - len(local) in (0, 1)
        assert drawn[: len(local)] == local


def buckets_drawn(strategy: str, lengths: UtteranceLengths) -> list[set[int]]:
    """Those of each step in the first half of an epoch, while no bucket runs dry."""
    made = make(strategy, lengths, options={"buckets": 4})
    plan = made.plan(0)
    return [
        {int(made.buckets[batch].min()) for batch in plan.step(step)}
        | {int(made.buckets[batch].max()) for batch in plan.step(step)}
        for step in range(plan.num_steps // 2)
    ]


def test_epochs_that_draw_their_utterances_have_no_buckets_in_common() -> None:
    """Each epoch's limits are those of its utterances, so other limits would show mixed steps."""
    half = np.arange(100, 200, dtype=np.int32)
    made = make("sync_bucketed", speech(200), population=lambda epoch: half)
    assert made.buckets is None
    assert set(made.plan(0).indices) <= set(half)


def test_synchronised_ranks_draw_the_same_bucket_and_others_do_not() -> None:
    lengths = speech(4000)
    for strategy in ("sync_bucketed", "sync_bucketed_2d"):
        drawn = buckets_drawn(strategy, lengths)
        assert len(drawn) > 20
        assert {len(buckets) for buckets in drawn} == {1}
        assert len(set.union(*drawn)) > 3
    apart = buckets_drawn("bucketed", lengths)
    assert sum(len(buckets) > 1 for buckets in apart) > len(apart) / 2


def widths(plan: EpochPlan, values: np.ndarray) -> list[int]:
    return [len(batch) * int(values[batch].max()) for batch in micro_batches(plan) if batch]


def test_batches_are_as_large_as_was_asked() -> None:
    lengths = speech(2000)
    for strategy in ("random", "sync_bucketed_2d"):
        plan = make(strategy, lengths).plan(0)
        assert max(widths(plan, lengths.frames)) <= SHAPE.frame_budget
    assert max(widths(plan, lengths.tokens)) <= SHAPE.token_budget
    # 400 frames of 80 ms.
    plan = make("random", lengths, options={"batch_duration": 32.0}).plan(0)
    assert 300 < max(widths(plan, lengths.frames)) <= 400
    for strategy in ("random", "bucketed", "sync_bucketed"):
        plan = make(strategy, lengths, options={"batch_size": 7}).plan(0)
        sizes = [len(batch) for batch in micro_batches(plan)]
        assert max(sizes) == 7
        assert np.mean(sizes) > 6.8
    table = BucketTable(((100, 60), (200, 120)), (9, 4))
    plan = make("sync_bucketed_2d", lengths, options={"table": table}).plan(0)
    assert max(len(b) for b in micro_batches(plan) if lengths.frames[b].max() > 100) == 4
    assert max(map(len, micro_batches(plan))) == 9


def test_each_step_of_the_ladder_pads_less() -> None:
    lengths = speech(8000)
    shape = StaticShape(800, suggest_token_budget(lengths, 800), 100)
    ladder = "random", "sync_bucketed", "sync_bucketed_2d", "packed"
    plans = [
        make(strategy, lengths, shape=shape, options={"padded": strategy != "packed"}).plan(0)
        for strategy in ladder
    ]
    frames = [plan.padding_frames for plan in plans]
    tokens = [plan.padding_tokens for plan in plans]
    assert frames[0] > 2 * frames[1] > 2 * frames[2] / 1.2
    assert frames[2] > 2 * frames[3]
    assert tokens[0] > tokens[1] > tokens[2] > tokens[3]


TWO_D = "sync_bucketed_2d"
WIDE, NARROW = BucketTable(((200, 99),), (1,)), BucketTable(((60, 20),), (1,))


@pytest.mark.parametrize(
    ("strategy", "settings", "message"),
    [
        ("sorted", {}, r"`strategy` must be one of packed, random, .*, but is 'sorted'"),
        ("random", {"micro_batches": 6}, "multiple of the number of ranks, 4, .* use 4 or 8"),
        ("bucketed", {"micro_batches": 2}, "but is 2: use 4, or strategy packed"),
        ("packed", {"micro_batches": 0}, "`micro_batches` must be at least 1, but is 0"),
        ("random", {"world_size": 0}, "`world_size` must be at least 1, but is 0"),
        ("packed", {"options": {"batch_duration": 9.0}}, "`batch_duration` must be left out for"),
        ("packed", {"options": {"padded": True}}, "`padded` must be false for strategy packed"),
        ("random", {"options": {"batch_duration": 0.0}}, "`batch_duration` must be greater than 0"),
        ("random", {"options": {"batch_size": 3, "batch_duration": 9.0}}, "_duration` is given"),
        ("bucketed", {"options": {"buckets": 1}}, "`buckets` must be at least 2, but is 1"),
        ("bucketed", {"options": {"buckets": 61}}, "number of utterances, 60, but is 61"),
        (
            TWO_D,
            {"options": {"batch_size": 3}},
            "`batch_size` must be left out for strategy sync_b",
        ),
        ("bucketed", {"options": {"table": WIDE}}, "`bucket_batch_sizes` must be left out but for"),
        (
            TWO_D,
            {"options": {"table": WIDE, "batch_duration": 9.0}},
            "`batch_duration` must be left out where `bucket_batch_sizes` gives",
        ),
        (
            TWO_D,
            {"options": {"table": NARROW}},
            r"in a bucket, but \d+ of 60 do not: number \d+ has",
        ),
        (
            "random",
            {"options": {"batch_duration": 1.0}},
            r"= 1 s, but the longest has \d+ frames \(",
        ),
        ("bucketed", {"shape": StaticShape(20, 20, 20)}, "`frame_budget` = 20, but the longest"),
    ],
)
def test_what_cannot_be_planned_is_refused(strategy, settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        make(strategy, speech(60), **settings)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_negative_epochs_and_empty_corpora_are_refused(strategy) -> None:
    with pytest.raises(ValueError, match="`epoch` must be at least 0, but is -1"):
        make(strategy, speech(60)).plan(-1)
    with pytest.raises(ValueError, match="at least one utterance"):
        make(strategy, speech(0)).plan(0)
