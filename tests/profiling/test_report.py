"""The command and its files, from captures of both profilers to a page."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import report
import torch
from torch import nn

from tests.profiling.kineto_trace import Trace
from tests.profiling.nsys_export import Export
from tests.security.test_display import is_control
from tests.support.page import Page

ROOT = Path(__file__).parents[2]


def check_page(path: Path) -> Page:
    page = Page(path)
    assert all(link.startswith("#") for link in page.links)
    assert set(page.links) <= {f"#{name}" for name in page.identifiers}
    assert len(set(page.identifiers)) == len(page.identifiers)
    assert not re.search(r"https?:|//|@import|url\(", re.sub(r"<!DOCTYPE html>", "", page.html))
    assert "prefers-color-scheme: dark" in page.html
    assert 'lang="en"' in page.html
    return page


def check_trace(path: Path) -> list[dict[str, Any]]:
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    assert all(event["ph"] in "XM" for event in events)
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    return events


def export(path: Path, work: int = 500) -> Path:
    made = Export()
    for number in range(4):
        begin = 1000 * number
        made.range("data", begin, begin + 100)
        made.range("step", begin + 100, begin + 1000, payload=number)
        made.range("encoder <&>", begin + 110, begin + 400)
        made.kernel(begin + 150, begin + 200, begin + 200 + work, "void a<int>(b<c&>)")
    return made.write(path)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out" / "report"


def test_an_export_becomes_a_page_figures_and_a_trace(
    tmp_path: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = export(tmp_path / "rank0.sqlite")
    assert report.main([str(path), "--output", str(output)]) == 0
    assert sorted(file.name for file in output.iterdir()) == [
        *("report.html", "report.json", "trace.json"),
    ]
    made = json.loads((output / "report.json").read_text())
    assert made["version"] == 1
    page = check_page(output / "report.html")
    assert made["verdict"]["text"] in page.text
    assert "encoder <&>" in page.text
    assert {"budget", "actions", "timeline", "work", "kernels", "quality"} <= set(page.identifiers)
    assert capsys.readouterr().out.startswith(made["verdict"]["text"])
    kernels = [e for e in check_trace(output / "trace.json") if e.get("args", {}).get("range")]
    assert len(kernels) == 4
    assert kernels[0]["args"] == {
        **{"range": "encoder <&>", "phase": "encoder <&>", "attributed by": "launch"}
    }


def train(folder: Path, name: str, rank: int = 0) -> Path:
    """Two profiled steps of a tiny model on the CPU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    path = folder / name / "profile" / f"rank{rank}.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda made: made.export_chrome_trace(str(path)),
    )
    mark = torch.profiler.record_function
    with profiler:
        for _ in range(3):
            with mark("data"):
                inputs = torch.randn(32, 64)
            with mark("step"):
                with mark("forward"), mark("encoder"):
                    hidden = model(inputs)
                with mark("loss"):
                    loss = (hidden**2).mean()
                with mark("backward"):
                    loss.backward()
                with mark("update"):
                    optimizer.step()
                    optimizer.zero_grad()
            profiler.step()
    return folder / name


def log(run: Path, **values: float) -> None:
    common = {"step_s": 0.01, "data_wait_s": 0.001, "audio_seconds": 30.0, "mfu": None}
    lines = [{"step": 10 * n, "padding_frames": 0.01 * n} | common | values for n in range(1, 6)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_two_steps_on_the_cpu_go_through_the_whole_report(tmp_path: Path, output: Path) -> None:
    run = train(tmp_path, "demo")
    log(run)
    # What else lies in a run directory is none of the report's business.
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "state.json").write_text('{"traceEvents": []}')
    (run / "profile" / "unfinished_rank1.json.gz").write_bytes(b"\x1f\x8b")
    made = report.make([[run]], output)
    budget = made["budget"]
    assert budget["steps"] == 2
    assert sum(part["ns"] for part in budget["parts"]) == budget["wall_ns"]
    parts = {part["name"]: part["ns"] for part in budget["parts"]}
    assert parts["compute"] > 0 < parts["host_gap"]
    assert parts["data_wait"] > 0 == parts["communication"]
    ranges = {entry["name"]: entry for entry in made["ranges"]}
    # The backward of the encoder is known by autograd's sequence numbers.
    assert (
        ranges["forward / encoder"]["backward_ms"] > 0 < ranges["forward / encoder"]["forward_ms"]
    )
    assert ranges["loss"]["backward_ms"] > 0
    assert sum(entry["share"] for entry in made["ranges"]) == pytest.approx(1)
    assert made["attribution"]["forward"] > 0 == made["attribution"]["none"]
    assert {"forward", "backward", "update"} <= set(made["phases"]["phases"])
    page = check_page(output / "report.html")
    assert made["verdict"]["text"] in page.text
    assert "mean 3.0 %" in page.text
    assert check_trace(output / "trace.json")
    # Kineto's usual name is also that of the report's own trace, which is told by what is in it.
    (run / "profile" / "rank0.json.gz").rename(run / "profile" / "trace.json.gz")
    # A second report of the same folder does not take the first for a capture.
    for _ in range(2):
        assert report.make([[run]], run / "report")["sources"] == ["trace.json.gz"]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_two_runs_are_compared(tmp_path: Path, output: Path) -> None:
    runs = []
    for name, work in (("before", 500), ("after", 300)):
        (tmp_path / name / "profile").mkdir(parents=True)
        export(tmp_path / name / "profile" / "rank0.sqlite", work)
        log(tmp_path / name, step_s=work * 1e-5)
        runs.append(tmp_path / name)
    assert report.main([*map(str, runs), "--output", str(output)]) == 0
    made = json.loads((output / "report.json").read_text())
    assert made["comparison"]["text"] in check_page(output / "report.html").text
    rows = {row["name"]: row for row in made["comparison"]["parts"]}
    assert rows["compute"]["delta"] == pytest.approx(-200e-6)
    assert (output / "trace_before.json").is_file()
    # The same, of captures alone.
    files = [str(run / "profile" / "rank0.sqlite") for run in runs]
    assert report.main(["--compare", *files, "--output", str(tmp_path / "other")]) == 0


def test_a_run_without_captures_has_a_report_and_no_trace(tmp_path: Path, output: Path) -> None:
    log(tmp_path, mfu=0.3, mfu_with_padding=0.4, useful_tflops=12.5)
    output.mkdir(parents=True)
    (output / "trace.json").write_text("of an earlier report")
    assert report.make([[tmp_path]], output)["budget"] is None
    assert not (output / "trace.json").exists()
    page = check_page(output / "report.html")
    assert "no capture was given" in page.text
    assert "achieved, padding included" in page.text
    assert "12.5 TFLOP/s useful on each rank" in page.text


def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("nothing")
    empty = tmp_path / "empty"
    empty.mkdir()
    for path in (text, empty, tmp_path / "absent.sqlite"):
        assert report.main([str(path), "--output", str(output)]) == 2
        message = capsys.readouterr().err
        assert message.startswith(f"report: `{path}` must")
        assert message.count("\n") == 1
    assert not output.exists()
    for wrong in ([], ["a", "--compare", "a", "b"], ["a", "--skip", "-1"]):
        with pytest.raises(SystemExit, match="2"):
            report.main([*wrong, "--output", str(output)])


def test_captures_of_several_kinds_are_refused(
    tmp_path: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_gpu, of_cpu = Export(), Export()
    for made in (of_gpu, of_cpu):
        made.range("step", 0, 900, payload=0)
    of_gpu.kernel(10, 20, 500)
    paths = [
        str(made.write(tmp_path / f"{name}.sqlite"))
        for name, made in (("gpu", of_gpu), ("cpu", of_cpu))
    ]
    assert report.main([*paths, "--output", str(output)]) == 2
    message = capsys.readouterr().err
    assert "gpu.sqlite` and `" in message
    assert "report each kind by itself" in message
    assert not output.exists()


def test_only_numpy_is_needed(tmp_path: Path) -> None:
    path = export(tmp_path / "rank0.sqlite")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import report; "
        "code = report.main(sys.argv[2:]); "
        "sys.exit(code or any(m in sys.modules for m in ('torch', 'pandas', 'lhotse', 'scipy')))"
    )
    command = [sys.executable, "-c", code, str(ROOT / "profiling"), str(path)]
    subprocess.run([*command, "--output", str(tmp_path / "out")], check=True, timeout=240)


NAME = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\x1b[2J\u202e]]>-->&lt;"


def steps(name: str, path: Path) -> Path:
    """Write a trace in which everything that has a name has this one."""
    trace = Trace({"schemaVersion": 1, "deviceProperties": [{"name": name}]})
    for number in range(4):
        at = 10_000 * number
        trace.note(f"ProfilerStep#{number}", at, at + 9_000)
        trace.note(name, at, at + 4_000)
        external = trace.operator(f"aten::{name}", at + 10, at + 2000)
        trace.kernel(at + 20, at + 100, at + 3000, name, external=external)
        trace.span("cuda_runtime", name, at + 3000, at + 3100)
    return trace.write(path)


def tags(page: str) -> list[str]:
    """Return opening tags without the values of their attributes."""
    result = re.findall(r"<([a-zA-Z][\w-]*)((?:\s+[\w:-]+(?:=\"[^\"]*\")?)*)\s*/?>", page)
    return sorted(
        {" ".join([tag, *re.findall(r"([\w:-]+)=", remainder)]) for tag, remainder in result}
    )


@pytest.mark.parametrize("compared", [False, True])
def test_names_of_a_run_are_text_in_its_report(compared: bool, tmp_path, capsys) -> None:
    hostile = "<img src=x onerror=alert(3)>\x1b[2J\u202e"
    plain, bad = tmp_path / "plain", tmp_path / hostile
    for folder, name in ((plain, "gemm"), (bad, NAME)):
        folder.mkdir()
        steps(name, folder / ("a.json" if folder == plain else f"{hostile}.json"))
        line = {"step": 1, "loss": 1.0, "step_s": 0.1, "data_wait_s": 0.0, "phase": name}
        (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    for folder in (plain, bad):
        inputs = ["--compare", str(plain), str(folder)] if compared else [str(folder)]
        assert report.main([*inputs, "--output", str(folder / "out")]) == 0
    visible = capsys.readouterr().out
    assert not any(is_control(item) for item in visible if item != "\n"), repr(visible)
    page, expected = ((item / "out/report.html").read_text("utf-8") for item in (bad, plain))
    assert "alert(1)" in page
    assert "<img" not in page
    assert page.count("<script") == expected.count("<script")
    assert "onerror=alert" not in re.sub(r"&lt;img src=x onerror=alert", "", page)
    assert tags(page) == tags(expected)
    assert not any(is_control(item) for item in page if item not in "\n\t")
    events = check_trace(bad / "out" / "trace.json")
    assert any(NAME in str(event.get("name")) for event in events)
