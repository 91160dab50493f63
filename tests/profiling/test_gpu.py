"""What runs on a GPU, on a machine without one: parts, calls that end, tests, and targets."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import gpu
import gpu_processes
import pytest
import yaml
from gpu import PARTS, Call, Part
from gpu_tests import (
    ADAPTERS,
    CONVERSATIONS,
    ENGINE,
    GOSSIP,
    GROUPS,
    LOADER,
    MODEL,
    OPERATIONS,
    POISONED,
    groups_in,
    groups_of,
    read_outcomes,
)

from tests.docs.test_commands import check_python
from tests.ops.test_contract import OPTIONS as CONTRACT

ROOT = Path(gpu.__file__).parents[1]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(str(ROOT / x) for x in ("", "kernels", "profiling"))
}


def members(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        files = {entry.name: archive.extractfile(entry) for entry in archive.getmembers()}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def is_alive(number: int) -> bool:
    status = Path(f"/proc/{number}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def wait_for(condition, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


# The table of parts


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_the_commands_of_a_part_exist_with_their_options(part, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(gpu, "find_tool", lambda name: f"/usr/bin/{name}")
    assert set(part.uses) <= set(GROUPS)
    for text in (part.command, part.dry):
        for command in filter(None, text.split("&&")):
            words = gpu.expanded(command.format(out=tmp_path, whisper=tmp_path))
            # The interpreter may lie in the checkout, too.
            inside = (n for n, word in enumerate(words) if word.startswith(str(ROOT)))
            scripts = [n for n in inside if words[n].endswith(".py")]
            if scripts:
                budget = [part.budget, "5"] if part.budget else []
                script, *options = words[scripts[0] :]
                check_python([str(Path(script).relative_to(ROOT)), *options, *budget])
            else:
                assert command == "tests" or {"pytest", "effasr.cli"} & set(words)


def test_the_parts_are_in_order_of_worth_and_cover_the_operations() -> None:
    names = [part.name for part in PARTS]
    assert len(set(names)) == len(names)
    assert names[:3] == ["tests", "racecheck", "memcheck"]
    order = ["training canary_180m_flash", "encoder", "ops attention", "real training"]
    assert [x for x in names if x in order] == order
    measured = {word for part in PARTS for word in part.command.split() if word in OPERATIONS}
    assert measured == set(OPERATIONS)
    # A part fits into a call.
    assert max(part.seconds for part in PARTS) <= 9 * 60 - 120


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_dry_run_tests_every_operation(name) -> None:
    tests = ROOT / "tests" / "ops"
    path = tests / f"test_{name}.py"
    source = (path if path.exists() else tests / "test_features.py").read_text()
    words = [word for word in gpu.TABLE["references"].split(" or ") if " and " not in word]
    assert name in CONTRACT or any(word in source for word in words)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.extended
def test_a_whole_dry_run(tmp_path) -> None:
    command = [sys.executable, gpu.__file__, "--dry-run", "--output", str(tmp_path)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row["op"] for row in rows_of(tmp_path / "ops.csv")} == set(OPERATIONS)
    for name in ("training", "encoder", "inference", "attention_tiles"):
        assert rows_of(tmp_path / f"{name}.csv")
    assert "<html" in (tmp_path / "report" / "report.html").read_text()


# Calls that are ended, and parts that fail

# Parts are quick commands that write a row; those named below hang, or fail.
DRIVER = """
import sys
import gpu, gpu_processes
from gpu import Part
from pathlib import Path

gpu_processes.TICK_S, gpu_processes.GRACE_S = 0.2, 1.0
bad, seconds, *arguments = sys.argv[1:]
WRITE = '''
import os, subprocess, sys, time
name, output, bad = sys.argv[1:]
if name == "environment":
    open(output, "w").write('{"device": "a GPU", "fingerprint": "f", "torch": "2", "triton": "3"}')
else:
    open(output + "/" + name + ".csv", "a").write("part,date\\\\n" + name + ",now\\\\n")
if name == bad:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                             start_new_session=True)
    open(output + "/child", "w").write(str(child.pid))
    time.sleep(600)
if name + "!" == bad:
    sys.exit(7)
'''

def words(command):
    name = command.split()[0]
    if name == "gpu.py":
        name, output = "environment", command.split()[2]
    else:
        output = command.split()[1]
    return [sys.executable, "-c", WRITE, name, output, bad]

gpu.expanded = words
names = ("first", "second", "third")
gpu.PARTS = tuple(Part(name, float(seconds), name + " {out}") for name in names)
sys.exit(gpu.main(arguments))
"""


def start(bad: str, seconds: float, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", DRIVER, bad, str(seconds), *map(str, arguments)]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["sigterm", "sigkill"])
def test_a_call_that_is_killed_keeps_its_rows_and_the_next_goes_on(number, tmp_path) -> None:
    output, back = tmp_path / "output", tmp_path / "back"
    process = start("second", 60, "--output", output, "--archive", back)
    packed = back / "gpu.tar.gz"
    # What is killed without a word is packed now and then; its child is what it writes last.
    wait_for(lambda: packed.exists() and members(packed).get("child"))
    child = int((output / "child").read_text())
    process.send_signal(number)
    process.communicate(timeout=30)
    wait_for(lambda: not is_alive(child))
    files = members(packed)
    assert files["first.csv"].endswith("first,now\n")
    assert files["second.csv"].endswith("second,now\n")
    assert "a GPU" in files["summary.md"]
    if number == signal.SIGTERM:
        assert process.returncode == 1
        assert "interrupted" in files["summary.md"]

    process = start("", 60, "--output", tmp_path / "new", "--continue-from", packed)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0, printed
    files = members(tmp_path / "new" / "gpu.tar.gz")
    assert files["first.csv"].count("first,now") == 1
    assert files["second.csv"].count("second,now") == 2
    assert files["third.csv"].count("third,now") == 1
    assert "ok in an earlier call" in files["summary.md"]


def test_a_part_that_hangs_or_fails_is_ended_with_its_children_and_stops_no_other(tmp_path) -> None:
    process = start("first", 4, "--output", tmp_path)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert not is_alive(int((tmp_path / "child").read_text()))
    summary = (tmp_path / "summary.md").read_text()
    assert "| first  | out of time |" in summary
    assert "| third  | ok          |" in summary
    process = start("second!", 4, "--output", tmp_path / "other")
    printed, _ = process.communicate(timeout=60)
    assert "exit code 7" in printed
    assert "third" in (tmp_path / "other" / "third.csv").read_text()


def test_nothing_outlives_a_command(tmp_path) -> None:
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', "
    code += "'import time; time.sleep(60)'], start_new_session=True).pid, flush=True)"
    ended = gpu_processes.run([sys.executable, "-c", code], seconds=30)
    assert ended.code == 0
    assert not is_alive(int(ended.lines[-1]))


def test_the_archive_is_bounded_and_has_results_first(tmp_path) -> None:
    (tmp_path / "ops.csv").write_text("a,b\n")
    (tmp_path / "large.trace").write_bytes(os.urandom(200_000))
    (tmp_path / "small.trace").write_bytes(os.urandom(2_000))
    (tmp_path / ".ops.csv.partial").write_text("half a row")
    data = gpu.packed(tmp_path, 100_000)
    assert len(data) < 100_000
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert archive.getnames() == ["ops.csv", "small.trace", "left_out.txt"]


@pytest.fixture
def call(tmp_path, monkeypatch) -> Call:
    options = ["--output", str(tmp_path)]
    made: list[Call] = []
    monkeypatch.setattr(Call, "run", lambda self: made.append(self) or 0)
    gpu.main(options)
    made[0].where = {"device": "a GPU"}
    return made[0]


def outcomes(path: Path, **tests: str) -> None:
    lines = [
        {"test": f"tests/gpu/test_{name}.py::test_a", "outcome": x} for name, x in tests.items()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_nothing_is_measured_of_what_no_test_has_proven(call, monkeypatch) -> None:
    ran = []
    monkeypatch.setattr(
        Call, "_command", lambda self, name, *_: ran.append(name) or gpu.Result(name, "ok")
    )
    part = Part("ops", 30, "bench ops", uses=("ctc_loss", "rms_norm"))
    assert "none of its tests has passed" in call._run(part, 30).details
    outcomes(call.output / "tests.jsonl", ctc_loss="passed", rms_norm="failed")
    result = call._run(part, 30)
    assert result.details.startswith("not measured: rms_norm: 1 of its tests failed, such as ")
    assert not result.is_done
    assert "needs nothing_here" in call._run(replace(part, needs=("nothing_here",)), 30).details
    assert not ran
    call.untested = True
    result = call._run(part, 30)
    assert (result.status, result.is_done, ran) == ("ok", False, ["ops"])
    assert result.details.startswith("not to be published: rms_norm: 1 of its tests failed")
    # Later calls have its rows, too.
    call.untested = False
    assert "rows of what tests object to are not to be published" in call.summary()
    outcomes(call.output / "tests.jsonl", ctc_loss="passed", rms_norm="passed")
    result = call._run(part, 30)
    assert (result.status, result.is_done, result.details) == ("ok", True, "")
    assert ran == ["ops"] * 2


def test_a_failure_is_not_undone_by_a_repetition(call) -> None:
    path, line = call.output / "tests.jsonl", {"test": "tests/gpu/test_ctc_loss.py::test_a"}
    lines = [json.dumps(line | {"outcome": outcome}) for outcome in ("failed", "passed")]
    path.write_text("\n".join(lines))
    assert groups_in(read_outcomes(path))["ctc_loss"].objection.startswith("1 of its tests failed")


# Tests on a GPU

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


def write_tests(folder: Path, name: str, bad: set[int], count: int) -> None:
    (folder / "gpu").mkdir(exist_ok=True)
    (folder / "conftest.py").write_text(STICKY)
    tests = ((BAD if n in bad else GOOD).format(n=n) for n in range(count))
    (folder / "gpu" / f"test_{name}.py").write_text(HEAD + "".join(tests))


def run_tests(folder: Path, *options: str) -> tuple[int, str, dict[str, str]]:
    out = folder / "out.jsonl"
    record = ["-p", "gpu_tests", "--outcomes", out, "--poisoned", folder / "poisoned"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *record, *options]
    done = subprocess.run(
        [*command, "--rootdir", folder, folder],
        **{"env": ENVIRONMENT, "cwd": folder, "capture_output": True, "text": True, "check": False},
    )
    return done.returncode, done.stdout, read_outcomes(out)


def test_outcomes_are_written_as_they_come_and_no_test_runs_twice(tmp_path) -> None:
    (tmp_path / "test_a.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 0\n"
        "@pytest.fixture\ndef broken(): raise ValueError\n"
        "def test_error(broken): pass\n"
        "@pytest.mark.skip\ndef test_skipped(): pass\n"
    )
    (tmp_path / "test_broken.py").write_text("import nothing_of_this_name\n")
    code, _, result = run_tests(tmp_path, "--continue-on-collection-errors")
    assert code == 1
    names = {"good": "passed", "bad": "failed", "error": "failed", "skipped": "skipped"}
    expected = {f"test_a.py::test_{name}": outcome for name, outcome in names.items()}
    assert result == {**expected, "test_broken.py": "failed"}
    (tmp_path / "test_broken.py").unlink()
    (tmp_path / "done").write_text(json.dumps([x for x in expected if "good" not in x]))
    code, printed, _ = run_tests(tmp_path, "--done", str(tmp_path / "done"))
    assert (code, "1 passed, 3 deselected" in printed) == (0, True)
    with (tmp_path / "out.jsonl").open("a") as file:
        file.write('{"collected": ["test_a.py::test_late"]}\n{"test": "cut sho')
    assert read_outcomes(tmp_path / "out.jsonl")["test_a.py::test_late"] == ""


@pytest.mark.parametrize(
    "options", [[], ["-n", "2", "--dist", "load", "--max-worker-restart", "9"]]
)
def test_a_poisoned_process_is_replaced_and_its_tests_are_run(
    options, tmp_path, call, monkeypatch
) -> None:
    pytest.importorskip("xdist")
    write_tests(tmp_path, "ctc_loss", {1, 4}, 7)
    if options:
        assert run_tests(tmp_path, *options)[0] == 1
        path = tmp_path / "out.jsonl"
    else:
        # Without xdist the call starts the tests again that are left.
        monkeypatch.setattr(gpu, "_parallel", lambda: f" -m '' --rootdir {tmp_path}")
        monkeypatch.setattr(gpu, "gpu_test_files", lambda _: [tmp_path / "gpu/test_ctc_loss.py"])
        codes = []
        ran = Call._command

        def command(self: Call, *arguments: object) -> gpu.Result:
            result = ran(self, *arguments)
            codes.append(result.details.partition(";")[0])
            return result

        monkeypatch.setattr(Call, "_command", command)
        call._run_tests(100)
        assert codes == [f"exit code {POISONED}"] * 2 + [""]
        path = call.output / "tests.jsonl"
    matches = {name.split("::")[1]: outcome for name, outcome in read_outcomes(path).items()}
    assert matches == {
        f"test_{'bad' if n in {1, 4} else 'good'}_{n}": "failed" if n in {1, 4} else "passed"
        for n in range(7)
    }


@pytest.mark.parametrize(
    ("test", "groups"),
    [
        ("tests/gpu/test_attention.py::test_a[float32]", ("attention",)),
        ("tests/gpu/test_transducer_loss.py::test_a", ("transducer_loss",)),
        ("tests/ops/test_ctc_loss.py", ("ctc_loss",)),
        ("tests/gpu/test_launch.py::test_a", OPERATIONS),
        ("tests/gpu/test_operations.py::test_values[rms_norm-(5,), width=1]", ("rms_norm",)),
        ("tests/gpu/test_features.py::test_mask_features[a]", ("mask_features",)),
        ("tests/gpu/test_training.py::test_a", (MODEL,)),
        ("tests/model/test_on_gpu.py::test_a", (MODEL,)),
        ("tests/gpu/test_decoding_engine.py::test_a", (ENGINE,)),
        ("tests/data/test_loader.py::test_a", (LOADER,)),
        ("tests/gpu/test_conversations.py::test_a", (CONVERSATIONS,)),
        ("tests/training/calibration/test_conversations.py::test_a", (MODEL,)),
        ("tests/distributed/test_gossip_cuda.py::test_a", (GOSSIP,)),
        ("tests/ops/test_attention_packages.py::test_a[varlen-1]", ("attention: varlen",)),
        ("tests/ops/test_attention_packages.py::test_version_3[a]", ("attention: flash_attn_3",)),
        ("tests/ops/test_attention_packages.py", tuple(ADAPTERS)),
    ],
)
def test_what_a_test_proves(test, groups) -> None:
    assert groups_of(test) == groups


def test_what_operations_share_is_proven_for_those_that_use_it() -> None:
    users = groups_of("tests/gpu/test_projection.py::test_a")
    assert {"linear_cross_entropy", "transducer_loss"} <= set(users) < set(OPERATIONS)


# Targets

MADE_UP = yaml.safe_load(Path(__file__).with_name("gpu_targets.yaml").read_text())


def filled(table: str, row: dict[str, object]) -> dict[str, str]:
    defaults = MADE_UP["defaults"].get(table, {})
    return {name: str(value) for name, value in (defaults | row).items()}


ROWS = {table: [filled(table, row) for row in rows] for table, rows in MADE_UP["rows"].items()}


def test_each_target_against_rows() -> None:
    lines = gpu.target_lines(ROWS, dry=False)
    assert {what: list(figures) for what, _, *figures in lines} == MADE_UP["expected"]
    nothing = {name: [] for name in gpu.FILES}
    assert {line[-1] for line in gpu.target_lines(nothing, dry=False)} == {"not measured"}
    assert {line[-1] for line in gpu.target_lines(ROWS, dry=True)} <= {"dry run", "not measured"}
    grown = ROWS | {"memory": [{"peak_memory_bytes": str(n)} for n in range(1, 9)]}
    (line,) = [x for x in gpu.target_lines(grown, dry=False) if x[0].startswith("growth")]
    assert line[2:] == ("3 bytes", "missed")


def test_each_choice_that_a_gpu_decides_has_its_rows() -> None:
    packed = {"system": "packed_static", "model": "canary_1b_flash"}
    steps = {"graph": "0.2", "graph_torch": "0.3", "graph_narrow": "0.15"}
    made = [filled("training", packed | {"mode": x, "step_s": s}) for x, s in steps.items()]
    rows = ROWS | {"training": made}
    lines = {(x[1], x[2]): x[3:] for x in gpu.variant_lines(rows, dry=False)}
    model = "canary_1b_flash"
    assert lines["optimizer.implementation", model] == ("auto 0.2, torch 0.3, apex", "auto")
    assert lines["model.residual_in_fp32", model] == ("true 0.2, false 0.15", "false")
    fields = {field for field, _ in lines}
    assert fields >= {f"kernels.{x}attention" for x in ("", "decoder_", "cross_")}
    assert lines["kernels.cross_attention", ""][1] == "not measured"
    # A dry run lists them all, and decides nothing.
    dry = gpu.variant_lines({name: [] for name in gpu.FILES}, dry=True)
    assert {x[1] for x in dry} == {x["field"] for x in gpu.TABLE["variants"]}
    assert {x[-1] for x in gpu.variant_lines(rows, dry=True)} == {"dry run", "not measured"}
