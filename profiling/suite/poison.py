"""A plugin of pytest that ends a process whose GPU context an error has made useless.

    python -m pytest -p suite.poison ...

After an illegal access each later call of CUDA in the process fails, and so would each later test.
So after a test that failed the GPU is waited for; where that fails, the process ends at once,
behind the report of the test. pytest-xdist replaces it, and gives the tests that it had not run to
others; without xdist the exit code is `steps.POISONED`. Where three tests of a file have done that,
its other tests are left out: each costs a new process.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

from suite.outcomes import LEFT_OUT
from suite.steps import POISONED

MOST = 3
"""Processes that a file of tests may cost."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the file through which processes communicate."""
    parser.addoption("--poisoned", type=Path, default=None, metavar="FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Watch where tests run."""
    config.pluginmanager.register(_Watch(config.getoption("--poisoned")))


def is_poisoned() -> bool:
    """Return whether the GPU refuses to work for this process; no where it never has."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:
        return True
    return False


class _Watch:
    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._failed = False

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._count(_file(item.nodeid)) >= MOST:
            item.user_properties.append((LEFT_OUT, "poisoned"))
            pytest.skip(f"{MOST} tests of this file have left the GPU useless to their process")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed = self._failed or report.failed

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._failed = False
        result = yield
        # The reports of this test have been sent; xdist does not yet know that it is over, so that
        # it takes this test, and not the next one, for the one that ended the process.
        if self._failed and is_poisoned():
            self._note(_file(item.nodeid))
            sys.stderr.write(f"poison: the GPU is useless to this process after {item.nodeid}\n")
            sys.stderr.flush()
            os._exit(POISONED)
        return result

    def _count(self, file: str) -> int:
        if self._path is None or not self._path.exists():
            return 0
        return Counter(self._path.read_text(encoding="utf-8").split("\n"))[file]

    def _note(self, file: str) -> None:
        if self._path is not None:
            # A single short write, so that those of several processes do not mix.
            with self._path.open("a", encoding="utf-8") as out:
                out.write(f"{file}\n")


def _file(test: str) -> str:
    return test.partition("::")[0]
