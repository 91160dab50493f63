"""A real run at tiny size on the CPU: its steps, its corpus, and what it needs installed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import train_on_gpu
from bench import processes, rows
from real_run import compare, corpus, settings, steps, wheels
from real_run.steps import Context, Failed, LeftOut

from effasr import config as configuration
from effasr.distributed.process_group import DistributedContext
from effasr.training import metrics as training_metrics
from effasr.training.config import TrainConfig
from effasr.training.cuda_graph import uses_graph
from effasr.training.metrics import TrainingMetrics
from effasr.training.strategies.parallelism import has_weight_copies

ROOT = Path(train_on_gpu.__file__).parents[1]


@pytest.mark.extended
def test_a_dry_run_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--dry-run", "--output", str(tmp_path), "--minutes", "5"]
    assert train_on_gpu.main([*options, "--only", "train"]) == 0
    found = list(rows.read(tmp_path / "train_on_gpu.csv"))
    assert [(row["step"], row["status"]) for row in found] == [("corpus", "ok"), ("train", "ok")]
    assert all(row["device"].startswith("cpu ") and row["git"] for row in found)
    kept = tmp_path / "train_on_gpu" / "straight_metrics.jsonl"
    assert len(kept.read_text().splitlines()) == settings.DRY.steps
    assert capsys.readouterr().out.count(" ok ") == 2


@pytest.mark.extended
def test_a_run_that_is_killed_goes_on(tmp_path: Path) -> None:
    options = ["--dry-run", "--output", str(tmp_path), "--minutes", "5"]
    assert train_on_gpu.main([*options, "--only", "kill_and_resume"]) == 0
    found = {row["step"]: row for row in rows.read(tmp_path / "train_on_gpu.csv")}
    assert found["kill_and_resume"]["status"] == "ok"
    assert "the same to the bit" in found["kill_and_resume"]["details"]


@pytest.mark.extended
def test_what_needs_a_gpu_is_left_out_of_a_dry_run(tmp_path: Path) -> None:
    options = ["--dry-run", "--output", str(tmp_path), "--minutes", "5"]
    assert train_on_gpu.main([*options, "--only", "cuda_graph"]) == 0
    found = {row["step"]: row for row in rows.read(tmp_path / "train_on_gpu.csv")}
    assert (found["quiet"]["status"], found["cuda_graph"]["status"]) == ("ok", "left out")
    assert "needs a GPU" in found["cuda_graph"]["details"]


@pytest.mark.extended
def test_one_process_is_wrapped_as_several_are(tmp_path: Path) -> None:
    options = ["--dry-run", "--output", str(tmp_path), "--minutes", "5"]
    assert train_on_gpu.main([*options, "--only", "nccl", "fsdp2"]) == 0
    found = {row["step"]: row for row in rows.read(tmp_path / "train_on_gpu.csv")}
    assert found["nccl"]["details"].startswith("DistributedDataParallel by cpu:gloo")
    assert found["fsdp2"]["details"].startswith("FSDPModule by cpu:gloo")
    # In float32 an exchange with nobody changes nothing.
    for name in ("nccl", "fsdp2"):
        assert found[name]["status"] == "ok"
        assert found[name]["details"].endswith("weights in the end: the same to the bit")


@pytest.mark.slow
@pytest.mark.extended
def test_a_budget_is_calibrated_and_kept_to(tmp_path: Path) -> None:
    options = ["--dry-run", "--output", str(tmp_path), "--minutes", "5"]
    assert train_on_gpu.main([*options, "--only", "calibrated_run"]) == 0
    found = {row["step"]: row for row in rows.read(tmp_path / "train_on_gpu.csv")}
    assert list(found) == ["corpus", "calibrate", "calibrated_run"]
    assert "frame budget" in found["calibrate"]["details"]
    assert found["calibrated_run"]["details"].endswith("% of what was predicted")


@pytest.fixture
def context(tmp_path: Path) -> Context:
    work = tmp_path / "work"
    work.mkdir()
    size = replace(settings.DRY, utterances=8)
    return Context(tmp_path, work, size, dry=True, step="one", limit_s=60.0)


def test_what_rests_on_a_step_that_failed_is_left_out(context: Context) -> None:
    with pytest.raises(LeftOut, match="the step `corpus` has failed"):
        steps.train(context)
    with pytest.raises(LeftOut, match="the step `train`"):
        steps.kill_and_resume(context)
    with pytest.raises(LeftOut, match="the step `quiet`"):
        steps.compile_model(context)
    with pytest.raises(LeftOut, match="the step `calibrate` has failed"):
        steps.calibrated_run(context)


def test_a_step_that_fails_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(context: Context) -> str:
        ended = context.call([sys.executable, "-c", "raise ValueError('no room')"], 30)
        raise Failed(ended.reason)

    def breaks(context: Context) -> str:
        raise OSError("disk\n full")

    chosen = [("train", fails), ("quiet", breaks), ("nccl", lambda context: "well")]
    made = tuple(steps.RunStep(name, do, 9, 1) for name, do in chosen)
    monkeypatch.setattr(steps, "STEPS", made)
    assert train_on_gpu.main(["--dry-run", "--output", str(tmp_path)]) == 1
    found = [(row["status"], row["details"]) for row in rows.read(tmp_path / "train_on_gpu.csv")]
    assert found == [
        ("failed", "exit code 1: ValueError: no room"),
        ("failed", "OSError: disk full"),
        ("ok", "well"),
    ]
    assert "Traceback" in (tmp_path / "logs" / "train_on_gpu_train.log").read_text()
    assert capsys.readouterr().out.endswith("1 ok, 0 left out, 2 failed\n")


def test_what_there_is_no_time_for_is_left_out_and_limits_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []

    def slow(context: Context) -> str:
        limits.append(context.limit_s)
        time.sleep(2)
        return "done"

    made = tuple(
        steps.RunStep(name, slow, 900, least) for name, least in (("train", 2), ("nccl", 5))
    )
    monkeypatch.setattr(steps, "STEPS", made)
    assert train_on_gpu.main(["--dry-run", "--output", str(tmp_path), "--minutes", "0.1"]) == 0
    found = [(row["step"], row["status"]) for row in rows.read(tmp_path / "train_on_gpu.csv")]
    assert found == [("train", "ok"), ("nccl", "left out")]
    assert limits == [pytest.approx(4, abs=0.5)]


def _metrics(run: Path, losses: list[float]) -> None:
    run.mkdir(parents=True, exist_ok=True)
    shared = {"step_s": 0.1, "data_wait_s": 0.0, "audio_seconds": 1.0, "peak_memory_bytes": 5}
    lines = [
        json.dumps({"step": n, "loss": loss, "oom_splits": 0} | shared) for n, loss in
        enumerate(losses, 1)
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_runs_are_judged(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    context.corpus = corpus.tones(context.work / "corpus", 8)
    count = context.size.quiet_steps
    _metrics(context.runs / "quiet", [5.0] * count)
    _metrics(context.runs / "compile", [5.2] * count)
    monkeypatch.setattr(Context, "train", lambda self, name, *_, **__: self.runs / name)
    with pytest.raises(Failed, match=r"losses of the first steps are 4\.00%"):
        steps.compile_model(context)
    _metrics(context.runs / "compile", [5.0, float("nan")] + [5.0] * (count - 2))
    with pytest.raises(Failed, match="a loss is not finite"):
        steps.compile_model(context)
    _metrics(context.runs / "compile", [5.0] * (count - 1))
    with pytest.raises(Failed, match=f"must have steps 1 to {count}"):
        steps.compile_model(context)
    _metrics(context.runs / "straight", [5.0] * context.size.steps)
    with pytest.raises(Failed, match="the loss did not fall"):
        steps.train(context)
    context.calibration = {
        **{"frame_budget": 9, "token_budget": 9, "max_sequences": 9},
        **{"predicted_bytes": 4, "target_bytes": 4},
    }
    _metrics(context.runs / "calibrated", [5.0] * context.size.calibrated_steps)
    assert steps.calibrated_run(context).endswith("+25.0 % of what was predicted")
    on_gpu = replace(context, dry=False)
    with pytest.raises(Failed, match=r"more than the 0\.000 GB that were given"):
        steps.calibrated_run(on_gpu)


def test_each_step_changes_the_quiet_run_on_a_gpu_in_one_way(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrappers = {"ddp": "DistributedDataParallel", "fsdp2": "FSDPModule"}
    configs: dict[str, TrainConfig] = {}

    def train(
        self: Context, name: str, *overrides: str, quiet: bool, wrapped: bool = False
    ) -> Path:
        configs[name] = configuration.load(TrainConfig, self.recipe(quiet=quiet), overrides)
        _metrics(self.runs / name, [5.0] * self.size.quiet_steps)
        if wrapped:
            log = self.output / "logs" / f"train_on_gpu_{self.step}.log"
            log.parent.mkdir(exist_ok=True)
            log.write_text(f"one_process: {wrappers[name]} by nccl\n")
        return self.runs / name

    monkeypatch.setattr(Context, "train", train)
    monkeypatch.setattr(compare, "differing", lambda *_: [])
    context = replace(context, dry=False, corpus=corpus.tones(context.work / "corpus", 8))
    for do in (steps.quiet, steps.cuda_graph, steps.compile_model, steps.one_process, steps.fsdp2):
        do(context)
    gpu = DistributedContext(0, 1, torch.device("cuda", 0))
    assert [name for name in configs if uses_graph(configs[name], gpu.device)] == ["graph"]
    assert [name for name in configs if configs[name].training.compile] == ["compile"]
    # Copies of shards cannot be made.
    uncopied = [name for name in configs if not has_weight_copies(configs[name], gpu)]
    assert uncopied == ["fsdp2"]
    strategies = {name: config.training.strategy for name, config in configs.items()}
    assert strategies == dict.fromkeys(configs, "ddp") | {"fsdp2": "fsdp2"}


def test_no_time_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    # That of a known GPU: without one, some fields are empty.
    monkeypatch.setattr(training_metrics, "peak_flops", lambda device: 1e12)

    def line(seconds: float) -> dict[str, object]:
        found = TrainingMetrics(torch.device("cpu"))
        kinds = ("useful_flops", "computed_flops", "hardware_flops")
        found._sums = {"steps": 1.0} | dict.fromkeys(kinds, 3e11)
        found.time(seconds, seconds / 2)
        return found.line(1, 0)

    quick, slow = line(0.5), line(1.0)
    timed = {name for name in quick if quick[name] != slow[name]}
    assert {"step_s", "mfu", "mfu_with_padding", "hfu"} <= timed <= compare.MEASURED


def test_a_run_that_ends_before_it_is_killed_is_told(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    context.corpus = corpus.tones(context.work / "corpus", 8)
    last = context.runs / "straight" / "checkpoints" / f"step_{context.size.steps:08d}"
    last.mkdir(parents=True)
    monkeypatch.setattr(steps, "_TRAIN", [sys.executable, "-c", "print('too early')"])
    with pytest.raises(Failed, match="was to be killed after step 18: exit code 0: too early"):
        steps.kill_and_resume(context)


def test_tones_are_the_same_every_time(tmp_path: Path) -> None:
    made = corpus.tones(tmp_path / "a", 8)
    again = corpus.tones(tmp_path / "b", 8)
    # Over what an earlier one has left.
    corpus.tones(tmp_path / "b", 5)
    again = corpus.tones(tmp_path / "b", 8)
    files = sorted(path.relative_to(made.folder) for path in made.folder.rglob("*.wav"))
    assert len(files) == 8 + 2
    for file in (*files, "train.jsonl", "dev.jsonl"):
        assert (made.folder / file).read_bytes() == (again.folder / file).read_bytes()
    (line, *_) = map(json.loads, made.train.read_text().splitlines())
    audio, rate = soundfile.read(made.folder / line["audio_filepath"])
    assert (rate, len(audio) / rate) == (16_000, line["duration"])
    assert 0.05 < np.abs(audio).max() < 1
    (tmp_path / "b" / "thesis.txt").touch()
    with pytest.raises(ValueError, match=r"must be new, empty or an earlier corpus.*thesis\.txt"):
        corpus.tones(tmp_path / "b", 8)
    assert (tmp_path / "b" / "train.jsonl").exists()


def test_a_prepared_corpus_travels_and_is_as_long_as_it_must_be(tmp_path: Path) -> None:
    pytest.importorskip("espeakng_loader")
    prepared = corpus.prepare(tmp_path / "speech", 8)
    assert {path.suffix for path in (tmp_path / "speech" / "audio").iterdir()} == {".flac"}
    size = sum(path.stat().st_size for path in prepared.folder.rglob("*") if path.is_file())
    assert size < 2_000_000
    found = corpus.find_or_make(prepared.folder, tmp_path / "used", utterances=20)
    assert (found.kind, found.utterances) == ("speech", 20)
    names = [json.loads(line)["id"] for line in found.train.read_text().splitlines()]
    assert len(set(names)) == 20
    assert all((found.folder / name).exists() for name in ("dev.jsonl", "tokenizer", "audio"))
    absent = corpus.find_or_make(tmp_path / "nothing", tmp_path / "used", utterances=6)
    assert (absent.kind, absent.utterances) == ("tones", 6)


@pytest.mark.extended
def test_wheels_are_all_that_training_imports(tmp_path: Path) -> None:
    made = corpus.tones(tmp_path / "corpus", 8)
    config = settings.train_config(settings.DRY, made, tmp_path / "runs", device="cpu")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(configuration.dump(config))
    code = f"""
import importlib.metadata, json, sys
from effasr.cli.main import main
assert main(["train", {str(recipe)!r}, "training.max_steps=2", "data.workers=0"]) == 0
owners = importlib.metadata.packages_distributions()
tops = {{name.split(".")[0] for name in sys.modules}}
print("imported", json.dumps(sorted({{one for top in tops for one in owners.get(top, [])}})))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("imported "))
    plain = lambda name: name.lower().replace("_", "-")
    listed = {plain(wheel.name) for wheel in wheels.WHEELS if wheel.purpose == "train"}
    imported = {plain(name) for name in json.loads(line.removeprefix("imported "))}
    assert imported <= listed | set(map(plain, wheels.BARE))
    assert {"lhotse", "sentencepiece", "soundfile", "jiwer"} <= imported
    assert wheels.missing("train") == []
    shown = wheels.text().splitlines()
    assert {wheel.name for wheel in wheels.WHEELS} == {x for x in shown if not x.startswith("#")}


def test_what_is_not_installed_is_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more = (*wheels.WHEELS, wheels.Wheel("no-such-wheel", "no_such_module", "train"))
    monkeypatch.setattr(wheels, "WHEELS", more)
    assert train_on_gpu.main(["--dry-run", "--output", str(tmp_path)]) == 2
    assert "not installed: no-such-wheel; see --list-wheels" in capsys.readouterr().err
    assert train_on_gpu.main(["--list-wheels"]) == 0
    assert "no-such-wheel" in capsys.readouterr().out


_PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
child.wait()
"""


def _is_alive(process: str) -> bool:
    path = Path(f"/proc/{process}/stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"


def test_nothing_outlives_its_limit() -> None:
    began = time.monotonic()
    ended = processes.run([sys.executable, "-c", _PARENT], seconds=3.0)
    assert ended.code is None
    assert time.monotonic() - began < 30
    assert not _is_alive(ended.lines[0])


def test_nothing_outlives_a_request_to_end() -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "profiling")!r})
from bench import processes
with processes.sigterm_as_exit():
    say = lambda line: print(line, end="", flush=True)
    processes.run([sys.executable, "-c", {_PARENT!r}], echo=say)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        child = process.stdout.readline().strip()
        assert _is_alive(child)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
        assert not _is_alive(child)
