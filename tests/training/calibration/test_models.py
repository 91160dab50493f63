import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effasr.training.calibration.models import Load, MemoryModel, SpeedModel

LOADS = [
    Load(1000, 300, 40_000),
    Load(4000, 1200, 160_000),
    Load(4000, 2400, 160_000),
    Load(4000, 1200, 20_000),
]

COEFFICIENTS = st.floats(0, 1e3)


@given(st.floats(1e6, 1e10), COEFFICIENTS, COEFFICIENTS, COEFFICIENTS)
def test_four_trials_tell_four_coefficients_apart(fixed, frame, token, cell):
    truth = MemoryModel(fixed, frame * 1e3, token * 1e3, cell)
    found = MemoryModel.fit(LOADS, [truth.predict(load) for load in LOADS])
    for load in [*LOADS, Load(64_000, 20_000, 2_000_000)]:
        assert found.predict(load) == pytest.approx(truth.predict(load), rel=1e-4, abs=100)


def test_no_coefficient_is_negative_and_noise_is_averaged():
    truth = MemoryModel(1e9, 5e5, 1e5, 0.0)
    noise = np.random.default_rng(0).normal(1, 0.01, len(LOADS) * 5)
    loads = LOADS * 5
    peaks = [round(truth.predict(x) * y) for x, y in zip(loads, noise, strict=True)]
    found = MemoryModel.fit(loads, peaks)
    assert min(found.fixed, found.per_frame, found.per_token, found.per_cell) >= 0
    for load in LOADS:
        assert found.predict(load) == pytest.approx(truth.predict(load), rel=0.02)


def test_one_trial_is_enough_for_a_number():
    found = MemoryModel.fit(LOADS[:1], [7_000_000])
    assert found.predict(LOADS[0]) == pytest.approx(7_000_000, rel=1e-6)
    with pytest.raises(ValueError, match="`loads` must hold at least one trial"):
        MemoryModel.fit([], [])


def test_the_largest_batch_that_fits():
    model = MemoryModel(1e6, 1e3, 1e2, 0.5)
    one = Load(100, 30, 5000)
    size = model.batch_size(one, 5e6)
    assert model.predict(Load(100 * size, 30 * size, 5000 * size)) <= 5e6
    size += 1
    assert model.predict(Load(100 * size, 30 * size, 5000 * size)) > 5e6
    assert model.batch_size(one, 1e5) == 0


def test_time_has_a_fixed_part_and_one_per_frame():
    truth = SpeedModel(0.05, 2e-5)
    frames = [500, 2000, 8000]
    found = SpeedModel.fit(frames, [truth.predict(x) for x in frames])
    assert (found.fixed, found.per_frame) == pytest.approx((0.05, 2e-5))


def test_neither_part_is_negative():
    assert SpeedModel.fit([1000, 2000], [1.0, 4.0]).fixed == 0
    falling = SpeedModel.fit([1000, 2000], [1.0, 0.9])
    assert falling.per_frame == 0
    assert 0.9 < falling.fixed < 1.0
    assert SpeedModel.fit([1000, 1000], [1.0, 1.0]).predict(500) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="at least one trial"):
        SpeedModel.fit([], [])
