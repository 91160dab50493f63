"""Trials in processes of their own, and how such a process may end."""

import os
import sys
import time
from dataclasses import replace

import pytest

from effasr import config as configuration
from effasr.training.calibration import trial
from effasr.training.calibration.search import Search
from effasr.training.calibration.settings import CalibrationConfig
from effasr.training.calibration.trial import Measurement, Request, TrialFailed, measure
from effasr.training.calibration.workload import Workload
from effasr.training.config import LoopConfig, TrainConfig
from effasr.training.resolve import resolve_config
from tests.support.preloaded import Preloaded
from tests.training.calibration.conftest import MODEL


@pytest.fixture
def request_of(population):
    def make(frames: int, limit: int = 4 << 30) -> Request:
        training = LoopConfig(device="cpu", threads=1)
        config = resolve_config(TrainConfig(model=MODEL, training=training), None)
        work = population.workload(frames, batches=2)
        return Request(configuration.to_mapping(config), 12, "cpu", limit, 2, work)

    return make


def test_a_trial_measures_memory_and_speed(request_of):
    calls: list[float] = []
    started = time.monotonic()
    measured = measure(request_of(400), alive=lambda: calls.append(0.0), every_s=0.2)
    used = time.monotonic() - started
    assert measured.fits, measured.reason
    # Python and PyTorch alone take more than 100 MiB.
    assert 100e6 < measured.peak_bytes < 3e9
    assert 0 < measured.seconds < used
    assert 25 < measured.audio_seconds <= 32
    assert measured.speed == measured.audio_seconds / measured.seconds
    # It was waited for, not slept through: about every 0.2 s somebody was told.
    assert len(calls) >= 2


@pytest.mark.extended
def test_want_of_memory_is_a_result(request_of):
    """The limit is the kernel's: what is taken beyond it does not exist."""
    measured = measure(request_of(3000, limit=450 << 20))
    assert not measured.fits
    assert measured.reason
    assert measured.speed == 0


@pytest.mark.slow
@pytest.mark.extended
def test_the_model_of_memory_predicts_what_is_measured(request_of, population, tmp_path):
    """From the first trials to a budget that is larger than all of them."""
    endless = replace(population, total_frames=10**9)
    settings = CalibrationConfig(objective="memory", margin=0.03)
    target = 560 << 20

    def trial(work: Workload) -> Measurement:
        file = tmp_path / "request.json"
        file.write_text(replace(request_of(400), limit_bytes=target, workload=work).to_json())
        module = "tests.training.calibration.trial_from_file"
        process = Preloaded(module, str(file), str(os.getpid()), env=dict(os.environ))
        out, error = process.communicate(timeout=240)
        return trial._result(process.returncode, out, error)

    result = Search(endless, MODEL, settings, target, 1, trial).run()
    assert result.limited_by == "memory"
    assert result.replay.error is not None
    assert abs(result.replay.error) < 0.04
    assert 0.9 * target < result.replay.measured.peak_bytes <= target


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "the system killed it"),
        ("import os, sys; sys.stderr.write('std::bad_alloc'); sys.stderr.flush(); os.abort()",
         "it aborted"),
        ("raise ValueError('no such layer')",
         TrialFailed("ended with 1: ValueError: no such layer")),
        ("import time; time.sleep(60)",
         TrialFailed("of 400 frames took more than 1 s, and was stopped")),
    ],
)  # fmt: skip
def test_how_a_process_may_end(request_of, monkeypatch, code, result):
    monkeypatch.setattr(trial, "_COMMAND", [sys.executable, "-c", code])
    options = {"timeout_s": 1.0, "every_s": 0.2} if "sleep" in code else {}
    if isinstance(result, str):
        assert measure(request_of(400)) == Measurement(fits=False, reason=result)
        return
    with pytest.raises(TrialFailed, match=str(result)):
        measure(request_of(400), **options)


def test_a_trial_does_not_take_itself_for_a_rank(monkeypatch):
    local = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x", "PATH": "p"}
    environment = trial._environment(local)
    assert environment.keys() == {"PATH", "PYTHONPATH"}
    assert replace(Measurement(fits=True), seconds=2.0, audio_seconds=6.0).speed == 3.0
