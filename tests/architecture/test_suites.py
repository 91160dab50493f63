"""Which cases `make test` runs, and processes that need no imports."""

import os
import signal

import pytest

from tests.support.preloaded import ROOT, Preloaded

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


def test_representatives_run_on_each_push(pytester: pytest.Pytester) -> None:
    pytester.makeini(MARKERS)
    pytester.makepyfile(test_cases=CASES)
    options = "-p", "tests.support.suites", "-p", "no:cacheprovider", "--collect-only", "-q"
    everything = pytester.runpytest_inprocess(*options)
    assert len(everything.outlines) > 9
    found = pytester.runpytest_inprocess(*options, "-m", "not extended").outlines
    chosen = [line.partition("::")[2] for line in found if "::" in line]
    both = ["test_both[2-a]", "test_both[2-b]", "test_both[1-c]"]
    assert sorted(chosen) == sorted([*both, "test_all[1]", "test_all[2]"])


@pytest.mark.parametrize("wrong", ["width=3", "widht=1", "width=True"])
def test_a_representative_that_no_case_has_is_an_error(
    pytester: pytest.Pytester, wrong: str
) -> None:
    pytester.makeini(MARKERS)
    pytester.makepyfile(test_cases=CASES.replace('width=1, kind="c"', wrong))
    options = "-p", "tests.support.suites", "-p", "no:cacheprovider", "-q"
    result = pytester.runpytest_inprocess(*options)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert "test_both: no case has the values of its representatives" in result.stdout.str()


def start(*arguments: str, **options: bool) -> Preloaded:
    variables = {**os.environ, "OF_THIS_ALONE": "yes"}
    return Preloaded("tests.architecture.preloaded_program", *arguments, env=variables, **options)


def test_a_preloaded_process_is_as_one_of_its_own() -> None:
    process = start("ends", "with spaces")
    out, error = process.communicate(timeout=120)
    name, parent, leader, arguments, variable, folder, loaded, *later = out.splitlines()
    assert (process.returncode, error) == (3, "to standard error\n")
    assert name == "__main__"
    assert int(parent) == os.getpid()
    assert int(leader) == os.getpgid(0)
    assert arguments == "['ends', 'with spaces']"
    assert variable == "yes"
    assert folder == str(ROOT)
    assert loaded == "True"
    # At its end it waits for its threads, and then calls exit functions.
    assert later == ["another thread", "an exit function"]


def test_a_preloaded_process_gets_signals() -> None:
    with start("waits", new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert process.poll() is None
        assert os.getpgid(process.pid) == process.pid
        process.kill()
        assert process.wait(timeout=120) == -signal.SIGKILL
