"""The state after a fault at any call of the file system is the one before or the one after.

By default some calls of each fault are tried; ``EFFASR_FAULTS=all`` tries all, as `make faults`.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.faults.injection import FAULTS, build, inject

ALL = os.environ.get("EFFASR_FAULTS") == "all"

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the faults are injected by LD_PRELOAD"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to compile inject.c with"),
]


@pytest.fixture(scope="session")
def library(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("inject"))


@pytest.mark.slow
@pytest.mark.timeout(3600 if ALL else 300)
@pytest.mark.parametrize("fault", FAULTS[1:] if ALL else ("kill", "full"))
@pytest.mark.parametrize(
    ("scenario", "least_calls", "stride"),
    [("checkpoint", 80, 7), ("model_directory", 25, 5), ("export", 25, 5), ("run_files", 70, 9)],
)
@pytest.mark.representative(fault="kill", scenario="checkpoint")
def test_a_fault_leaves_the_state_before_or_after(
    scenario, least_calls, stride, fault, library, tmp_path
):
    stride = 1 if ALL else stride
    module = f"tests.faults.{scenario}"
    outcomes = inject(library, module, fault, tmp_path, stride=stride, limit_s=3500)
    problems = [one for one in outcomes if one.problem]
    assert not problems, "\n".join(f"call {one.call}: {one.problem}" for one in problems[:5])
    assert len(outcomes) * stride >= least_calls
    # Otherwise nothing was injected.
    if fault == "kill":
        assert all(one.error == "killed" for one in outcomes)
    elif fault != "vanished":
        assert sum(bool(one.error) for one in outcomes) > len(outcomes) // 5


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not ALL, reason="takes minutes: EFFASR_FAULTS=all, as in `make faults`")
@pytest.mark.parametrize("fault", ["kill", "full"])
def test_a_whole_run_goes_on_after_a_fault(fault, library, tmp_path):
    outcomes = inject(library, "tests.faults.whole_run", fault, tmp_path, limit_s=7000)
    problems = [one for one in outcomes if one.problem]
    assert not problems, "\n".join(f"call {one.call}: {one.problem}" for one in problems[:5])
    assert len(outcomes) > 150
