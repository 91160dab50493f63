"""The order of the GPU suite, on a machine without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import gpu_suite
import pytest


def test_kernels_are_always_among_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gpu_suite.gpu_tests()
    assert found[0] == str(gpu_suite.KERNELS)
    assert str(gpu_suite.TESTS / "model" / "test_on_gpu.py") in found
    assert all(Path(path).exists() for path in found)
    assert not any(Path(path).parent == gpu_suite.KERNELS for path in found)


def test_tests_of_the_data_need_its_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("data/test_a.py", "nn/test_b.py", "nn/test_c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if "c" in name else f"pytest.{'mark'}.gpu")
    monkeypatch.setattr(gpu_suite, "TESTS", tmp_path)
    monkeypatch.setattr(gpu_suite, "KERNELS", tmp_path / "gpu")
    everything = [tmp_path / "gpu", tmp_path / "data/test_a.py", tmp_path / "nn/test_b.py"]
    assert gpu_suite.gpu_tests() == list(map(str, everything))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert gpu_suite.gpu_tests() == list(map(str, everything[::2]))
    assert "test_a.py: needs lhotse" in capsys.readouterr().err


def test_commands_run_from_this_checkout_and_not_interpreted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    found = gpu_suite.environment()
    assert "TRITON_INTERPRET" not in found
    root = str(gpu_suite.ROOT)
    assert found["PYTHONPATH"].split(":") == [root, f"{root}/kernels", "elsewhere"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """What each step was given, in order; all succeed."""
    calls: list[tuple[str, float]] = []

    def step(name: str) -> object:
        return lambda *arguments: calls.append((name, arguments[-1])) or 0

    for name in ("test", "sanitize", "benchmark", "transducer"):
        monkeypatch.setattr(gpu_suite, name, step(name))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    return calls


def test_tests_come_first_and_the_split_is_told(
    calls: list[tuple[str, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_suite.main(["--output", str(tmp_path / "new"), "--sanitize"]) == 0
    assert [name for name, _ in calls] == ["test", "sanitize", "benchmark"]
    assert all(0 < left <= 530 for _, left in calls)
    assert (tmp_path / "new").is_dir()
    expected = "gpu_suite: tests 0 s, sanitizer 0 s, benchmarks 0 s\n"
    assert capsys.readouterr().out == expected
    calls.clear()
    assert gpu_suite.main(["--output", str(tmp_path), "--no-bench"]) == 0
    assert [name for name, _ in calls] == ["test"]
    calls.clear()
    assert gpu_suite.main(["--output", str(tmp_path), "--transducer"]) == 0
    assert [name for name, _ in calls] == ["test", "transducer"]


def test_nothing_is_measured_behind_a_failed_test(
    calls: list[tuple[str, float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(gpu_suite, "test", lambda *_: 1)
    assert gpu_suite.main(["--output", str(tmp_path)]) == 1
    assert calls == []
    assert capsys.readouterr().out == "gpu_suite: tests 0 s (failed: 1)\n"


def test_without_a_gpu_nothing_runs(
    calls: list[tuple[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_suite.main([]) == 2
    assert calls == []


def test_a_step_that_hangs_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_suite.run([sys.executable, "-c", "import time; time.sleep(60)"], 1.0) == 124
    assert "ended after 1 s" in capsys.readouterr().err


def test_the_sanitizer_is_used_where_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], seconds: float, variables: dict[str, str]) -> int:
        assert variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
        commands.append(command)
        return 5

    monkeypatch.setattr(gpu_suite, "run", run)
    monkeypatch.setattr(gpu_suite, "find_sanitizer", lambda: None)
    assert gpu_suite.sanitize(10) == 0
    assert commands == []
    monkeypatch.undo()
    monkeypatch.setattr(gpu_suite, "run", run)
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.touch(mode=0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert gpu_suite.sanitize(10) == 5
    assert commands[0][0] == str(tool)
    assert str(gpu_suite.KERNELS) in commands[0]
    said = capsys.readouterr().err
    assert "no compute-sanitizer found" in said
    assert "none was sanitized" in said


def test_tests_run_side_by_side_where_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert gpu_suite.parallel() == ["-n", "12"]
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert gpu_suite.parallel() == ["-n", "1"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert gpu_suite.parallel() == []


def test_the_benchmark_ends_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(gpu_suite, "run", lambda command, *_: commands.append(command) or 0)
    assert gpu_suite.benchmark(tmp_path, 530) == 0
    assert gpu_suite.benchmark(tmp_path, 130) == 0
    assert gpu_suite.transducer(tmp_path, 530) == 0
    budgets = [command[command.index("--budget-s") + 1] for command in commands]
    assert budgets == ["420", "100", "500"]
    assert ["transducer_loss" in command for command in commands] == [False, False, True]
    assert str(tmp_path / "ops.csv") in commands[0]
