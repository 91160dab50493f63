"""``--cpu-report FILE``: processor time of each test, with that of the processes it waited for.

Wall time depends on what else a machine does; processor time tells what a suite needs.
"""

import resource
from pathlib import Path

import pytest

_OPTION = "--cpu-report"
_PROPERTY = "cpu_seconds"


def pytest_addoption(parser):
    text = "write seconds of processor time, phase and test, the longest first"
    parser.addoption(_OPTION, metavar="FILE", type=Path, help=text)


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption(_OPTION)) is not None:
        config.pluginmanager.register(_Recorder(path), "cpu_report")


class _Recorder:
    """In a process of pytest-xdist it measures; in the process that collects reports it writes."""

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._rows: list[tuple[float, str, str]] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item):
        return (yield from self._measured(item, "setup"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item):
        return (yield from self._measured(item, "call"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item):
        return (yield from self._measured(item, "teardown"))

    @staticmethod
    def _measured(item, phase):
        before = _processor_time()
        try:
            return (yield)
        finally:
            item.user_properties.append((_PROPERTY, (phase, _processor_time() - before)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # The last of three reports of a test has what the earlier ones have, too.
        if report.when == "teardown":
            for name, value in report.user_properties:
                if name == _PROPERTY and isinstance(value, tuple | list):
                    phase, seconds = value
                    self._rows.append((seconds, phase, report.nodeid))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        rows = sorted(self._rows, reverse=True)
        lines = [f"{seconds:9.3f} {phase:8} {test}" for seconds, phase, test in rows]
        total = sum(seconds for seconds, _, _ in self._rows)
        self._path.write_text("\n".join([f"{total:9.3f} all tests", *lines, ""]))


def _processor_time() -> float:
    """User and system time of this process and of its children that ended and were waited for."""
    local, children = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return local.ru_utime + local.ru_stime + children.ru_utime + children.ru_stime
