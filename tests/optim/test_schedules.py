import math
from itertools import pairwise

import pytest

from effasr.optim.adamw import OptimizerConfig
from effasr.optim.schedules import ScheduleConfig, learning_rate_ratio, peak_learning_rate


def ratios(config: ScheduleConfig, steps: int) -> list[float]:
    return [learning_rate_ratio(config, step, steps) for step in range(steps)]


@pytest.mark.parametrize("name", ["inverse_sqrt", "cosine", "flat_cosine"])
def test_warmup_is_linear_and_ends_at_the_peak(name):
    got = ratios(ScheduleConfig(name=name, warmup_steps=4), 100)
    assert got[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert max(got) == 1.0


def test_inverse_sqrt_is_its_closed_form_down_to_the_floor():
    config = ScheduleConfig(name="inverse_sqrt", warmup_steps=4, min_ratio=0.25)
    assert learning_rate_ratio(config, 15, 100) == pytest.approx(0.5)
    assert learning_rate_ratio(config, 10_000, 100) == 0.25


def test_cosine_is_its_closed_form_and_ends_at_the_floor():
    config = ScheduleConfig(name="cosine", warmup_steps=10, min_ratio=0.1)
    assert learning_rate_ratio(config, 54, 100) == pytest.approx(0.55)
    expected = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 0.25))
    assert learning_rate_ratio(config, 9 + 90 // 4, 90 + 10) == pytest.approx(expected, abs=0.01)
    assert learning_rate_ratio(config, 99, 100) == pytest.approx(0.1)
    assert learning_rate_ratio(config, 150, 100) == pytest.approx(0.1)


def test_flat_cosine_is_flat_and_then_a_cosine():
    config = ScheduleConfig(name="flat_cosine", warmup_steps=2, flat_fraction=0.3, min_ratio=0.02)
    got = ratios(config, 100)
    assert got[1:30] == [1.0] * 29
    assert got[64] == pytest.approx(0.51)
    assert got[99] == pytest.approx(0.02)
    assert all(a >= b for a, b in pairwise(got[30:]))


@pytest.mark.parametrize("name", ["inverse_sqrt", "cosine", "flat_cosine"])
def test_degenerate_lengths_stay_in_range(name):
    for warmup, steps in ((0, 1), (5, 5), (10, 3), (0, 2)):
        config = ScheduleConfig(name=name, warmup_steps=warmup)
        assert all(0 <= ratio <= 1 for ratio in ratios(config, steps))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"warmup_steps": -1}, "`warmup_steps` must be at least 0, but is -1"),
        ({"min_ratio": 2.0}, "`min_ratio` must lie between 0 and 1"),
    ],
)
def test_error_messages(fields, message):
    with pytest.raises(ValueError, match=message):
        ScheduleConfig(**fields)


@pytest.mark.parametrize(
    ("rule", "micro_batches", "expected"),
    [("none", 32, 1e-3), ("linear", 32, 4e-3), ("sqrt", 32, 2e-3), ("sqrt", 2, 5e-4)],
)
def test_the_peak_follows_the_rule(rule, micro_batches, expected):
    config = OptimizerConfig(lr=1e-3, lr_scaling=rule, lr_reference_micro_batches=8)
    assert peak_learning_rate(config, micro_batches) == pytest.approx(expected)


def test_a_rule_needs_a_reference():
    assert peak_learning_rate(OptimizerConfig(lr=0.5), 64) == 0.5
    with pytest.raises(ValueError, match="`lr_reference_micro_batches` must be given for lr_scal"):
        OptimizerConfig(lr_scaling="linear")
    with pytest.raises(ValueError, match="`lr_reference_micro_batches` must be at least 1"):
        OptimizerConfig(lr_reference_micro_batches=0)
