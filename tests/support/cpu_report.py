"""``--cpu-report FILE``: processor time of each test, with that of the processes it waited for.

Wall time depends on what else a machine does; processor time tells what a suite needs. Each process
of pytest-xdist adds a line for each of its tests: ``sort -n FILE`` has the longest last.
"""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

_OPTION = "--cpu-report"


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "add a line to a file for each test: seconds of processor time, and its name"
    parser.addoption(_OPTION, metavar="FILE", type=Path, help=text)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = _processor_time()
    try:
        return (yield)
    finally:
        if (path := item.config.getoption(_OPTION)) is not None:
            seconds = _processor_time() - before
            # From where pytest was started, whatever folder a test has changed to.
            with (item.config.invocation_params.dir / path).open("a") as file:
                file.write(f"{seconds:9.3f} {item.nodeid}\n")


def _processor_time() -> float:
    """User and system time of this process and of its children that ended and were waited for."""
    local, children = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return local.ru_utime + local.ru_stime + children.ru_utime + children.ru_stime
