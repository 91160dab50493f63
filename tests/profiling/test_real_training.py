"""A real run at tiny size on the CPU: its steps, and how they are judged."""

import json
import sys
import time
from pathlib import Path

import pytest
import real_training
import torch
from benchmarks import harness
from real_training import Failed, Step, Training
from tones import write_corpus

from effasr import config as configuration
from effasr.distributed.process_group import DistributedContext
from effasr.training import metrics as training_metrics
from effasr.training.config import TrainConfig
from effasr.training.cuda_graph import uses_graph
from effasr.training.metrics import TrainingMetrics
from effasr.training.strategies.parallelism import has_weight_copies


def steps_of(folder: Path) -> dict[str, tuple[str, str]]:
    table = harness.read(folder / "real_training.csv")
    return {row["step"]: (row["status"], row["details"]) for row in table}


@pytest.mark.slow
@pytest.mark.extended
def test_a_dry_run(tmp_path) -> None:
    assert real_training.main(["--dry-run", "--output", str(tmp_path), "--minutes", "9"]) == 0
    steps = steps_of(tmp_path)
    assert list(steps) == list(real_training.STEPS)
    assert {name for name, (status, _) in steps.items() if status != "ok"} == {"cuda_graph"}
    assert "needs a GPU" in steps["cuda_graph"][1]
    assert steps["kill_and_resume"][1].endswith("are the same to the bit")
    # In float32 an exchange with nobody changes nothing.
    for name, kind in (("nccl", "DistributedDataParallel"), ("fsdp2", "FSDPModule")):
        assert steps[name][1].startswith(f"{kind} by cpu:gloo")
        assert steps[name][1].endswith("weights in the end: the same to the bit")
    assert steps["calibrated_run"][1].endswith("% of what was predicted")
    metrics = tmp_path / "runs" / "straight_metrics.jsonl"
    assert (
        len(metrics.read_text().splitlines())
        == real_training.SETTINGS["dry"]["recipe"]["training"]["max_steps"]
    )


@pytest.fixture
def training(tmp_path) -> Training:
    made = Training(tmp_path, tmp_path / "work", dry=True)
    made.work.mkdir()
    made.name, made.limit_s = "one", 60.0
    return made


def test_a_step_that_fails_stops_no_other_and_limits_are_kept(tmp_path, monkeypatch) -> None:
    limits = []

    def fails(run: Training) -> str:
        limits.append(run.limit_s)
        raise Failed(run.call([sys.executable, "-c", "raise ValueError('no room')"], 30).reason)

    def breaks(run: Training) -> str:
        time.sleep(2)
        raise OSError("disk\n full")

    steps = {
        "corpus": Step("", fails, (9, 2)),
        "quiet": Step("", breaks, (9, 2)),
        "late": Step("", lambda run: "well", (9, 1)),
        "never": Step("", lambda run: "well", (9, 60)),
    }
    monkeypatch.setattr(real_training, "STEPS", steps)
    assert real_training.main(["--dry-run", "--output", str(tmp_path), "--minutes", "0.5"]) == 1
    result = steps_of(tmp_path)
    assert result["corpus"] == ("failed", "exit code 1: ValueError: no room")
    assert result["quiet"] == ("failed", "OSError: disk full")
    assert result["late"] == ("ok", "well")
    assert result["never"][0] == "left out"
    assert limits == [pytest.approx(4, abs=0.5)]
    assert "Traceback" in (tmp_path / "logs" / "corpus.log").read_text()


def write_metrics(run: Path, losses: list[float]) -> None:
    run.mkdir(parents=True, exist_ok=True)
    shared = {"step_s": 0.1, "data_wait_s": 0.0, "audio_seconds": 1.0, "peak_memory_bytes": 5}
    shared |= {"oom_splits": 0}
    lines = [json.dumps({"step": n, "loss": x} | shared) for n, x in enumerate(losses, 1)]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_runs_are_judged(training, monkeypatch) -> None:
    count = training.size["quiet_steps"]
    write_metrics(training.runs / "quiet", [5.0] * count)
    monkeypatch.setattr(Training, "train", lambda self, name, *_, **__: self.runs / name)
    for losses, message in (
        ([5.2] * count, r"losses of the first steps are 4\.00%"),
        ([5.0, float("nan")] + [5.0] * (count - 2), "a loss is not finite"),
        ([5.0] * (count - 1), f"must have steps 1 to {count}"),
    ):
        write_metrics(training.runs / "compile", losses)
        with pytest.raises(Failed, match=message):
            training.variant("compile")
    write_metrics(training.runs / "straight", [5.0] * training.loop["max_steps"])
    with pytest.raises(Failed, match="the loss did not fall"):
        training.straight()
    budgets = {"frame_budget": 9, "token_budget": 9, "max_sequences": 9}
    training.calibration = {**budgets, "predicted_bytes": 4, "target_bytes": 4}
    write_metrics(training.runs / "calibrated", [5.0] * training.size["calibrated_steps"])
    assert training.calibrated_run().endswith("+25.0 % of what was predicted")
    training.dry = False
    with pytest.raises(Failed, match=r"more than the 0\.000 GB that were given"):
        training.calibrated_run()


def test_each_step_changes_the_quiet_run_on_a_gpu_in_one_way(tmp_path, monkeypatch) -> None:
    configs: dict[str, TrainConfig] = {}

    def train(self: Training, name: str, *overrides: str, wrapped: bool = False) -> Path:
        configs[name] = configuration.load(TrainConfig, self.recipe(), overrides)
        write_metrics(self.runs / name, [5.0] * self.size["quiet_steps"])
        kinds = {"ddp": "DistributedDataParallel", "fsdp2": "FSDPModule"}
        if wrapped:
            log = self.output / "logs" / f"{self.name}.log"
            log.parent.mkdir(exist_ok=True)
            log.write_text(f"{real_training.MARK}{kinds[name]} by nccl\n")
        return self.runs / name

    monkeypatch.setattr(Training, "train", train)
    monkeypatch.setattr(real_training, "differing_tensors", lambda *_: [])
    training = Training(tmp_path, tmp_path, dry=False)
    write_corpus(training.corpus, train=8)
    for name in ("quiet", "cuda_graph", "compile", "nccl", "fsdp2"):
        training.name = name
        real_training.STEPS[name].do(training)
    gpu = DistributedContext(0, 1, torch.device("cuda", 0))
    assert [name for name in configs if uses_graph(configs[name], gpu.device)] == ["graph"]
    assert [name for name in configs if configs[name].training.compile] == ["compile"]
    # Copies of shards cannot be made.
    uncopied = [name for name in configs if not has_weight_copies(configs[name], gpu)]
    assert uncopied == ["fsdp2"]
    strategies = {name: config.training.strategy for name, config in configs.items()}
    assert strategies == dict.fromkeys(configs, "ddp") | {"fsdp2": "fsdp2"}


def test_no_time_is_compared(monkeypatch) -> None:
    # That of a known GPU: without one, some fields are empty.
    monkeypatch.setattr(training_metrics, "peak_flops", lambda device: 1e12)

    def line(seconds: float) -> dict[str, object]:
        metrics = TrainingMetrics(torch.device("cpu"))
        kinds = ("useful_flops", "computed_flops", "hardware_flops")
        metrics._sums = {"steps": 1.0} | dict.fromkeys(kinds, 3e11)
        metrics.time(seconds, seconds / 2)
        return metrics.line(1, 0)

    quick, slow = line(0.5), line(1.0)
    timed = {name for name in quick if quick[name] != slow[name]}
    assert {"step_s", "mfu", "mfu_with_padding", "hfu"} <= timed <= real_training.MEASURED
