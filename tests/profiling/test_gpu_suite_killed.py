"""A call that is ended in its middle, and folders that take no more: nothing that ran is lost."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import zlib
from pathlib import Path
from typing import Any

import bench_ops
import bench_training
import pytest
from suite import archive, suite
from suite.gate import GROUPS
from suite.parts import Part, Setting
from suite.steps import Step

# Each part of the call is a quick command that writes a row; the middle one writes it and hangs.
DRIVER = """
import sys
from dataclasses import replace
import gpu_suite
from suite import steps, suite
from suite.steps import Step

steps._TICK = 0.2
call, hanging, *arguments = sys.argv[1:]
WRITE = '''
import json, sys, time
sys.path.insert(0, "profiling")
from bench import rows
import datetime
part, output, hangs, columns = sys.argv[1], sys.argv[2], sys.argv[3] == "True", sys.argv[4]
now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
if part == "environment":
    with open(output + "/environment.json", "w") as file:
        json.dump({"device": "a GPU", "fingerprint": "f", "torch": "2", "triton": "3"}, file)
elif part == "tests":
    with open(output + "/tests.jsonl", "w") as file:
        test = "tests/gpu/test_ctc_loss.py::test_a"
        file.write(json.dumps({"collected": [test, test + "b"]}) + "\\\\n")
        file.write(json.dumps({"test": test, "outcome": "passed"}) + "\\\\n")
else:
    from pathlib import Path
    columns = columns.split(",")
    row = dict.fromkeys(columns, part) | {"date": now}
    rows.append(Path(output) / "PART.csv".replace("PART", part), columns, row)
print("written", flush=True)
if hangs:
    import os
    Path(output, "hanging").write_text(str(os.getpid()))
    time.sleep(600)
'''


def fake(part):
    def made(setting, gate):
        values = part.name, setting.output, part.name == hanging, "name,date"
        return [Step(part.name, [sys.executable, "-c", WRITE, *map(str, values)])]
    return replace(part, steps=made)


gpu_suite.PARTS = tuple(map(fake, gpu_suite.PARTS))
sys.exit(gpu_suite.main(["--call", call, *arguments]))
"""
MIDDLE = {1: "warm up", 2: "peers", 3: "wide heads"}
BEFORE = {1: [], 2: ["training"], 3: ["transducer"]}
"""Parts whose rows are there by then, beside that of the one that is ended."""


def wait_for(path: Path, seconds: float = 60.0) -> str:
    until = time.monotonic() + seconds
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < until, f"{path} never came"
        time.sleep(0.05)
    return path.read_text()


def alive(number: int) -> bool:
    status = Path(f"/proc/{number}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def members(path: Path) -> dict[str, str]:
    with tarfile.open(path) as packed:
        found = {}
        for entry in packed.getmembers():
            file = packed.extractfile(entry)
            assert file is not None
            found[entry.name] = file.read().decode()
    return found


def packed_while_it_ran(back: Path, call: int) -> bool:
    """Whether the row of the part that hangs is in what lies in the folder that comes back."""
    summary = back / f"summary_call{call}.md"
    packed = back / f"gpu_suite_call{call}.tar.gz"
    if not summary.exists() or f"running: {MIDDLE[call]}" not in summary.read_text():
        return False
    found = members(packed)
    log = f"logs/{MIDDLE[call].replace(' ', '_')}.log"
    return f"{MIDDLE[call]}.csv" in found and "written" in found[log]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["sigterm", "sigkill"])
@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_call_that_is_ended_keeps_what_ran(
    call: int, number: signal.Signals, tmp_path: Path
) -> None:
    output, back = tmp_path / "output", tmp_path / "back"
    command = [sys.executable, "-c", DRIVER, str(call), MIDDLE[call]]
    command += ["--output", str(output), "--archive", str(back)]
    process = subprocess.Popen(
        command, env=suite.base_environment(dry=True), stdout=subprocess.PIPE, text=True
    )
    hanging = int(wait_for(output / "hanging"))
    # What is killed without a word is packed now and then.
    until = time.monotonic() + 30
    while number == signal.SIGKILL and not packed_while_it_ran(back, call):
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(number)
    said, _ = process.communicate(timeout=30)
    until = time.monotonic() + 10
    while alive(hanging) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(hanging), "an orphan is left on the GPU"
    assert sorted(path.name for path in back.iterdir()) == [
        *(f"gpu_suite_call{call}.tar.gz", f"summary_call{call}.md"),
    ]
    kept = members(back / f"gpu_suite_call{call}.tar.gz")
    for part in [*BEFORE[call], MIDDLE[call]]:
        assert f"\n{part}," in kept[f"{part}.csv"]
    assert "written" in kept[f"logs/{MIDDLE[call].replace(' ', '_')}.log"]
    text = (back / f"summary_call{call}.md").read_text()
    assert text == kept["summary.md"] or number == signal.SIGTERM
    assert f"# GPU suite, call {call}\n" in text
    assert "a GPU" in text
    assert "| environment " in text
    assert f"| {'ctc_loss'.ljust(max(map(len, GROUPS)))} | 1 of 2 tests run, all green |" in text
    assert json.loads(kept["tests.json"])["groups"]["ctc_loss"]["passed"] == 1
    if number == signal.SIGTERM:
        assert process.returncode == 1
        assert "| interrupted " in text
        assert "SIGTERM" in text
        assert said.rstrip().endswith(str(back / f"gpu_suite_call{call}.tar.gz"))
    else:
        assert process.returncode == -signal.SIGKILL
        assert f"To note: running: {MIDDLE[call]}" in text


def test_the_next_call_goes_on_from_the_archive(tmp_path: Path) -> None:
    first = tmp_path / "first"
    (first / "logs").mkdir(parents=True)
    (first / "tests.json").write_text("{}")
    (first / "logs" / "tests.log").write_text("x")
    packed = tmp_path / "back" / "gpu_suite_call1.tar.gz"
    archive.write(packed, archive.packed(first))
    archive.unpack(packed, tmp_path / "second")
    assert (tmp_path / "second" / "logs" / "tests.log").read_text() == "x"
    (tmp_path / "broken").write_text("no archive")
    with pytest.raises(ValueError, match="`--continue-from` must name the archive of an earlier"):
        archive.unpack(tmp_path / "broken", tmp_path / "third")


@pytest.mark.parametrize("end", [b"", b"\xff" * 99], ids=["truncated", "damaged"])
def test_half_an_archive_is_refused(end: bytes, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "a.log").write_bytes(os.urandom(50_000))
    whole = gzip.decompress(archive.packed(tmp_path / "first"))
    stream = zlib.compressobj(wbits=31)
    half = stream.compress(whole[: len(whole) // 2]) + stream.flush(zlib.Z_FULL_FLUSH)
    path = tmp_path / "half.tar.gz"
    path.write_bytes(half + end)
    with pytest.raises(ValueError, match=f"but {path} cannot be unpacked"):
        archive.unpack(path, tmp_path / "second")


def test_the_archive_is_bounded_and_has_results_first(tmp_path: Path) -> None:
    (tmp_path / "profile").mkdir()
    (tmp_path / "ops.csv").write_text("a,b\n")
    (tmp_path / "summary.md").write_text("# GPU suite\n")
    (tmp_path / "profile" / "a_large.trace").write_bytes(os.urandom(200_000))
    (tmp_path / "profile" / "small.trace").write_bytes(os.urandom(2_000))
    (tmp_path / ".ops.csv.partial").write_text("half a row")
    (tmp_path / "gpu_suite_call1.tar.gz").write_bytes(b"of before")
    data = archive.packed(tmp_path, 100_000)
    assert len(data) < 100_000
    with tarfile.open(fileobj=io.BytesIO(data)) as packed:
        names = packed.getnames()
        file = packed.extractfile("left_out.txt")
        assert file is not None
        assert file.read().decode().startswith("profile/a_large.trace: 20")
    assert names == ["summary.md", "ops.csv", "profile/small.trace", "left_out.txt"]


def step_of(code: str, name: str) -> Part:
    return Part(name, "", lambda *_: [Step(name, [sys.executable, "-c", code])], {1: (1, 1)})


def run(setting: Setting, *parts: Part, **options: Path) -> suite.Suite:
    one = suite.Suite(setting, parts, 1.0, call=1, **options)
    one.run()
    return one


def test_an_archive_folder_that_takes_nothing_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder")
    output = tmp_path / "output"
    one = run(Setting(output), step_of("print(1)", "a"), archive=tmp_path / "file" / "back")
    assert [result.status for result in one.results] == ["ok"]
    shown = capsys.readouterr().out
    kept = output / "gpu_suite_call1.tar.gz"
    assert f"{tmp_path / 'file' / 'back' / 'gpu_suite_call1.tar.gz'}: Not a directory" in shown
    assert shown.count("kept as") == 1
    assert shown.rstrip().endswith(str(kept))
    assert "| a " in members(kept)["summary.md"]


def test_an_output_folder_that_takes_no_more_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk is full after the first part: its rows are taken along, and the suite goes on."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    output, back = tmp_path / "output", tmp_path / "back"
    one = suite.Suite(Setting(output), (), 1.0)
    write = archive.write
    full: list[bool] = []

    def refusing(path: Path, data: bytes) -> None:
        if full and output in path.parents:
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(archive, "write", refusing)
    row = f"open({str(output / 'ops.csv')!r}, 'w').write('op,backend,date\\na,b,2026\\n')"
    first = step_of(row, "first")

    def second(setting: Setting, gate: object) -> list[Step]:
        code = f"open({str(setting.output / 'memory.csv')!r}, 'w').write('date\\n2026\\n')"
        return [Step("second", [sys.executable, "-c", code])]

    def fill(setting: Setting, gate: object) -> list[Step]:
        full.append(True)
        return []

    parts = first, Part("fill", "", fill, {1: (1, 1)}), Part("second", "", second, {1: (1, 1)})
    one = run(Setting(output), *parts, archive=back)
    assert [result.name for result in one.results] == ["first", "output folder", "second"]
    assert one.results[1].details.startswith(f"{output} takes no more (No space left on device)")
    assert not one.results[1].well
    assert one.setting.output.parent == tmp_path
    kept = members(back / "gpu_suite_call1.tar.gz")
    assert {"ops.csv", "memory.csv", "logs/first.log", "logs/second.log"} <= set(kept)
    assert "takes no more" in capsys.readouterr().out
    assert "takes no more" in kept["summary.md"]


def test_a_part_that_cannot_be_planned_stops_no_other(tmp_path: Path) -> None:
    def broken(setting: Setting, gate: object) -> list[Step]:
        raise KeyError("a")

    one = run(Setting(tmp_path), Part("x", "", broken, {1: (1, 1)}), step_of("print(1)", "a"))
    assert [(x.name, x.status) for x in one.results] == [("x", "failed"), ("a", "ok")]
    assert one.results[0].details == "KeyError: 'a'"


def test_an_output_folder_that_cannot_be_made_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "file").write_text("no folder")
    one = run(Setting(tmp_path / "file" / "output"), step_of("print(1)", "a"))
    assert [(x.name, x.status) for x in one.results] == [("output folder", "moved"), ("a", "ok")]
    assert (one.setting.output / "logs" / "a.log").exists()


def test_a_full_disk_leaves_the_archive_of_before(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    archive.write(path, b"before")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); "
    ignored = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    code = "from pathlib import Path; from suite import archive; "
    code += f"print(archive.write_somewhere([Path({str(tmp_path)!r})], 'a.tar.gz', b'x' * 99999))"
    done = subprocess.run(
        [sys.executable, "-c", limit + ignored + code],
        env=suite.base_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "(None, " in done.stdout, done.stderr
    assert "File too large" in done.stdout
    assert path.read_bytes() == b"before"
    assert sorted(x.name for x in tmp_path.iterdir()) == ["a.tar.gz"]


def test_rows_of_the_step_are_in_the_summary(tmp_path: Path) -> None:
    path = tmp_path / "training.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, bench_training.COLUMNS, restval="")
        writer.writeheader()
        row = {"model": "canary_1b_flash", "mode": "graph", "system": "packed_static"}
        row |= {"step_s": "0.1234", "mfu": "0.31", "date": "2999", "audio_s_per_s": "5"}
        writer.writerow(row | {"padding_frames": "0", "padding_tokens": "0"})
    run(Setting(tmp_path), step_of("print(1)", "a"))
    text = (tmp_path / "summary.md").read_text()
    assert "| canary_1b_flash | graph | packed_static | 123.4     | 31.0 % |" in text
    assert set(bench_ops.COLUMNS) >= {"op", "backend"}


def environment_of(fingerprint: str) -> Part:
    def made(setting: Setting, gate: object) -> list[Step]:
        where = {"device": "a GPU", "fingerprint": fingerprint, "torch": "2", "triton": "3"}
        file = str(setting.output / "environment.json")
        code = f"import json; json.dump({where!r}, open({file!r}, 'w'))"
        return [Step("environment", [sys.executable, "-c", code])]

    return Part("environment", "", made, {1: (1, 1)})


@pytest.mark.parametrize("fingerprint", ["same", "other"])
def test_tests_of_an_earlier_call_count_for_the_same_sources(
    fingerprint: str, tmp_path: Path
) -> None:
    test = "tests/gpu/test_ctc_loss.py::test_a"
    line = json.dumps({"test": test, "outcome": "passed"})
    write = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"
    first = Setting(tmp_path / "first")

    def tests(setting: Setting, gate: object) -> list[Step]:
        file = str(setting.outcomes)
        return [Step("tests", [sys.executable, "-c", write, file, line])]

    run(first, environment_of("same"), Part("tests", "", tests, {1: (1, 1)}))
    second = Setting(tmp_path / "second")
    archive.unpack(first.output / "gpu_suite_call1.tar.gz", second.output)
    seen: list[int] = []

    def look(setting: Setting, gate: Any) -> list[Step]:
        seen.append(gate.groups["ctc_loss"].passed)
        return []

    run(second, environment_of(fingerprint), Part("look", "", look, {1: (1, 1)}))
    assert seen == [1 if fingerprint == "same" else 0]
    assert second.outcomes.exists() == (fingerprint == "same")
