import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "profiling" / "nsys_train.sh"


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script where nsys, torchrun and python only say how they were called."""
    for name in ("nsys", "torchrun", "python"):
        path = folder / name
        path.write_text(f'#!/bin/sh\necho {name} "$@"\n')
        path.chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "NSYS_OUT": str(folder / "out")} | variables
    return subprocess.run(
        [SCRIPT, *arguments], env=environment, capture_output=True, text=True, check=False
    )


def test_torchrun_starts_this_script_around_each_process(tmp_path: Path) -> None:
    done = run(tmp_path, "demo", "seed=3", GPUS="4", NSYS_FIRST="7", NSYS_LAYERS="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        f"torchrun --nproc-per-node=4 --no-python {SCRIPT} --rank python -u -m effasr.train demo "
        "seed=3 training.profile.tool=nsys training.profile.first_step=7 "
        "training.profile.steps=5 training.profile.layers=true\n"
    )
    assert (tmp_path / "out").is_dir()


def test_a_wanted_rank_runs_under_nsys_and_survives_the_capture(tmp_path: Path) -> None:
    done = run(tmp_path, "--rank", "python", "-m", "x", RANK="2", NSYS_RANKS="0,2")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert words[:2] == ["nsys", "profile"]
    assert words[-3:] == ["python", "-m", "x"]
    assert "--capture-range=cudaProfilerApi" in words
    assert "--capture-range-end=stop" in words
    assert "--cuda-graph-trace=node" in words


@pytest.mark.parametrize("rank", ["1", "12", "20"])
def test_other_ranks_run_without_it_and_do_not_profile(tmp_path: Path, rank: str) -> None:
    done = run(tmp_path, "--rank", "python", "-m", "x", RANK=rank, NSYS_RANKS="0,2")
    assert done.stdout == "python -m x training.profile.tool=none\n"
