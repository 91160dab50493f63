"""Which cases `make test` runs."""

import pytest

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
    assert len(pytester.runpytest_inprocess(*options).outlines) > 9
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
