"""Training as it is started in earnest: processes of their own, from any folder."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import effasr.train
from effasr.launch import main
from effasr.training.run_dir.run_directory import read_lines
from tests.support.preloaded import finished

TRAIN = str(Path(effasr.train.__file__))
TORCHRUN = [str(Path(sysconfig.get_path("scripts")) / "torchrun"), "--standalone"]
TWO = ["--standalone", "--nproc-per-node", "2"]

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread_a_rank(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def start(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def torchrun(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """As the script, which calls this module's `main`; its own start is tested above."""
    return finished("torch.distributed.run", *TWO, *arguments, cwd=folder)


def launch(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return finished("effasr.launch", *TWO, *arguments, cwd=folder)


@pytest.mark.parametrize(
    "command",
    [
        # A file is what the tests below start.
        pytest.param([*TORCHRUN, "--nproc-per-node", "1", TRAIN], marks=pytest.mark.extended),
        [*TORCHRUN, "--nproc-per-node", "2", "-m", "effasr.train"],
        pytest.param([sys.executable, "-m", "effasr.cli", "train"], marks=pytest.mark.extended),
    ],
    ids=["file", "module", "alone"],
)
def test_all_ways_to_train_from_another_folder(workplace, tmp_path, command):
    done = start([*command, workplace.recipe, "output=here", "training.max_steps=1"], tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "here" / "first"
    assert [line["step"] for line in read_lines(run / "metrics.jsonl")] == [1]
    assert (run / "checkpoints" / "step_00000001" / "model.safetensors").is_file()
    # One voice, on however many ranks.
    assert done.stderr.count("step 1/1 ") == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "model.encoder.layrs=3",
            "`model.encoder.layrs` is an unknown field: did you mean `layers",
        ),
        (
            "data.strategy=random data.micro_batches=3",
            "`micro_batches` must be a multiple of the number of ranks, 2, for strategy random",
        ),
    ],
    ids=["before the ranks meet", "after they have met"],
)
@pytest.mark.extended
def test_what_all_ranks_find_wrong_is_said_once(workplace, tmp_path, overrides, message):
    settings = "output=here", *overrides.split()
    failed = torchrun(TRAIN, workplace.recipe, *settings, folder=tmp_path)
    assert failed.returncode == 1
    (line,) = (line for line in failed.stderr.splitlines() if line.startswith("effasr train:"))
    assert message in line
    # torchrun's own report, the last on the screen, has the reason as well.
    *_, report = failed.stderr.partition("Root Cause (first observed failure):")
    assert message in report
    assert not (tmp_path / "here").exists()


@pytest.mark.extended
def test_what_one_rank_finds_wrong_is_not_lost_among_what_follows(workplace, tmp_path):
    """The other rank sees a closed connection, and that is no news."""
    (tmp_path / "gone.py").write_text(
        "import os, sys\n"
        "from effasr.data.loader import Loader\n"
        "from effasr.data.audio.waveform import AudioError, AudioProblem\n"
        "from effasr.cli.main import main\n"
        "if os.environ['RANK'] == '1':\n"
        "    def joined(self, items):\n"
        "        raise AudioError(AudioProblem.MISSING, 'u7: it is gone.')\n"
        "    Loader._joined = joined\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    failed = torchrun(
        "gone.py",
        "train",
        workplace.recipe,
        "output=here",
        "schedule.warmup_steps=1",
        folder=tmp_path,
    )
    assert failed.returncode == 1
    lines = [line for line in failed.stderr.splitlines() if line.startswith("effasr train:")]
    assert lines == ["effasr train: u7: it is gone."]
    assert "u7: it is gone." in failed.stderr.partition("Root Cause (first observed failure):")[2]


def test_the_launcher_names_the_end_of_a_process_that_could_not(tmp_path):
    (tmp_path / "ends.py").write_text(
        "import os, signal, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    sys.exit(7) if sys.argv[1] == 'exit' else os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(60)\n"
    )
    killed = launch("ends.py", "kill", folder=tmp_path)
    assert killed.returncode == 128 + 9
    (line,) = killed.stderr.splitlines()
    assert line.startswith("effasr.launch: rank 1 (local rank 1, process ")
    assert "was ended by SIGKILL. The kernel may have ended it for want of memory." in line
    remaining = launch("ends.py", "exit", folder=tmp_path)
    assert remaining.returncode == 7
    assert remaining.stderr.endswith(") ended with exit code 7.\n")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--nproc-per-node", "many", "Unsupported nproc_per_node value: many"),
        ("--rdzv-backend", "none", "The rendezvous backend 'none' is not registered."),
    ],
)
def test_the_launcher_refuses_options_in_one_line(monkeypatch, capsys, option, value, message):
    assert main([option, value, TRAIN]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"effasr.launch: {message}")
