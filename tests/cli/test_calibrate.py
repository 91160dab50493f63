"""`effasr calibrate`, with a known machine in the place of trials."""

import json

import pytest

from effasr import config as configuration
from effasr.training.calibration.calibrate import LinearModel
from effasr.training.config import TrainConfig
from tests.support.known_machine import known_machine


@pytest.fixture(autouse=True)
def trials(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return known_machine(monkeypatch, LinearModel(1e8, 1e5))


def test_what_it_shows_is_what_training_takes(effasr, workplace, tmp_path, train, trials):
    done = effasr("calibrate", workplace.recipe, "--target-bytes", "200000000")
    assert done.code == 0
    assert done.out.startswith("frame budget ")
    assert "(predicted " in done.err
    assert "data.frame_budget=auto calibration.target_bytes=200000000" in done.out
    assert "need another training.max_steps" in done.out
    count = len(trials)
    settings = "data.frame_budget=auto", "calibration.target_bytes=200000000"
    trained = train("training.max_steps=1", *settings)
    assert trained.code == 0, trained.err
    assert len(trials) == count
    # The command itself tries anew each time.
    assert effasr("calibrate", workplace.recipe, "--target-bytes", "200000000").code == 0
    assert len(trials) == 2 * count
    budget = next(line for line in done.out.splitlines() if line.startswith("frame budget"))
    written = configuration.load(TrainConfig, tmp_path / "runs" / "first" / "config.yaml")
    assert budget.split()[2] == str(written.data.frame_budget)


def test_json_is_the_file(effasr, workplace, tmp_path):
    done = effasr("calibrate", workplace.recipe, "--objective", "memory", "--json")
    content = json.loads(done.out)
    assert content["frame_budget"] >= 1
    assert content["made_for"]["calibration"]["objective"] == "memory"
    (path,) = (tmp_path / "cache").rglob(f"{content['fingerprint']}.json")
    assert json.loads(path.read_text()) == content
    assert all(len(row) == 3 for row in content["bucket_batch_sizes"])


def test_a_target_that_holds_nothing_is_a_failure(effasr, workplace):
    failed = effasr("calibrate", workplace.recipe, "--target-bytes", "1000")
    assert failed.code == 1
    assert "does not fit in 0.0 MiB" in failed.err.splitlines()[-1]
