"""Commands of the GPU suite: their time, their logs, their end, and what is left of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from suite import orphans, steps, suite
from suite.parts import ROOT, Part, Setting, missing
from suite.steps import LeftOut, Result, Step, limits


def python(code: str, name: str = "step", **fields: object) -> Step:
    return Step(name, [sys.executable, "-c", code], **fields)  # type: ignore[arg-type]


def run(step: Step, seconds: float, folder: Path) -> Result:
    return steps.run(step, seconds, folder, folder, suite.base_environment())


def alive(number: int) -> bool:
    status = Path(f"/proc/{number}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def gone(number: int, seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while alive(number) and time.monotonic() < until:
        time.sleep(0.05)
    return not alive(number)


def test_commands_run_from_this_checkout_and_not_interpreted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    found = suite.base_environment()
    assert "TRITON_INTERPRET" not in found
    expected = [str(ROOT), f"{ROOT}/kernels", f"{ROOT}/profiling", "elsewhere"]
    assert found["PYTHONPATH"].split(":") == expected
    assert found.get("CUDA_VISIBLE_DEVICES") != "-1"
    assert suite.base_environment(dry=True)["CUDA_VISIBLE_DEVICES"] == "-1"


def test_a_step_that_fails_shows_its_last_words(tmp_path: Path) -> None:
    found = run(python("print('because'); raise SystemExit(3)", "a b"), 20, tmp_path)
    assert (found.status, found.well, found.tail[-1]) == ("failed", False, "because")
    assert found.details == f"exit code 3; {tmp_path / 'a_b.log'}"
    found = run(python("import os; print(os.environ['A'])", variables={"A": "x"}), 20, tmp_path)
    assert (found.status, found.well, list(found.tail)) == ("ok", True, [])
    assert (tmp_path / "step.log").read_text().endswith("\nx\n")


def test_a_step_that_can_do_nothing_here_says_why(tmp_path: Path) -> None:
    found = run(python("print('needs a GPU'); raise SystemExit(3)", nothing=3), 20, tmp_path)
    assert (found.status, found.details, found.well) == ("left out", "needs a GPU", True)


def test_a_step_that_hangs_is_ended_with_its_children_in_whatever_session(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "x = [subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],\n"
        "                      start_new_session=apart) for apart in (False, True)]\n"
        "print(*(one.pid for one in x), flush=True); time.sleep(600)"
    )
    began = time.monotonic()
    found = run(python(code), 2.0, tmp_path)
    assert time.monotonic() - began < 20
    assert (found.status, found.well) == ("out of time", False)
    assert all(gone(int(number)) for number in found.tail[-1].split())


def test_a_step_that_ends_leaves_nothing_behind(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "x = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],\n"
        "                     start_new_session=True)\n"
        "print(x.pid)"
    )
    assert run(python(code), 20, tmp_path).status == "ok"
    assert gone(int((tmp_path / "step.log").read_text().split()[-1]))


def test_a_suite_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    """SIGKILL, of the suite alone: a watcher of its own ends what it had started."""
    script = (
        "import os, subprocess, sys, time\n"
        "from suite.orphans import VARIABLE, Watcher, new_token\n"
        "token = new_token(); Watcher(token)\n"
        "x = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],\n"
        "                     start_new_session=True, env=os.environ | {VARIABLE: token})\n"
        "print(x.pid, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        env=suite.base_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert alive(child)
    process.kill()
    process.wait()
    process.stdout.close()
    assert gone(child)


def test_only_what_bears_the_token_is_killed() -> None:
    code = "import time; print(1, flush=True); time.sleep(600)"
    mine, other = orphans.new_token(), orphans.new_token()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | {orphans.VARIABLE: token},
            stdout=subprocess.PIPE,
        )
        for token in (mine, other)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        assert orphans.kill(mine) == 1
        assert started[0].wait(10) == -9
        assert started[1].poll() is None
    finally:
        for process in started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.mark.parametrize(("option", "told"), [("--budget-s", "90"), ("--minutes", "1.50")])
def test_a_command_that_ends_itself_is_told_when(tmp_path: Path, option: str, told: str) -> None:
    run(python("import sys; print(sys.argv[1:])", budget=option), 100, tmp_path)
    assert (tmp_path / "step.log").read_text().endswith(f"['{option}', '{told}']\n")


def test_time_is_divided_by_floors_and_weights() -> None:
    assert limits([(0, 1), (0, 3)], 100) == [25, 75]
    assert limits([(50, 0), (10, 1), (0, 1)], 100) == [50, 30, 20]
    # What cannot be had by all is had by the first ones.
    assert limits([(50, 1), (40, 1), (30, 1)], 80) == [50, 30, 0]
    assert limits([(50, 1)], -3) == [0]
    assert limits([], 10) == []


def fake(name: str, *made: Step | LeftOut, floor: float = 0.0, weight: float = 1.0) -> Part:
    return Part(name, "", lambda setting, gate: made, {1: (floor, weight)})


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """The steps that ran, with the seconds each was given; those named ``bad`` fail."""
    found: list[tuple[str, float]] = []

    class Fake:
        def __init__(self, step: Step, seconds: float, *_: object) -> None:
            self.step = step
            found.append((step.name, seconds))

        def finish(self, tick: object) -> Result:
            bad = self.step.name == "bad"
            name = self.step.name
            return Result(name, "failed" if bad else "ok", well=not bad, tail=["why"] * bad)

    monkeypatch.setattr(suite, "Running", Fake)
    return found


def test_a_failure_stops_nothing_and_time_is_divided(
    given: list[tuple[str, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = [
        fake("a", Step("bad", []), Step("good", [], weight=3), weight=1),
        fake("b", LeftOut("b", "no such tool"), Step("c", [], needs=["nothing_at_all>=1"])),
        fake("d", Step("last", []), weight=2),
    ]
    one = suite.Suite(Setting(tmp_path), some, 4.0, call=1)
    assert one.run() == 1
    assert [name for name, _ in given] == ["bad", "good", "last"]
    # A quarter of 240 s, of that a quarter; then all that was not used.
    assert [round(seconds) for _, seconds in given] == [15, 60, 240]
    assert [result.status for result in one.results] == ["failed", "ok", *["left out"] * 2, "ok"]
    shown = capsys.readouterr().out
    assert "    why\n" in shown
    assert "needs nothing_at_all>=1, which is not installed" in shown
    assert "| bad " in (tmp_path / "summary.md").read_text()
    assert suite.Suite(Setting(tmp_path), some[1:], 4.0, call=1).run() == 0


def test_an_earlier_part_leaves_later_ones_their_floor(
    given: list[tuple[str, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = [fake("a", Step("a", []), weight=9), fake("b", Step("b", []), floor=140)]
    assert suite.Suite(Setting(tmp_path), some, 4.0, call=1).run() == 0
    assert [(name, round(seconds)) for name, seconds in given] == [("a", 90), ("b", 240)]
    # The plan is shown first.
    assert "call 1, 240 s" in capsys.readouterr().out.splitlines()[0]


def test_what_is_not_installed_has_no_share_of_the_time(
    given: list[tuple[str, float]], tmp_path: Path
) -> None:
    absent = Step("peer", [], weight=3, needs=["nothing_at_all>=1"])
    part = fake("a", Step("first", []), absent, Step("second", []))
    one = suite.Suite(Setting(tmp_path), [part], 4.0, call=1)
    assert one.run() == 0
    assert [(name, round(seconds)) for name, seconds in given] == [("first", 120), ("second", 240)]
    assert [result.name for result in one.results] == ["first", "peer", "second"]


def test_a_part_that_is_left_out_has_no_share_of_the_time(
    given: list[tuple[str, float]], tmp_path: Path
) -> None:
    absent = fake("b", LeftOut("b", "needs nothing_at_all"), floor=60, weight=9)
    absent = replace(absent, needs=["nothing_at_all>=1"])
    one = suite.Suite(Setting(tmp_path), [fake("a", Step("first", [])), absent], 4.0, call=1)
    assert one.run() == 0
    assert [(name, round(seconds)) for name, seconds in given] == [("first", 240)]


def test_what_runs_beside_others_is_waited_for_at_the_end_of_its_part(tmp_path: Path) -> None:
    ends = "import sys, time; time.sleep(float(sys.argv[1]))"
    slow = Step("slow", [sys.executable, "-c", ends, "1.5"], beside=True)
    quick = Step("quick", [sys.executable, "-c", ends, "0"])
    began = time.monotonic()
    one = suite.Suite(Setting(tmp_path), [fake("a", slow, quick)], 1.0, call=1)
    assert one.run() == 0
    assert [result.name for result in one.results] == ["quick", "slow"]
    assert time.monotonic() - began >= 1.5


def test_what_is_too_old_is_missing() -> None:
    assert missing(["pytest>=8.0"]) == ""
    assert missing(["pytest>=999.1"]).startswith("needs pytest>=999.1, but ")
