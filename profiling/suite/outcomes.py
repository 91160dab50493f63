"""A plugin of pytest that writes each outcome as it comes: those of a run cut short count, too.

    python -m pytest -p suite.outcomes --outcomes FILE [--done DONE] ...

Lines of JSON: ``{"collected": [...]}`` once, then ``{"test": ..., "outcome": ...}``, passed, failed
or skipped. With xdist only the process that hands out the tests writes. With ``--done`` the file is
appended to, and the tests that are listed in DONE, JSON that does not change while the run lasts,
are not run again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

LEFT_OUT = "left out"
"""A property of a test which was skipped though it might have run; it counts as not reached."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that name the files."""
    parser.addoption("--outcomes", type=Path, default=None, metavar="FILE")
    parser.addoption("--done", type=Path, default=None, metavar="FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Write where a file is named."""
    path = config.getoption("--outcomes")
    if path is not None and not hasattr(config, "workerinput"):
        if config.getoption("--done") is None:
            path.unlink(missing_ok=True)
        config.pluginmanager.register(_Writer(path))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has been run."""
    path = config.getoption("--done")
    if path is None or not path.exists():
        return
    done = set(json.loads(path.read_text(encoding="utf-8") or "[]"))
    left_out = [item for item in items if item.nodeid in done]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid not in done]


class _Writer:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._collected = False

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _list(self, names: list[str]) -> None:
        # Each process of xdist collects them all.
        if names and not self._collected:
            self._collected = True
            self._write({"collected": names})

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._list([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        self._list(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write({"test": report.nodeid, "outcome": "failed"})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if any(name == LEFT_OUT for name, _ in report.user_properties):
            return
        if report.when == "call" or report.outcome != "passed":
            self._write({"test": report.nodeid, "outcome": report.outcome})
