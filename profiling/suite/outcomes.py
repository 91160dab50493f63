"""A plugin of pytest that writes each outcome as it comes: those of a run cut short count, too.

    python -m pytest -p suite.outcomes --outcomes FILE ...

Lines of JSON: ``{"collected": [...]}`` once, then ``{"test": ..., "outcome": ...}``, passed, failed
or skipped. With xdist only the process that hands out the tests writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that names the file."""
    parser.addoption("--outcomes", type=Path, default=None, metavar="FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Write where a file is named."""
    path = config.getoption("--outcomes")
    if path is not None and not hasattr(config, "workerinput"):
        path.unlink(missing_ok=True)
        config.pluginmanager.register(_Writer(path))


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
        if report.when == "call" or report.outcome != "passed":
            self._write({"test": report.nodeid, "outcome": report.outcome})
