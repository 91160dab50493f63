"""The tests of the GPU suite as they run: outcomes as they come, workers that an error poisons."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from suite import parts, poison
from suite.gate import Gate, outcomes_in
from suite.steps import POISONED, LeftOut, Step
from suite.suite import Suite, base_environment

# What a process knows of its GPU: after the error of a test each later call fails.
STICKY = """
import sys, types
state = types.SimpleNamespace(broken=False)
def synchronize():
    if state.broken:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
cuda = types.SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
sys.modules["torch"] = types.SimpleNamespace(cuda=cuda, state=state)
"""
HEAD = "import sys\nimport pytest\nstate = sys.modules['torch'].state\n"
GOOD = "def test_good_{n}():\n    assert not state.broken, 'poisoned'\n"
BAD = "def test_bad_{n}():\n    state.broken = True\n    assert 0\n"


def found_in(path: Path) -> dict[str, str]:
    _, outcomes = outcomes_in(path)
    return {name.split("::")[-1]: outcome for name, outcome in outcomes.items()}


@pytest.mark.parametrize("options", [[], ["-n", "2"]])
@pytest.mark.representative(options=[["-n", "2"]])
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
    out = tmp_path / "out.jsonl"
    record = ["-p", "suite.outcomes", "--outcomes", out, "-k", "not left_out"]
    more = ["--continue-on-collection-errors", "--rootdir", tmp_path, *options, tmp_path]
    done = pytest_run(tmp_path, *record, *more)
    assert done.returncode == 1, done.stdout + done.stderr
    expected = {
        "test_good": "passed",
        "test_bad": "failed",
        "test_error": "failed",
        "test_skipped": "skipped",
    }
    assert found_in(out) == expected | {"test_broken.py": "failed"}
    collected, _ = outcomes_in(out)
    assert sorted(name.split("::")[-1] for name in collected) == sorted(expected)


def test_what_has_run_is_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_x(): assert 0\ndef test_y(): pass\n")
    out, done = tmp_path / "out.jsonl", tmp_path / "done"
    out.write_text('{"collected": ["test_a.py::test_x", "test_a.py::test_y"]}\n')
    done.write_text('["test_a.py::test_x"]')
    record = ["-p", "suite.outcomes", "--outcomes", out, "--done", done]
    ended = pytest_run(tmp_path, *record, "--rootdir", tmp_path, tmp_path)
    assert ended.returncode == 0, ended.stdout
    assert "1 passed, 1 deselected" in ended.stdout
    assert found_in(out) == {"test_y": "passed"}


def pytest_run(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = parts.pytest(*arguments)
    environment = base_environment(dry=True)
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=False
    )


def poisoned(folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    (folder / "conftest.py").write_text(STICKY)
    out = folder / "out.jsonl"
    record = ["-p", "suite.outcomes", "--outcomes", out, "-p", "suite.poison"]
    record += ["--poisoned", folder / "poisoned", "--rootdir", folder]
    return pytest_run(folder, *record, *options, folder), out


def write_tests(path: Path, bad: set[int], count: int) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(HEAD + "".join((BAD if n in bad else GOOD).format(n=n) for n in range(count)))


@pytest.mark.extended
def test_a_poisoned_worker_is_replaced_and_its_tests_are_run(tmp_path: Path) -> None:
    write_tests(tmp_path / "gpu" / "test_ctc_loss.py", {3, 11}, 24)
    done, out = poisoned(tmp_path, "-n", "2", "--dist", "load", "--max-worker-restart", "200")
    assert done.returncode == 1, done.stdout + done.stderr
    found = found_in(out)
    # Each is run once, and none but those that did it has failed.
    assert len(found) == 24
    assert {n for n, outcome in found.items() if outcome == "failed"} == {
        "test_bad_3",
        "test_bad_11",
    }
    assert "22 passed" in done.stdout
    assert "node down" in done.stdout
    assert (tmp_path / "poisoned").read_text().count("test_ctc_loss.py") == 2
    assert len(Gate.read([out]).groups["ctc_loss"].failed) == 2


@pytest.mark.extended
def test_a_failure_that_poisons_nothing_ends_no_worker(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_x(): assert 0\ndef test_y(): pass\n")
    done, out = poisoned(tmp_path, "-n", "1")
    assert "replacing" not in done.stdout
    assert found_in(out) == {"test_x": "failed", "test_y": "passed"}


@pytest.mark.extended
def test_a_file_that_poisons_again_and_again_is_given_up(tmp_path: Path) -> None:
    write_tests(tmp_path / "gpu" / "test_ctc_loss.py", set(range(9)), 12)
    write_tests(tmp_path / "gpu" / "test_guided_attention.py", set(), 6)
    done, out = poisoned(tmp_path, "-n", "1", "--dist", "load", "--max-worker-restart", "200")
    assert done.returncode == 1
    groups = Gate.read([out]).groups
    ctc = groups["ctc_loss"]
    assert len(ctc.failed) == poison.MOST
    # The others count as not reached, and are no success.
    assert (ctc.passed, ctc.skipped, ctc.unfinished) == (0, 0, 12 - poison.MOST)
    assert (groups["guided_attention"].passed, groups["guided_attention"].unfinished) == (6, 0)


def test_without_xdist_the_suite_goes_on_with_the_tests_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conftest.py").write_text(STICKY)
    write_tests(tmp_path / "gpu" / "test_ctc_loss.py", {1, 4}, 7)
    monkeypatch.setattr(parts, "parallel", lambda: [])
    monkeypatch.setattr(
        parts, "gpu_tests", lambda wanted: ([tmp_path / "gpu" / "test_ctc_loss.py"], [])
    )
    output = tmp_path / "output"
    output.mkdir()
    setting = parts.Setting(output)
    (step,) = parts.tests(setting, Gate())
    assert isinstance(step, Step)
    # They have no mark, and a root of their own.
    command = [x for x in step.command if x not in ("-m", "gpu") or x == sys.executable]
    command.insert(1, "-m")
    unmarked = Step("tests", [*command, "--rootdir", str(tmp_path)], before=step.before, again=20)
    part = parts.Part("tests", "", lambda *_: [unmarked], {1: (1, 1)})
    suite = Suite(setting, [part], 2.0, call=1)
    assert suite.run() == 1
    assert [result.code for result in suite.results] == [POISONED, POISONED, 0]
    assert found_in(setting.outcomes) == {
        f"test_{'bad' if n in {1, 4} else 'good'}_{n}": "failed" if n in {1, 4} else "passed"
        for n in range(7)
    }
    kept = json.loads((output / "tests.json").read_text())
    assert kept["groups"]["ctc_loss"]["passed"] == 5


def test_a_process_without_a_gpu_is_never_poisoned() -> None:
    assert not poison.is_poisoned()


def test_the_suite_watches_its_gpu_tests(tmp_path: Path) -> None:
    (step,) = (
        x for x in parts.tests(parts.Setting(tmp_path), Gate()) if not isinstance(x, LeftOut)
    )
    assert "suite.poison" in step.command
    assert step.again
