"""A report of a run whose names, texts and files others chose."""

import json
import re
from pathlib import Path

import pytest
import report

from tests.profiling.kineto_trace import Trace
from tests.profiling.test_report import check_trace
from tests.security.test_display import is_control

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
