"""The batch script for SLURM, where srun, scontrol, scancel and torchrun are played by others."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "profiling" / "slurm" / "train.sbatch"

# Of two nodes, each a process group; what they were asked is in a file.
FAKES = {
    "srun": 'shift\nfor node in 1 2; do setsid "$@" & echo $! >> nodes; children+=($!); done\n'
    'worst=0\nfor child in "${children[@]}"; do\n'
    '    wait "$child"; code=$?; ((code > worst)) && worst=$code\ndone\nexit $worst',
    "scontrol": 'if [[ $1 == show ]]; then printf "n1\\nn2\\n"; else echo "$@" >> requeued; fi',
    # Only what SLURM started itself has the signal.
    "scancel": 'for node in $(cat nodes); do kill -s "${1#--signal=}" "$node"; done',
    "torchrun": 'echo "$@" >> started\n[[ "$*" == *fail* ]] && exit 3\n'
    '[[ "$*" == *done* ]] && exit 0\n'
    "trap 'echo once >> asked; sleep 1; echo saved >> saved; exit 1' TERM\n"
    "for _ in {1..300}; do sleep 0.1; done",
}


@pytest.fixture
def start(tmp_path):
    """Start the script in a folder, among fakes."""
    for name, content in FAKES.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{content}\n")
        path.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NNODES": "2",
    }
    processes = []

    def begin(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["bash", str(SCRIPT), *arguments],
            env=environment, cwd=tmp_path, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def wait_for(path: Path, lines: int) -> None:
    ends = time.monotonic() + 120
    while not path.exists() or len(path.read_text().splitlines()) < lines:
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_syntax() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    options = [line for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --requeue" in options
    # sbatch reads no option after the first command.
    assert "#SBATCH" not in SCRIPT.read_text().partition("set -euo")[2]


def test_a_run_that_is_done(start, tmp_path) -> None:
    out, error = (process := start("done", "seed=3", "name=two words")).communicate(timeout=240)
    assert process.returncode == 0, error
    assert out == ""
    lines = (tmp_path / "started").read_text().splitlines()
    assert len(lines) == 2
    assert lines[0] == (
        "--nnodes 2 --nproc-per-node gpu --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint "
        "n1:24711 --rdzv-id 4711-0 -m effasr.train done seed=3 name=two words"
    )
    assert not (tmp_path / "requeued").exists()
    assert (tmp_path / "flight").is_dir()


def test_a_run_that_failed_is_not_requeued(start, tmp_path) -> None:
    process = start("fail")
    process.communicate(timeout=240)
    assert process.returncode == 3
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize("preempted", [False, True])
def test_a_run_that_was_stopped_saves_and_is_requeued(start, tmp_path, preempted) -> None:
    process = start("long")
    wait_for(tmp_path / "started", 2)
    if preempted:
        # SLURM tells the nodes, and the script as well.
        for node in (tmp_path / "nodes").read_text().split():
            os.kill(int(node), signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
    else:
        process.send_signal(signal.SIGUSR1)
    out, error = process.communicate(timeout=240)
    assert process.returncode == 0, error
    assert "job 4711 is requeued" in out
    assert (tmp_path / "requeued").read_text() == "requeue 4711\n"
    # Each of the two was asked once, and given the time that it needed.
    assert (tmp_path / "asked").read_text().split() == ["once", "once"]
    assert (tmp_path / "saved").read_text().split() == ["saved", "saved"]
