"""Runs that were killed, and runs on several ranks, against one that was left alone."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from effasr import config as configuration
from effasr.checkpoint import load_model
from effasr.distributed import tensor_files
from effasr.training.config import TrainConfig
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.trainer import run
from tests.support.preloaded import Preloaded

MEASURED = {
    "data_wait_s", "step_s", "useful_tflops", "peak_memory_bytes", "slowest_rank", "rank_wait_s",
}  # fmt: skip
STEPS = 20
LONG = {"max_steps": STEPS, "checkpoint_every": 5, "keep": 10}


def metrics(folder: Path) -> list[dict]:
    lines = read_lines(folder / "metrics.jsonl")
    return [{name: line[name] for name in line.keys() - MEASURED} for line in lines]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the last checkpoint: weights, statistics, moments, averages."""
    path = folder / "checkpoints" / f"step_{STEPS:08d}"
    found = {f"model.{name}": t for name, t in load_model(path).model.state_dict().items()}

    def walk(value: object, name: str) -> None:
        if isinstance(value, torch.Tensor):
            found[name] = value
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{name}.{key}")

    walk(torch.load(path / "training.pt", weights_only=True), "state")
    walk(tensor_files.read_whole(path / "training"), "state")
    return found


def assert_same_end(first: Path, second: Path) -> None:
    ours, theirs = tensors(first), tensors(second)
    assert ours.keys() == theirs.keys()
    assert len(ours) > 100
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert metrics(first) == metrics(second)
    assert [line["step"] for line in metrics(first)] == list(range(1, STEPS + 1))


class Processes:
    """The ranks of a run, each a process of its own, as torchrun would start them."""

    def __init__(self, config: TrainConfig, folder: Path, size: int) -> None:
        recipe = folder / f"{config.name}.yaml"
        recipe.write_text(configuration.dump(config))
        self.folder = folder / config.name
        # As torchrun's: its port is not one that was free a moment ago.
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {
            "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        self.ranks = [
            Preloaded(
                "effasr.train",
                str(recipe),
                env={**os.environ, **common, "RANK": str(rank)},
                new_session=True,
            )
            for rank in range(size)
        ]

    def kill_after(self, step: int) -> None:
        """Kill every rank as soon as the log shows a step."""
        deadline = time.perf_counter() + 240
        try:
            while time.perf_counter() < deadline:
                lines = read_lines(self.folder / "metrics.jsonl")
                if lines and lines[-1]["step"] >= step:
                    return
                assert self.ranks[0].poll() is None, self.ranks[0].communicate()[1]
                time.sleep(0.005)
            raise AssertionError(f"no step {step} within four minutes")
        finally:
            for rank in self.ranks:
                rank.kill()
                rank.communicate()

    def finish(self) -> None:
        try:
            for rank in self.ranks:
                _, error = rank.communicate(timeout=240)
                assert rank.returncode == 0, error
        finally:
            for rank in self.ranks:
                rank.kill()


@pytest.fixture
def straight(make_config, tmp_path) -> Path:
    assert run(make_config(name="straight", training=LONG)) == 0
    return tmp_path / "straight"


def test_a_killed_run_ends_as_if_nothing_had_happened(make_config, tmp_path, straight) -> None:
    config = make_config(name="killed", training=LONG)
    Processes(config, tmp_path, 1).kill_after(7)
    assert not (tmp_path / "killed" / "checkpoints" / f"step_{STEPS:08d}").exists()
    assert run(config) == 0
    assert_same_end(tmp_path / "killed", straight)


@pytest.mark.slow
@pytest.mark.extended
def test_a_killed_run_of_two_ranks_ends_as_if_nothing_had_happened(make_config, tmp_path) -> None:
    """With data workers, which must not outlive their rank."""
    configs = [
        make_config(name=name, training=LONG, data={"workers": 1}) for name in ("killed", "left")
    ]
    Processes(configs[0], tmp_path, 2).kill_after(7)
    for config in configs:
        Processes(config, tmp_path, 2).finish()
    assert_same_end(tmp_path / "killed", tmp_path / "left")


@pytest.mark.slow
def test_two_ranks_have_the_loss_curve_of_one(make_config, tmp_path, straight) -> None:
    """With dropout and augmentation on, whose draws no number of ranks may change."""
    Processes(make_config(name="two", training=LONG), tmp_path, 2).finish()
    two, one = metrics(tmp_path / "two"), metrics(straight)
    for name in ("loss", "cross_entropy", "ctc", "transducer", "guided", "grad_norm"):
        curve = [line[name] for line in one]
        assert [line[name] for line in two] == pytest.approx(curve, rel=1e-5)
    for name in ("tokens", "audio_seconds", "padding_frames", "padding_tokens", "lr", "epoch"):
        assert [line[name] for line in two] == pytest.approx([line[name] for line in one])
    assert any(line["rank_imbalance"] > 0 for line in two)


@pytest.mark.slow
def test_one_rank_that_is_asked_to_stop_stops_them_all(make_config, tmp_path) -> None:
    """Even where the signal goes to its data workers as well, as batch systems send it."""
    config = make_config(training={**LONG, "max_steps": 1000}, data={"workers": 1})
    processes = Processes(config, tmp_path, 2)
    deadline = time.perf_counter() + 240
    while not read_lines(tmp_path / "run" / "metrics.jsonl"):
        assert time.perf_counter() < deadline
        time.sleep(0.01)
    os.killpg(processes.ranks[1].pid, signal.SIGTERM)
    processes.finish()
    last = read_lines(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    assert last < 1000
    assert (tmp_path / "run" / "checkpoints" / f"step_{last:08d}" / "training.pt").is_file()
