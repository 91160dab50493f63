"""Standard streams that are closed, full or broken, and environments that lack something."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import whole_run

ROOT = Path(__file__).parents[2]
EFFASR = f"{sys.executable} -m effasr.cli"


def shell(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], env=environment, cwd=ROOT, text=True,
        capture_output=True, timeout=250, encoding="utf-8",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("command", "code", "out", "error"),
    [
        ("--version >&-", 0, "", ""),
        ("recipes >&- 2>&- <&-", 0, "", ""),
        ("recipes 2>&-", 0, "canary", ""),
        ("recipes > /dev/full", 1, "", "effasr recipes: standard output: No space left on device."),
        ("--version > /dev/full", 1, "", "effasr: standard output: No space left on device."),
        ("--help > /dev/full", 1, "", "effasr: standard output: No space left on device."),
        ("train --help | head -1", 0, "usage", ""),
        ("recipes | head -1", 0, "add_language", ""),
        ("train /no/recipe.yaml 2>&-", 2, "", ""),
        ("train /no/recipe.yaml 2> /dev/full", 2, "", ""),
    ],
)
@pytest.mark.representative(
    command=["recipes >&- 2>&- <&-", "recipes > /dev/full", "recipes | head -1"]
)
def test_a_closed_or_full_stream_changes_no_exit_code(command, code, out, error):
    done = shell(f"{EFFASR} {command}")
    assert (done.returncode, done.stderr.strip()) == (code, error)
    assert out in done.stdout
    assert bool(out) == bool(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("streams", [">&- 2>&- <&-", "2>&1 | true", "2> /dev/full"])
@pytest.mark.extended
def test_training_does_not_end_with_its_streams(streams, tmp_path):
    recipe = small_run(tmp_path)
    done = shell(f"{EFFASR} train {recipe} {streams}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    check_run(tmp_path)


NOTHING = """
import pwd, sys
from effasr.cli.main import main

def no_entry(number):
    raise KeyError(f"getpwuid(): uid not found: {number}")

pwd.getpwuid = no_entry
sys.exit(main(["train", sys.argv[1]]))
"""


@pytest.mark.slow
@pytest.mark.extended
def test_an_environment_of_ascii_and_nothing_else_is_enough(tmp_path):
    """Nor is a home, a user or the temporary folder that is named needed."""
    folder = tmp_path / "Übung Ω"
    folder.mkdir()
    recipe = small_run(folder, text="größer größer 日本", workers=1)
    (tmp_path / "nothing.py").write_text(NOTHING)
    ascii_alone = {"LC_ALL": "C", "LANG": "C", "PYTHONIOENCODING": "ascii:strict"}
    without = "env -u HOME -u USER -u LOGNAME -u XDG_CACHE_HOME TMPDIR=/proc/none"
    done = shell(f"{without} {sys.executable} {tmp_path}/nothing.py '{recipe}'", **ascii_alone)
    assert done.returncode == 0, done.stderr
    check_run(folder)
    rows = (folder / "run/evaluation/train/hypotheses.jsonl").read_text(encoding="utf-8")
    assert "größer" in rows
    wav = folder / "data" / "0.wav"
    done = shell(f"{EFFASR} transcribe --run '{folder}/run' '{wav}'", **ascii_alone)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


def small_run(folder: Path, text: str = "low high", workers: int = 0) -> Path:
    whole_run.make_data(folder / "data", text)
    recipe = folder / "recipe.yaml"
    data = folder / "data"
    lines = [
        whole_run.RECIPE.replace("workers: 0", f"workers: {workers}, train: '{data}/train.jsonl', "
        f"validation: '{data}/train.jsonl', tokenizer: '{data}/tokenizer'"),
        f"output: '{folder}'",
    ]  # fmt: skip
    recipe.write_text("\n".join(lines), encoding="utf-8")
    return recipe


def check_run(folder: Path):
    newest = (folder / "run" / "checkpoints" / "latest").read_text()
    assert newest == f"step_{whole_run.STEPS:08d}\n"
    for file in ("metrics.jsonl", "config.yaml"):
        # A closed stream's number is not that of a file.
        text = (folder / "run" / file).read_text(encoding="utf-8")
        assert "effasr train" not in text
        assert "utterances, " not in text
