"""The GPU suite on a machine without a GPU: which parts a call has, and all of it at tiny size."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import tarfile
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import bench_ops
import gpu_suite
import pytest
from suite import calls, operations, parts
from suite.gate import ANSWERING, GROUPS, INFERENCE, LOADER, OPERATIONS, TRAINING, Gate, Group
from suite.parts import Part, Setting
from suite.steps import LeftOut, Step

from effasr_kernels.runtime import native

GREEN = Gate({name: Group(passed=3) for name in GROUPS})
LIMIT_S = 60 * gpu_suite.MINUTES


def of_call(call: int) -> list[Part]:
    return [part for part in calls.PARTS if call in part.calls]


def planned(name: str, setting: Setting, gate: Gate = GREEN) -> dict[str, Step | LeftOut]:
    (part,) = [part for part in calls.PARTS if part.name == name]
    return {step.name: step for step in part.steps(setting, gate)}


def command(name: str, setting: Setting, gate: Gate = GREEN, step: str = "") -> list[str]:
    found = planned(name, setting, gate)[step or name]
    assert isinstance(found, Step)
    return list(found.command)


def dry_run(call: int, output: Path, *options: str) -> tuple[str, str, set[str]]:
    """What it printed, its summary, and the names in its archive."""
    run = [sys.executable, str(Path(gpu_suite.__file__)), "--dry-run", "--call", str(call)]
    done = subprocess.run(
        [*run, "--output", str(output), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = (output / "summary.md").read_text()
    assert "dry run: no figure below is one of a GPU" in summary
    assert " failed " not in summary
    assert " met" not in summary
    assert "missed" not in summary
    with tarfile.open(output / f"gpu_suite_call{call}.tar.gz") as packed:
        return done.stdout, summary, set(packed.getnames())


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows
    assert all(row["device"].startswith("cpu ") for row in rows)
    return rows


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_dry_run_tests_every_operation(name: str) -> None:
    source = (parts.TESTS / "ops" / f"test_{name}.py").read_text()
    # Of the contract, one check runs on one list of lengths.
    of_contract = re.findall(r"def test_\w+\(\s*check: ", source)
    words = [word for word in re.split(" or ", parts.REFERENCES) if " and " not in word]
    assert of_contract or any(re.search(rf"def test_\w*{word}", source) for word in words)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.extended
def test_a_dry_run_of_the_first_call(tmp_path: Path) -> None:
    shown, _, packed = dry_run(1, tmp_path)
    assert "call 1, 1800 s; a part has at least, and about:" in shown
    rows = rows_of(tmp_path / "ops.csv")
    assert {row["op"] for row in rows} == set(OPERATIONS)
    backends = {"triton", "reference", "peer: torch eager"}
    # The suite builds no CPU kernels, but measures those that are installed.
    backends |= {"cpp"} if native.unsupported_reason() is None else set()
    assert backends <= {row["backend"] for row in rows}
    assert {row["kernel"] for row in rows_of(tmp_path / "attention_tiles.csv")} == {
        *("backward_kv", "backward_q"),
    }
    kept = json.loads((tmp_path / "tests.json").read_text())
    assert kept["groups"]["linear_cross_entropy"]["passed"] > 1
    names = {
        "ops.csv",
        "attention_tiles.csv",
        "tests.json",
        "tests.jsonl",
        "logs/tests_of_kernels.log",
    }
    assert names <= packed


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.extended
def test_a_dry_run_of_the_second_call(tmp_path: Path) -> None:
    # The real run takes minutes, and has a test of its own.
    _, summary, packed = dry_run(2, tmp_path, "--skip", "train")
    modes = {(row["system"], row["mode"]) for row in rows_of(tmp_path / "training.csv")}
    assert modes == {("packed_static", "eager"), ("random", "eager"), ("packed", "eager")}
    for name in ("training_categories", "inference", "memory"):
        rows_of(tmp_path / f"{name}.csv")
    assert "<html" in (tmp_path / "report" / "report.html").read_text()
    assert {"training.csv", "training_categories.csv", "report/report.html"} <= packed
    left_out = [line for line in summary.splitlines() if "left out" in line]
    names = ["training compile", "training peer", "inference peer", "conversations"]
    assert sorted(line.split("|")[1].strip() for line in left_out) == sorted(names)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.extended
def test_a_dry_run_of_one_part(tmp_path: Path) -> None:
    """All parts of the three calls take minutes."""
    skipped = ("--skip", "warm up", "wide heads", "ncu", "sanitizer")
    _, summary, packed = dry_run(3, tmp_path, *skipped)
    assert "large 4x" in {row["kind"] for row in rows_of(tmp_path / "ops.csv")}
    assert re.search(r"^\| transducer_loss +\| \d+ passed \|$", summary, re.MULTILINE)
    assert {"ops.csv", "tests.json", "transducer_memory.csv"} <= packed


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.extended
def test_a_dry_run_of_the_third_call(tmp_path: Path) -> None:
    _, _, packed = dry_run(3, tmp_path)
    kinds = {(row["op"], row["kind"]) for row in rows_of(tmp_path / "ops.csv")}
    assert {("transducer_loss", "large 4x"), ("attention", "relative")} <= kinds
    assert "transducer_memory.csv" in packed


@pytest.mark.parametrize("call", calls.CALLS)
def test_the_floors_of_a_call_fit_into_its_time(call: int) -> None:
    found = of_call(call)
    assert [part.name for part in found[:3]] == ["environment", "tests", "warm up"]
    assert sum(part.calls[call][0] for part in found) <= LIMIT_S
    # A cold import and the start of CUDA take long.
    assert found[0].calls[call][0] >= 120
    # The tests of a later call are what an earlier one has left.
    assert all(part.calls[call][0] > 0 for part in found)


def test_what_decides_most_comes_first(tmp_path: Path) -> None:
    assert [part.name for part in of_call(1)[3:]] == ["ops"]
    first = [*planned("ops", Setting(tmp_path))][:3]
    assert first == ["attention tiles", "ops attention", "ops linear_cross_entropy"]
    second = [part.name for part in of_call(2)[3:]]
    speeds = ["training", "peers", "inference", "conversations"]
    assert second == [*speeds, "memory", "train", "profile"]
    # The tools slow everything down, and show what is wrong behind a GPU in disorder.
    third = [part.name for part in of_call(3)[3:]]
    assert third == ["transducer", "wide heads", "ncu", "sanitizer"]


def test_a_call_rests_on_what_its_parts_use() -> None:
    def wanted(call: int) -> set[str]:
        options = gpu_suite._parser().parse_args(["--call", str(call)])
        found = gpu_suite.chosen(options)
        return set(gpu_suite.setting_of(options, Path(), found).wanted)

    assert wanted(1) == set(GROUPS)
    assert wanted(2) == {*TRAINING, *INFERENCE, *ANSWERING, LOADER}
    assert wanted(3) == {
        *("attention", "depthwise_conv", "linear_cross_entropy", "transducer_loss"),
    }


def test_rows_of_a_dry_run_are_kept_apart(capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (gpu_suite.RESULTS, gpu_suite.RESULTS / "more"):
        assert gpu_suite.main(["--dry-run", "--output", str(folder)]) == 2
        assert "must not be profiling/results" in capsys.readouterr().err
    assert not (gpu_suite.RESULTS / "more").exists()


def test_wrong_arguments_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_suite.main(["--minutes", "0", "--output", str(tmp_path)]) == 2
    assert "`--minutes` must be positive, but is 0" in capsys.readouterr().err
    missing = str(tmp_path / "none.tar.gz")
    assert gpu_suite.main(["--continue-from", missing, "--output", str(tmp_path)]) == 2
    assert "`--continue-from` must name the archive of an earlier call" in capsys.readouterr().err


def test_without_a_gpu_nothing_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert gpu_suite.main(["--output", str(tmp_path / "new"), "--call", "2"]) == 2
    shown = capsys.readouterr().out
    assert "environment                  failed" in shown
    assert "    environment: needs an NVIDIA GPU, and torch sees none.\n" in shown
    assert not list((tmp_path / "new").glob("*.csv"))
    # The reason comes back, too.
    assert (tmp_path / "new" / "gpu_suite_call2.tar.gz").exists()


def test_all_of_it_on_a_gpu(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    kinds = ["--kind", "large 8x", "large 4x"]
    assert [x for x in command("transducer", setting) if x in kinds] == kinds
    assert "--no-peers" in command("transducer", setting)
    assert "--no-peers" not in command("transducer", setting, step="transducer peers")
    matrix = command("training", setting)
    assert "--categories" in matrix
    assert matrix[matrix.index("--frame-budget") + 1] == "8448"
    at = matrix.index("--model")
    assert matrix[at + 1 : at + 3] == ["canary_1b_flash", "canary_180m_flash"]
    at = matrix.index("--modes")
    assert matrix[at + 1 : at + 5] == ["eager", "graph", "compile", "graph_compile"]
    assert "transformers" in command("peers", setting, step="training peer")
    assert "--peer" in command("inference", setting, step="inference peer")
    recorded = command("profile", setting)
    report = command("profile", setting, step="report")
    assert report[2].startswith(recorded[recorded.index("--profile") + 1])
    real = planned("train", setting)["train"]
    assert isinstance(real, Step)
    assert real.budget == "--minutes"


def test_a_real_run_is_left_out_where_its_packages_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def version(name: str) -> str:
        if name == "lhotse":
            raise PackageNotFoundError(name)
        return "9"

    monkeypatch.setattr(parts, "version", version)
    (only,) = planned("train", Setting(tmp_path), Gate()).values()
    # No failure, though the tests of the loader cannot have passed.
    assert only == LeftOut("train", "needs lhotse, which is not installed")


def test_each_operation_has_a_process_of_its_own(tmp_path: Path) -> None:
    found = planned("ops", Setting(tmp_path))
    for name in OPERATIONS:
        step = found[f"ops {name}"]
        assert isinstance(step, Step)
        at = list(step.command).index("--op")
        assert [x for x in step.command[at + 1 :] if x in OPERATIONS] == [name]


def test_each_kind_of_transducer_is_measured_in_one_of_the_calls(tmp_path: Path) -> None:
    options = bench_ops.parse(["--op", "transducer_loss", "--frames", "40", "--device", "cpu"])
    kinds = {case.kind for _, case in bench_ops.cases(options)}
    found: list[str] = []
    for part, step in (("ops", "ops transducer_loss"), ("transducer", "transducer")):
        words = command(part, Setting(tmp_path), step=step)
        following = words[words.index("--kind") + 1 :]
        found += [x for x in following if x in kinds]
    assert sorted(found) == sorted(kinds)


def test_what_a_call_measures_is_compiled_ahead(tmp_path: Path) -> None:
    found = planned("warm up", Setting(tmp_path))
    (step,) = (x for name, x in found.items() if name == "warm up")
    assert isinstance(step, Step)
    assert set(OPERATIONS) <= set(step.command)
    trains = planned("warm up", Setting(tmp_path, wanted=TRAINING, trains=True))
    assert [x.beside for x in trains.values() if isinstance(x, Step)] == [True, True, False]
    assert {"canary_1b_flash", "canary_180m_flash"} <= set(
        command("warm up", Setting(tmp_path, wanted=TRAINING, trains=True))
    )
    red = Gate()
    assert isinstance(planned("warm up", Setting(tmp_path), red)["warm up"], LeftOut)


@pytest.mark.parametrize("name", ["compute-sanitizer", "ncu"])
def test_tools_are_used_where_they_are(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    part = "sanitizer" if name == "compute-sanitizer" else name
    monkeypatch.setattr(operations, "find_tool", lambda name: None)
    (absent,) = planned(part, Setting(tmp_path)).values()
    assert isinstance(absent, LeftOut)
    monkeypatch.undo()
    tool = tmp_path / "bin" / name
    tool.parent.mkdir()
    tool.touch(mode=0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    found = planned(part, Setting(tmp_path))
    for step in found.values():
        assert isinstance(step, Step)
        assert step.command[0] == str(tool)
    if part == "ncu":
        assert len(found) == 5
        for step in found.values():
            # Clocks are left as they are.
            assert list(step.command[1:3]) == ["--clock-control", "none"]
    else:
        (only,) = found.values()
        assert str(parts.KERNELS) in only.command
        assert only.variables == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def test_the_kernels_whose_counters_are_read_exist() -> None:
    for op, _, kernel in operations.MATTER:
        folder = parts.ROOT / "kernels" / "effasr_kernels"
        sources = [*(folder / "shared").glob("*.py"), *(folder / op).rglob("*.py")]
        text = "\n".join(path.read_text() for path in sources)
        assert re.search(
            rf"@triton\.jit(?:\([^)]*\))?[^\n]*(?:\n@[^\n]*)*\ndef {kernel}\(", text
        ), kernel


@pytest.mark.extended
def test_every_operation_is_checked_by_the_sanitizer() -> None:
    (step,) = operations.sanitizer(Setting(Path(), dry=True), GREEN)
    done = subprocess.run(step.command, capture_output=True, text=True, check=False)  # type: ignore[union-attr]
    files = {line.split("::")[0] for line in done.stdout.splitlines() if "::" in line}
    checked = {name for file in files for name in parts.groups_of(file)}
    assert set(OPERATIONS) <= checked


def test_parts_by_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen: list[list[str]] = []

    class Recorder:
        def __init__(
            self, setting: Setting, some: list[Part], minutes: float, **options: object
        ) -> None:
            chosen.append([part.name for part in some])
            self.minutes = minutes

        def run(self) -> int:
            chosen[-1].append(f"{self.minutes:g}")
            return 0

    monkeypatch.setattr(gpu_suite, "Suite", Recorder)
    output = ["--output", str(tmp_path)]
    assert gpu_suite.main([*output, "--only", "ops", "tests"]) == 0
    assert gpu_suite.main([*output, "--skip", "sanitizer"]) == 0
    assert gpu_suite.main([*output, "--call", "3", "--skip", "ncu", "sanitizer"]) == 0
    names = [part.name for part in calls.PARTS]
    assert chosen[0] == ["environment", "tests", "ops", "27"]
    assert chosen[1] == [*(name for name in names if name != "sanitizer"), "27"]
    assert chosen[2] == ["environment", "tests", "warm up", "transducer", "wide heads", "9"]


def test_make_gpu_uses_what_is_installed() -> None:
    done = subprocess.run(
        [
            "make",
            "--no-print-directory",
            "--dry-run",
            "--always-make",
            "gpu",
            "PYTHON=some_python",
            "CALL=2",
        ],
        cwd=parts.ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n") == ["some_python profiling/gpu_suite.py --call 2", ""]


def test_the_rehearsal_has_the_versions_of_a_gpu_machine(tmp_path: Path) -> None:
    script = parts.PROFILING / "suite" / "make_environment.sh"
    text = script.read_text()
    for wanted in ("torch==2.11.0", "triton==3.6.0", "numpy==2.5.*", "transformers==5.17.0"):
        assert wanted in text
    installed = text[text.index("-m pip install") : text.index("# What is not there")]
    for name in ("lhotse", "soundfile", "soxr", "jiwer", "nvtx", "http"):
        assert name not in installed
    done = subprocess.run([script], capture_output=True, text=True, check=False)
    assert (done.returncode, "usage: " in done.stderr) == (2, True)
