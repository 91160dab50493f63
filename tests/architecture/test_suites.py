"""Which cases `make test` and `make test-processes` run."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.preloaded import ROOT

CASES = """
import pytest

@pytest.mark.parametrize("kind", ["a", "b", "c"])
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.representative(width=2, kind=["a", "b"])
@pytest.mark.representative(width=1, kind="c")
def test_both(width, kind):
    pass

@pytest.mark.parametrize("width", [1, 2])
def test_all(width):
    pass

@pytest.mark.extended
def test_none():
    pass
"""
MARKERS = "[pytest]\nmarkers =\n    extended\n    representative"


def test_representatives_run_on_each_push(pytester):
    pytester.makeini(MARKERS)
    pytester.makepyfile(test_cases=CASES)
    options = "-p", "tests.support.suites", "-p", "no:cacheprovider", "--collect-only", "-q"
    everything = pytester.runpytest_inprocess(*options)
    assert len(everything.outlines) > 9
    result = pytester.runpytest_inprocess(*options, "-m", "not extended").outlines
    chosen = [line.partition("::")[2] for line in result if "::" in line]
    both = ["test_both[2-a]", "test_both[2-b]", "test_both[1-c]"]
    assert sorted(chosen) == sorted([*both, "test_all[1]", "test_all[2]"])


@pytest.mark.parametrize("wrong", ["width=3", "widht=1", "width=True"])
def test_a_representative_that_no_case_has_is_an_error(pytester, wrong):
    pytester.makeini(MARKERS)
    pytester.makepyfile(test_cases=CASES.replace('width=1, kind="c"', wrong))
    options = "-p", "tests.support.suites", "-p", "no:cacheprovider", "-q"
    result = pytester.runpytest_inprocess(*options)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert "test_both: no case has the values of its representatives" in result.stdout.str()


def starting_ranks(path: Path) -> set[str]:
    """The tests of a file that start ranks, as pytest names them, or the file."""
    name, text = str(path.relative_to(ROOT)), path.read_text()
    if '"torch.distributed.run"' in text:
        return {name}
    if "tests.support.run_ranks" not in text:
        return set()
    tree = ast.parse(text)
    starters = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "tests.support.run_ranks"
        for alias in node.names
    }
    result = {
        f"{name}::{node.name}"
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if any(isinstance(item, ast.Name) and item.id in starters for item in ast.walk(node))
    }
    return result or {name}


def test_test_processes_runs_all_tests_that_start_ranks():
    command = ["make", "--silent", "--no-print-directory", "--eval=show:; @echo $(PROCESS_TESTS)"]
    done = subprocess.run([*command, "show"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = done.stdout.split()
    files = sorted(ROOT.glob("tests/**/test_*.py"))
    result = {name for path in files if path != Path(__file__) for name in starting_ranks(path)}
    assert len(result) > 15
    left_out = [name for name in result if not any(matches(name, entry) for entry in listed)]
    assert left_out == []
    assert all((ROOT / entry.partition("::")[0]).exists() for entry in listed)


def matches(name: str, entry: str) -> bool:
    """Whether an argument of pytest has a test: it names the test, its file or a folder of it."""
    return re.match(rf"{re.escape(entry)}(/|::|$)", name) is not None
