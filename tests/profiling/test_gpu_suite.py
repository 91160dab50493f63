"""The GPU suite on a machine without a GPU: what runs when, and all of it at tiny size."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import gpu_suite
import pytest
from suite import parts, steps
from suite.gate import CANARY, EXTENSION, MODEL, OPERATIONS, Gate, Group, groups_of
from suite.parts import Part, Setting
from suite.steps import LeftOut, Result, Step

GREEN = Gate({name: Group(passed=3) for name in (*OPERATIONS, MODEL)})


def without(name: str) -> Gate:
    """All tests are green but those of one operation."""
    return Gate(GREEN.groups | {name: Group(passed=2, failed=["tests/gpu/test_x.py::test_y"])})


def planned(name: str, setting: Setting, gate: Gate = GREEN) -> dict[str, Step | LeftOut]:
    (part,) = [part for part in parts.PARTS if part.name == name]
    return {step.name: step for step in part.steps(setting, gate)}


def command(name: str, setting: Setting, gate: Gate = GREEN, step: str = "") -> list[str]:
    found = planned(name, setting, gate)[step or name]
    assert isinstance(found, Step)
    return list(found.command)


@pytest.mark.slow
def test_a_dry_run_does_all_of_it(tmp_path: Path) -> None:
    run = [sys.executable, str(Path(gpu_suite.__file__)), "--dry-run", "--output", str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("ops", "training", "inference", "memory", "transducer_memory"):
        with (tmp_path / f"{name}.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert rows
        assert all(row["device"].startswith("cpu ") for row in rows)
        if name == "ops":
            assert {row["op"] for row in rows} == set(OPERATIONS)
            assert {"triton", "reference", "peer: torch eager"} <= {row["backend"] for row in rows}
    assert "<html" in (tmp_path / "report" / "report.html").read_text()
    summary = (tmp_path / "summary.md").read_text()
    assert "dry run: no figure below is one of a GPU" in summary
    assert " failed " not in summary
    assert " met" not in summary
    assert "missed" not in summary
    left_out = [line for line in summary.splitlines() if "left out" in line]
    assert len(left_out) == 3
    kept = json.loads((tmp_path / "tests.json").read_text())
    assert kept["groups"]["linear_cross_entropy"]["passed"] > 1


def test_rows_of_a_dry_run_are_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_suite, "RESULTS", gpu_suite.ROOT / "profiling" / "results")
    for folder in (gpu_suite.RESULTS, gpu_suite.RESULTS / "more"):
        assert gpu_suite.main(["--dry-run", "--output", str(folder)]) == 2
        assert "must not be profiling/results" in capsys.readouterr().err
    assert not (gpu_suite.RESULTS / "more").exists()
    assert gpu_suite.main(["--minutes", "0"]) == 2
    assert "`--minutes` must be positive, but is 0" in capsys.readouterr().err


def test_without_a_gpu_nothing_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_suite.main(["--output", str(tmp_path / "new")]) == 2
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("environment              failed")
    assert shown[-1] == "    environment: needs an NVIDIA GPU, and torch sees none."
    assert not list((tmp_path / "new").glob("*.csv"))


@pytest.mark.parametrize(
    ("test", "groups"),
    [
        ("tests/gpu/test_attention_relative.py::test_a[float32]", ("attention",)),
        ("tests/gpu/test_transducer_cuda.py::test_a", ("transducer_loss",)),
        ("tests/ops/test_ctc_loss.py", ("ctc_loss",)),
        ("tests/gpu/test_launch.py::test_a", OPERATIONS),
        ("tests/gpu/test_training.py::test_a", (MODEL,)),
        ("tests/model/test_on_gpu.py::test_a", (MODEL,)),
        ("tests/csrc/test_extension.py::test_a", (EXTENSION,)),
    ],
)
def test_what_a_test_proves(test: str, groups: tuple[str, ...]) -> None:
    assert groups_of(test) == groups


def test_every_operation_has_tests_on_a_gpu() -> None:
    for name in OPERATIONS:
        tests = [path for path in parts.KERNELS.glob("test_*.py") if _proves(path) == (name,)]
        assert tests, name


def _proves(path: Path) -> tuple[str, ...]:
    return groups_of(str(path))


def write_outcomes(path: Path, collected: list[str], outcomes: dict[str, str]) -> Path:
    lines = [{"collected": collected}]
    lines += [{"test": test, "outcome": outcome} for test, outcome in outcomes.items()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_only_what_is_green_is_proven(tmp_path: Path) -> None:
    names = [f"tests/gpu/test_{name}.py::test_a" for name in ("ctc_loss", "attention", "guided")]
    outcomes = {names[0]: "failed", names[1]: "passed", "tests/gpu/test_depthwise.py": "failed"}
    path = write_outcomes(tmp_path / "a.jsonl", names, outcomes)
    gate = Gate.read([path, tmp_path / "missing.jsonl"])
    assert gate.reasons(["attention"]) == {}
    wrong = gate.reasons(OPERATIONS)
    assert wrong["ctc_loss"] == f"1 of its tests failed, such as {names[0]}"
    assert wrong["guided_attention"] == "1 of its tests were not reached"
    # A file that could not even be imported.
    assert wrong["depthwise_conv"].startswith("1 of its tests failed")
    assert wrong["transducer_loss"] == "none of its tests has run: run the part tests"


def test_what_was_proven_counts_for_the_same_sources_alone(tmp_path: Path) -> None:
    key = {"fingerprint": "a", "device": "H200"}
    GREEN.save(tmp_path / "tests.json", key)
    assert Gate.load(tmp_path / "tests.json", key).reasons(CANARY) == {}
    assert set(Gate.load(tmp_path / "tests.json", key | {"fingerprint": "b"}).reasons(CANARY)) == {
        *CANARY
    }
    assert Gate.load(tmp_path / "none.json", key).reasons([MODEL])


@pytest.mark.parametrize("options", [[], ["-n", "2"]])
def test_outcomes_are_written_as_they_come(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "test_ctc_loss.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 0\n"
        "@pytest.fixture\ndef broken(): raise ValueError\n"
        "def test_error(broken): pass\n"
        "@pytest.mark.skip\ndef test_skipped(): pass\n"
        "def test_left_out(): pass\n"
    )
    (tmp_path / "test_broken.py").write_text("import nothing_of_this_name\n")
    record = ["-p", "suite.outcomes", "--outcomes", tmp_path / "out.jsonl", "-k", "not left_out"]
    more = ["--continue-on-collection-errors", "--rootdir", tmp_path, *options, tmp_path]
    run = parts.pytest(*record, *more)
    base = gpu_suite.base_environment(dry=True)
    done = subprocess.run(run, env=base, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    found = {line["test"].split("::")[-1]: line["outcome"] for line in lines if "test" in line}
    assert found.pop("test_broken.py") == "failed"
    assert found == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_error": "failed",
        "test_skipped": "skipped",
    }
    (collected,) = [line["collected"] for line in lines if "collected" in line]
    assert sorted(name.split("::")[-1] for name in collected) == sorted(found)


def test_operations_without_green_tests_are_not_measured(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    found = planned("ops", setting, without("attention"))
    measured = command("ops", setting, without("attention"), "ops")
    assert "attention" not in measured
    assert set(OPERATIONS) - {"attention"} <= set(measured)
    assert str(tmp_path / "ops.csv") in measured
    left_out = found["ops attention"]
    assert isinstance(left_out, LeftOut)
    assert left_out.reason.startswith("not measured: 1 of its tests failed, such as tests/gpu")
    # What rests on it is not measured either; what does not, is.
    for name in ("training", "inference", "memory", "profile"):
        assert [type(x) for x in planned(name, setting, without("attention")).values()] == [LeftOut]
    assert all(
        isinstance(x, Step) for x in planned("transducer", setting, without("attention")).values()
    )
    assert not any(isinstance(x, Step) for x in planned("ops", setting, Gate()).values())


def test_what_is_not_proven_is_measured_elsewhere_on_request(tmp_path: Path) -> None:
    setting = Setting(tmp_path, unproven=True)
    aside = command("ops", setting, without("attention"), "ops unproven")
    assert aside[-2:] == ["--op", "attention"]
    assert str(tmp_path / "unproven" / "ops.csv") in aside
    assert str(tmp_path / "unproven" / "training.csv") in command(
        "training", setting, without("attention")
    )
    assert str(tmp_path / "training.csv") in command("training", setting)


def test_all_of_it_on_a_gpu(tmp_path: Path) -> None:
    setting = Setting(tmp_path)
    kinds = ["--kind", "large 8x", "large 4x"]
    assert [x for x in command("transducer", setting) if x in kinds] == kinds
    assert "--no-peers" in command("transducer", setting)
    assert "--no-peers" not in command("transducer", setting, step="transducer peers")
    assert "--graph" in command("training", setting, step="training graph")
    assert "transformers" in command("training", setting, step="training peer")
    assert "--peer" in command("inference", setting, step="inference peer")
    recorded = command("profile", setting)
    report = command("profile", setting, step="report")
    assert report[2].startswith(recorded[recorded.index("--profile") + 1])


def test_tests_of_the_data_need_its_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found, left_out = parts.gpu_tests()
    # The slowest, a build, begins first.
    assert found[-1] == parts.KERNELS
    assert parts.TESTS / "model" / "test_on_gpu.py" in found
    assert not any(path.parent == parts.KERNELS for path in found)
    assert not left_out
    for name in ("data/test_a.py", "nn/test_b.py", "nn/test_c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if "c" in name else f"pytest.{'mark'}.gpu")
    monkeypatch.setattr(parts, "TESTS", tmp_path)
    monkeypatch.setattr(parts, "KERNELS", tmp_path / "gpu")
    every = [tmp_path / "data/test_a.py", tmp_path / "nn/test_b.py", tmp_path / "gpu"]
    assert parts.gpu_tests() == (every, [])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found, left_out = parts.gpu_tests()
    assert found == every[1:]
    assert left_out == [LeftOut("test_a.py", f"needs {', '.join(parts.DATA_PACKAGES)}")]
    assert parts.parallel() == []


def test_tests_run_side_by_side_where_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert parts.parallel() == ["-n", "12", "--dist", "worksteal"]
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert parts.parallel() == ["-n", "1", "--dist", "worksteal"]


def test_the_sanitizer_is_used_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(parts, "find_sanitizer", lambda: None)
    (found,) = planned("sanitizer", Setting(tmp_path)).values()
    assert isinstance(found, LeftOut)
    monkeypatch.undo()
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.touch(mode=0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (found,) = planned("sanitizer", Setting(tmp_path)).values()
    assert isinstance(found, Step)
    assert found.command[0] == str(tool)
    assert str(parts.KERNELS) in found.command
    assert found.variables == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def test_commands_run_from_this_checkout_and_not_interpreted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    found = gpu_suite.base_environment()
    assert "TRITON_INTERPRET" not in found
    root = str(gpu_suite.ROOT)
    expected = [root, f"{root}/kernels", f"{root}/profiling", "elsewhere"]
    assert found["PYTHONPATH"].split(":") == expected
    assert found.get("CUDA_VISIBLE_DEVICES") != "-1"
    assert gpu_suite.base_environment(dry=True)["CUDA_VISIBLE_DEVICES"] == "-1"


def python(code: str, name: str = "step", **fields: object) -> Step:
    return Step(name, [sys.executable, "-c", code], **fields)  # type: ignore[arg-type]


def run(step: Step, seconds: float, folder: Path) -> Result:
    return steps.run(step, seconds, folder, folder, gpu_suite.base_environment())


def test_a_step_that_fails_shows_its_last_words(tmp_path: Path) -> None:
    found = run(python("print('because'); raise SystemExit(3)", "a b"), 20, tmp_path)
    assert (found.status, found.well, found.tail[-1]) == ("failed", False, "because")
    assert found.details == f"exit code 3; {tmp_path / 'a_b.log'}"
    found = run(python("import os; print(os.environ['A'])", variables={"A": "x"}), 20, tmp_path)
    assert (found.status, found.well, list(found.tail)) == ("ok", True, [])
    assert (tmp_path / "step.log").read_text().endswith("\nx\n")


def test_a_step_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "x = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(x.pid, flush=True); time.sleep(600)"
    )
    began = time.monotonic()
    found = run(python(code), 2.0, tmp_path)
    assert time.monotonic() - began < 20
    assert (found.status, found.well) == ("out of time", False)
    child = Path(f"/proc/{found.tail[-1]}/stat")
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_a_command_that_ends_itself_is_told_when(tmp_path: Path) -> None:
    step = python("import sys; print(sys.argv[1:])", is_budgeted=True)
    run(step, 100, tmp_path)
    assert (tmp_path / "step.log").read_text().endswith("['--budget-s', '90']\n")


def fake(name: str, *made: Step | LeftOut, weight: float = 1.0) -> Part:
    return Part(name, weight, "", lambda setting, gate: made)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """The steps that ran, with the seconds each was given; those named ``bad`` fail."""
    found: list[tuple[str, float]] = []

    def run(step: Step, seconds: float, *_: object) -> Result:
        found.append((step.name, seconds))
        bad = step.name == "bad"
        return Result(step.name, "failed" if bad else "ok", well=not bad, tail=["why"] * bad)

    monkeypatch.setattr(gpu_suite, "run", run)
    return found


def test_a_failure_stops_nothing_and_time_is_divided(
    given: list[tuple[str, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = [
        fake("a", Step("bad", []), Step("good", [], weight=3), weight=1),
        fake("b", LeftOut("b", "no such tool"), Step("c", [], needs=["nothing_at_all>=1"])),
        fake("d", Step("last", []), weight=2),
    ]
    suite = gpu_suite.Suite(Setting(tmp_path), some, 4.0)
    assert suite.run() == 1
    assert [name for name, _ in given] == ["bad", "good", "last"]
    # A quarter of 240 s, of that a quarter; then all that was not used.
    assert [round(seconds) for _, seconds in given] == [15, 60, 240]
    assert [result.status for result in suite.results] == ["failed", "ok", *["left out"] * 2, "ok"]
    shown = capsys.readouterr().out
    assert "    why\n" in shown
    assert "needs nothing_at_all>=1, which is not installed" in shown
    assert "| bad " in (tmp_path / "summary.md").read_text()
    assert gpu_suite.Suite(Setting(tmp_path), some[1:], 4.0).run() == 0


def test_what_is_not_installed_has_no_share_of_the_time(
    given: list[tuple[str, float]], tmp_path: Path
) -> None:
    absent = Step("peer", [], weight=3, needs=["nothing_at_all>=1"])
    part = fake("a", Step("first", []), absent, Step("second", []))
    suite = gpu_suite.Suite(Setting(tmp_path), [part], 4.0)
    assert suite.run() == 0
    assert [(name, round(seconds)) for name, seconds in given] == [("first", 120), ("second", 240)]
    assert [result.name for result in suite.results] == ["first", "peer", "second"]


def test_what_is_too_old_is_missing() -> None:
    assert gpu_suite.missing(["pytest>=8.0"]) == ""
    assert gpu_suite.missing(["pytest>=999.1"]).startswith("needs pytest>=999.1, but ")


def test_parts_by_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    chosen: list[list[str]] = []

    class Recorder:
        def __init__(self, setting: Setting, some: list[Part], minutes: float) -> None:
            chosen.append([part.name for part in some])

        def run(self) -> int:
            return 0

    monkeypatch.setattr(gpu_suite, "Suite", Recorder)
    output = ["--output", str(tmp_path)]
    assert gpu_suite.main([*output, "--only", "ops", "tests"]) == 0
    assert gpu_suite.main([*output, "--skip", "sanitizer"]) == 0
    names = [part.name for part in parts.PARTS]
    assert chosen[0] == ["environment", "tests", "ops"]
    assert chosen[1] == [name for name in names if name != "sanitizer"]
