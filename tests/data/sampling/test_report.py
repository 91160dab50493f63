"""Figures of plans that are small enough to add up by hand."""

from dataclasses import replace

import numpy as np
import pytest

from effasr.data.batch import StaticShape
from effasr.data.sampling.cost import CANARY_180M_FLASH, CostModel
from effasr.data.sampling.plan import EpochPlan, UtteranceLengths
from effasr.data.sampling.report import measure

COST = CostModel(frame=100, frame_pair=1, token=10, token_pair=2, token_frame=3)
LENGTHS = UtteranceLengths(
    np.array([10, 4, 8, 2, 6, 6], np.int32), np.array([3, 5, 2, 2, 4, 1], np.int32)
)
SECONDS = np.array([0.8, 0.32, 0.64, 0.16, 0.48, 0.48])


def plan(*micro_batches: list[int], of_step: int = 2) -> EpochPlan:
    planned = [index for item in micro_batches for index in item]
    return EpochPlan(
        micro_batches=of_step,
        indices=np.array(planned, np.int32),
        offsets=np.cumsum([0, *map(len, micro_batches)]),
        deferred=np.array(sorted(set(range(6)) - set(planned)), np.int32),
        padding_frames=0.0,
        padding_tokens=0.0,
    )


def figures(*plans: EpochPlan, world_size: int = 2, shape=None, buckets=None):
    return measure(
        plans, LENGTHS, SECONDS, cost=COST, world_size=world_size, shape=shape, buckets=buckets
    )


def flops(frames: int, tokens: int) -> int:
    return 100 * frames + frames**2 + 10 * tokens + 2 * tokens**2 + 3 * tokens * frames


def test_padded_micro_batches_are_as_wide_as_their_longest() -> None:
    report = figures(plan([0, 1], [2, 3, 4]))
    assert report.padding_frames == pytest.approx(1 - (10 + 4 + 8 + 2 + 6) / (2 * 10 + 3 * 8))
    assert report.padding_tokens == pytest.approx(1 - (3 + 5 + 2 + 2 + 4) / (2 * 5 + 3 * 4))
    cells = 10 * 3 + 4 * 5 + 8 * 2 + 2 * 2 + 6 * 4
    assert report.padding_cells == pytest.approx(1 - cells / (2 * 10 * 5 + 3 * 8 * 4))
    useful = flops(10, 3) + flops(4, 5) + flops(8, 2) + flops(2, 2) + flops(6, 4)
    first, second = 2 * flops(10, 5), 3 * flops(8, 4)
    assert report.padding_flops == pytest.approx(1 - useful / (first + second))
    excess = max(first, second) / ((first + second) / 2) - 1
    assert report.rank_imbalance_mean == pytest.approx(excess)
    assert report.rank_imbalance_p99 == pytest.approx(excess)
    assert report.step_flops == first + second
    assert report.flops_per_audio_hour == pytest.approx((first + second) / (2.4 / 3600))
    assert (report.steps, report.planned, report.deferred) == (1, 5, 1)
    assert report.batch_utterances == 2.5
    assert report.batch_audio_seconds == pytest.approx(1.2)
    assert report.bucket_mismatch is None


def test_the_tail_of_a_static_shape_costs_what_is_linear() -> None:
    report = figures(plan([0, 1], [2, 3, 4]), shape=StaticShape(20, 10, 4))
    assert report.padding_frames == pytest.approx(1 - 30 / 40)
    assert report.padding_tokens == pytest.approx(1 - 16 / 20)
    assert report.padding_cells == 0
    useful = [flops(10, 3) + flops(4, 5), flops(8, 2) + flops(2, 2) + flops(6, 4)]
    tails = [100 * 6 + 10 * 2, 100 * 4 + 10 * 2]
    run = np.add(useful, tails)
    assert report.padding_flops == pytest.approx(sum(tails) / run.sum())
    assert report.rank_imbalance_mean == pytest.approx(run.max() / run.mean() - 1)


def test_work_of_a_rank_is_that_of_all_its_micro_batches() -> None:
    """Number m belongs to rank m modulo their number, as the loader has it."""
    item = plan([0], [3], [1], [4], of_step=4)
    ranks = np.array([flops(10, 3) + flops(4, 5), flops(2, 2) + flops(6, 4)])
    assert figures(item).rank_imbalance_mean == pytest.approx(ranks.max() / ranks.mean() - 1)
    assert figures(item, world_size=1).rank_imbalance_mean == 0


def test_empty_micro_batches_of_a_partial_step() -> None:
    """Computed where the shape is static, and not there where it is not."""
    item = plan([0], [], [], [3, 1], of_step=4)
    assert figures(item).padding_frames == pytest.approx(1 - 16 / (10 + 8))
    assert figures(item, shape=StaticShape(10, 10, 4)).padding_frames == pytest.approx(1 - 16 / 40)
    assert figures(item).batch_utterances == 0.75


def test_steps_in_which_ranks_drew_different_buckets() -> None:
    buckets = np.array([0, 0, 1, 1, 2, 2], np.int32)
    same, other = plan([0], [1]), plan([0], [2])
    assert figures(same, other, same, same, buckets=buckets).bucket_mismatch == 0.25
    # Ranks run 0 and 2 together, then 1 and 3; that both change the bucket is no mismatch.
    assert figures(plan([0], [1], [2], [3], of_step=4), buckets=buckets).bucket_mismatch == 0
    assert figures(plan([0], [2], [1], [3], of_step=4), buckets=buckets).bucket_mismatch == 1
    # A rank without utterances has drawn nothing.
    assert figures(plan([4], []), buckets=buckets).bucket_mismatch == 0


def test_ranks_that_cannot_share_a_step_evenly_get_empty_micro_batches() -> None:
    item = plan([0], [3], [4], [1], of_step=2)
    report = figures(item, world_size=3, shape=StaticShape(10, 10, 4))
    assert report.steps == 2
    assert report.batch_utterances == pytest.approx(4 / 6)
    assert report.padding_frames == pytest.approx(1 - 22 / 60)
    tail = 100 * 10 + 10 * 10
    first = [flops(10, 3) + 10 * 7, flops(2, 2) + 100 * 8 + 10 * 8, tail]
    second = [flops(6, 4) + 100 * 4 + 10 * 6, flops(4, 5) + 100 * 6 + 10 * 5, tail]
    excess = [max(ranks) / (sum(ranks) / 3) - 1 for ranks in (first, second)]
    assert report.rank_imbalance_mean == pytest.approx(sum(excess) / 2)
    with pytest.raises(ValueError, match="`world_size` must be at least 1, but is 0"):
        figures(item, world_size=0)


def test_no_plan() -> None:
    with pytest.raises(ValueError, match="`plans` must hold at least one plan, but is empty"):
        figures()


FACTORS = CostModel(frame=5, frame_pair=2, token=7, token_pair=3, token_frame=11)


def test_long_utterances_do_not_overflow() -> None:
    hour = np.array([45_000], np.int32)
    assert CANARY_180M_FLASH.of(hour, hour)[0] == sum(
        factor * 45_000**power
        for factor, power in (
            (CANARY_180M_FLASH.frame + CANARY_180M_FLASH.token, 1),
            (52_224 + 8_192 + 16_384, 2),
        )
    )
    with pytest.raises(ValueError, match="must cost less than"):
        CANARY_180M_FLASH.of(np.array([2**31 - 1]), hour)


@pytest.mark.parametrize("value", [-1.0, 0.5, float("inf"), float("nan")])
def test_factors_are_whole_flops(value: float) -> None:
    with pytest.raises(ValueError, match="`token` must be 0 or at least 1 FLOP"):
        replace(FACTORS, token=value)
    with pytest.raises(ValueError, match="must be at least 1 FLOP, but all are 0"):
        CostModel(frame=0, frame_pair=0, token=0, token_pair=0, token_frame=0)
