"""A training whose clock is set forward and back: see `clock.c`."""

import re
import shutil
import subprocess
import sys
import time

import pytest
import safetensors.torch
import torch

from effasr.checkpoint import resolve
from effasr.cli.main import main
from effasr.training.run_dir.run_directory import read_lines
from tests.faults import whole_run
from tests.faults.injection import build
from tests.faults.test_streams import check_run, shell, small_run

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the clock is set by LD_PRELOAD"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to compile clock.c with"),
]

_ASK = "import time; print(*(round(time.time() - time.monotonic()) for _ in range(4)))"

_STOP_AND_GO_ON = """
import sys
from effasr.cli.main import main

sys.exit(main([*sys.argv[1:], "training.stop_at=3"]) or main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def clock(tmp_path_factory) -> str:
    """Path of the library; processes that load it have such a clock."""
    library = str(build(tmp_path_factory.mktemp("clock"), "clock"))
    command = [sys.executable, "-c", _ASK]
    done = subprocess.run(
        command, env={"LD_PRELOAD": library}, capture_output=True, text=True, check=True
    )
    requested = list(map(int, done.stdout.split()))
    assert max(requested) - min(requested) > 7000
    return library


@pytest.mark.slow
@pytest.mark.extended
def test_a_run_is_the_same_whatever_the_time_of_day(clock, tmp_path):
    recipe, begun = small_run(tmp_path), time.monotonic()
    assert main(["train", str(recipe), "name=straight"]) == 0
    done = shell(f"{sys.executable} -c '{_STOP_AND_GO_ON}' train {recipe}", LD_PRELOAD=clock)
    seconds = time.monotonic() - begun
    assert done.returncode == 0, done.stderr
    assert "continuing from step 3 of 6" in done.stderr
    check_run(tmp_path)
    names = ("run", "straight")
    item, other = (
        safetensors.torch.load_file(
            resolve(tmp_path / name / "checkpoints" / f"step_{whole_run.STEPS:08d}")
            / "model.safetensors"
        )
        for name in names
    )
    assert all(torch.equal(item[name], other[name]) for name in other)
    marks = [(tmp_path / name / "checkpoints" / "best").read_text() for name in names]
    assert marks[0] == marks[1]
    # Durations, and what follows from them, are those of a clock that is not set.
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == whole_run.STEPS
    assert all(0 < line["step_s"] < seconds for line in lines)
    assert all(0 <= line["data_wait_s"] < seconds for line in lines)
    remaining = re.findall(r"step \d+/6 .* ETA (\d+):(\d+):(\d+)", done.stderr)
    assert len(remaining) == whole_run.STEPS
    for hours, minutes, remainder in remaining:
        assert 3600 * int(hours) + 60 * int(minutes) + int(remainder) <= whole_run.STEPS * seconds
