import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import report
from analysis import nsys, steps

from effasr import ranges
from effasr.training.profiler import _version_of_nsys

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


TRAINING = """\
import sys
from pathlib import Path

from effasr import ranges
from effasr.cli.main import main
from effasr.training.profiler import _version_of_nsys
from tests.cli.conftest import RECIPE, write_manifest

folder = Path(sys.argv[1])
for name, count in (("train", 24), ("dev", 4)):
    write_manifest(folder, name, count)
    assert main(["prepare", f"{folder}/{name}.jsonl", f"{folder}/{name}"]) == 0
assert main(["tokenizer", f"{folder}/train", f"{folder}/tokenizer", "--vocab-size", "30"]) == 0
(folder / "first.yaml").write_text(RECIPE.format(folder=folder))
ranges.enable("nvtx", tool_version=_version_of_nsys())
sys.exit(main(["train", f"{folder}/first.yaml"]))
"""


@pytest.mark.extended
def test_ranges_of_a_training_arrive_in_nsys(tmp_path: Path) -> None:
    """Recorded by the real program, of which --trace=nvtx needs no GPU, and read by report.py."""
    if shutil.which("nsys") is None:
        pytest.skip("nsys is not installed: see docs/profiling.md")
    try:
        ranges.enable("nvtx", tool_version=_version_of_nsys())
    except (ImportError, RuntimeError) as error:
        pytest.skip(str(error))
    finally:
        ranges.disable()
    command = [
        *("nsys", "profile", "--trace=nvtx", "--sample=none", "--cpuctxsw=none"),
        *("--export=sqlite", f"--output={tmp_path / 'rank0'}"),
        *(sys.executable, "-c", TRAINING, str(tmp_path)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    table = nsys.read(tmp_path / "rank0.sqlite")
    names = Counter(table.names[number] for number in table.ranges["name"].tolist())
    # Four steps of two micro-batches.
    expected = {"step": 4, "data": 4, "forward": 8, "backward": 8, "update": 4, "validation": 1}
    assert {name: names[name] for name in expected} == expected
    assert {"features", "encoder.0", "decoder.0", "ctc", "cross_entropy"} <= names.keys()
    captured = steps.find(table, 0, np.zeros(0, np.int64))
    assert captured.numbers.tolist() == [0, 1, 2, 3]
    begins, ends = (table.ranges[x][captured.containers] for x in ("start", "end"))
    forwards = table.ranges[table.ranges["name"] == table.names.index("forward")]
    inside = (forwards["start"][:, None] > begins) & (forwards["end"][:, None] < ends)
    assert inside.sum(0).tolist() == [2] * 4
    # Without a GPU there is no time of kernels to divide, which the report says.
    made = report.make([[tmp_path / "rank0.sqlite"]], tmp_path / "out")
    assert any("no kernel ran" in note["text"] for note in made["quality"])
