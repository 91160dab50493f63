"""Which cases of a test run on each push (`make test`), and which in `make test-all` alone.

A claim that holds for every architecture, dtype, shape or option is a test with many cases. Some of
them show on each push that the claim holds; the others get the marker ``extended``:

- ``@pytest.mark.representative(width=64, kind=["none", "rotary"])`` names values of parameters: the
  cases that have them run on each push. Several such markers add up.
- `_RULES` do the same for all tests of a folder that have a parameter of that name.
- ``@pytest.mark.extended`` is for a test that repeats another one at another size.

A marker that leaves a test no case is an error: no claim is lost by a misspelling.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tolerance import AWKWARD_LENGTHS

_RAGGED = ("empty_among_others", "all_empty", "long_among_short")
_TESTS = Path(__file__).parents[1]
_RULES: dict[str, dict[str, Any]] = {
    "compiled": {"architecture": 90},
    "gpu": {"dtype": torch.bfloat16, "lengths": [AWKWARD_LENGTHS[name] for name in _RAGGED]},
}


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector) -> Iterator[Any]:
    result = yield
    cases = [x for x in result if hasattr(x, "callspec")] if isinstance(result, list) else []
    if cases:
        chosen = _chosen_by_folder(_chosen_by_test(cases))
        if not chosen:
            test = cases[0].nodeid.partition("[")[0]
            raise collector.CollectError(f"{test}: no case has the values of its representatives")
        for case in cases:
            if case not in chosen:
                case.add_marker(pytest.mark.extended)
    return result


def _chosen_by_test(cases: list[pytest.Function]) -> list[pytest.Function]:
    markers = [marker.kwargs for marker in cases[0].iter_markers("representative")]
    if not markers:
        return cases
    if not all(any(_has(case, values) for case in cases) for values in markers):
        return []
    return [case for case in cases if any(_has(case, values) for values in markers)]


def _chosen_by_folder(cases: list[pytest.Function]) -> list[pytest.Function]:
    path = cases[0].path if cases else _TESTS
    folder = path.relative_to(_TESTS).parts[0] if _TESTS in path.parents else ""
    for name, value in _RULES.get(folder, {}).items():
        # A test that has only other values keeps them.
        cases = [case for case in cases if _has(case, {name: value})] or cases
    return cases


def _has(case: pytest.Function, values: Mapping[str, Any]) -> bool:
    parameters = case.callspec.params
    return all(
        name in parameters
        and any(_same(parameters[name], x) for x in (value if isinstance(value, list) else [value]))
        for name, value in values.items()
    )


def _same(a: Any, b: Any) -> bool:
    """Equality under which True is not 1."""
    return type(a) is type(b) and bool(a == b)
