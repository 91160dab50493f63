"""Tests of a GPU: a plugin of pytest that keeps each outcome, and what the outcomes allow.

    python -m pytest -p gpu_tests --outcomes FILE [--done FILE] [--poisoned FILE] ...

Outcomes are written as they come, since those of a run that is cut short count, too, as lines of
JSON: {"collected": [...]} once, then {"test": ..., "outcome": ...}. Tests that --done lists, as
JSON, are not run again. With xdist only the process that hands out the tests writes.

After an illegal access each later call of CUDA in the process fails, and so would each later test.
So after a test that failed the GPU is waited for; where that fails, the process ends at once,
behind the report of the test. xdist replaces it; without xdist its exit code is POISONED. Where
MOST tests of a file have done that, its other tests are left out: each costs a new process.
"""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

POISONED = 86
MOST = 3
LEFT_OUT = "left out"
ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kernels" / "effasr_kernels"
OPERATIONS = tuple(sorted(path.parent.name for path in PACKAGE.glob("*/reference.py")))
MODEL, ENGINE, CONVERSATIONS = "model", "decoding engine", "conversations"
LOADER, GOSSIP = "data loader", "gossip"
# Other projects' attention behind ours: for each group, the backend whose rows rest on it.
ADAPTERS = {f"attention: {x}": x for x in ("varlen", *(f"flash_attn_{n}" for n in (2, 3, 4)))}
GROUPS = (*OPERATIONS, MODEL, ENGINE, CONVERSATIONS, LOADER, GOSSIP, *ADAPTERS)


def pytest_addoption(parser: pytest.Parser) -> None:
    for name in ("--outcomes", "--done", "--poisoned"):
        parser.addoption(name, type=Path, default=None, metavar="FILE")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--outcomes")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(path))
    config.pluginmanager.register(_PoisonWatch(config.getoption("--poisoned")))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    path = config.getoption("--done")
    if path is not None and path.exists():
        done = set(json.loads(path.read_text(encoding="utf-8") or "[]"))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
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
            return  # it counts as not reached
        if report.when == "call" or report.outcome != "passed":
            self._write({"test": report.nodeid, "outcome": report.outcome})


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


class _PoisonWatch:
    def __init__(self, path: Path | None) -> None:
        self._path = path  # names a file of tests once for each process that it has cost
        self._failed = False

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        names = self._path.read_text() if self._path and self._path.exists() else ""
        if Counter(names.split("\n"))[item.nodeid.partition("::")[0]] >= MOST:
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
            if self._path is not None:
                with self._path.open("a") as file:
                    file.write(f"{item.nodeid.partition('::')[0]}\n")
            sys.stderr.write(f"the GPU is useless to this process after {item.nodeid}\n")
            sys.stderr.flush()
            os._exit(POISONED)
        return result


@dataclass
class Group:
    """Outcomes of the tests of an operation, say; `unfinished` tests were not reached."""

    passed: int = 0
    skipped: int = 0
    unfinished: int = 0
    failed: list[str] = field(default_factory=list)

    @property
    def is_lacking(self) -> bool:
        return bool(self.unfinished) or not (self.passed or self.skipped or self.failed)

    @property
    def objection(self) -> str:
        """Why nothing that uses it is measured; empty where it may be."""
        if self.failed:
            return f"{len(self.failed)} of its tests failed, such as {self.failed[0]}"
        return "" if self.passed else "none of its tests has passed: run the part tests"

    @property
    def text(self) -> str:
        counts = {"passed": self.passed, "skipped": self.skipped, "not reached": self.unfinished}
        texts = [f"{count} {name}" for name, count in counts.items() if count]
        return ", ".join(([self.objection] if self.failed else []) + texts) or "none has run"


def read_outcomes(path: Path) -> dict[str, str]:
    """Return the outcome of each test of a file; empty for one that was collected alone."""
    outcomes: dict[str, str] = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue  # the last one, of a process that was killed while it wrote
        for name in line.get("collected", ()):
            outcomes.setdefault(name, "")
        if "test" in line and outcomes.get(line["test"]) != "failed":
            outcomes[line["test"]] = line["outcome"]
    return outcomes


def groups_in(outcomes: Mapping[str, str]) -> dict[str, Group]:
    groups = {name: Group() for name in GROUPS}
    for test, outcome in sorted(outcomes.items()):
        for name in groups_of(test):
            group = groups[name]
            group.passed += outcome == "passed"
            group.skipped += outcome == "skipped"
            group.unfinished += not outcome
            if outcome == "failed":
                group.failed.append(test)
    return groups


def groups_of(test: str) -> tuple[str, ...]:
    file, _, name = test.partition("::")
    path = Path(file)
    topic, folder = path.stem.removeprefix("test_"), path.parent.name
    if topic == "attention_packages":
        backends = {"version_3": "flash_attn_3", "version_4": "flash_attn_4"}
        named = {backend for word, backend in backends.items() if word in name}
        return tuple(g for g, x in ADAPTERS.items() if x in name or x in named) or tuple(ADAPTERS)
    if topic.startswith("gossip"):
        return (GOSSIP,)
    if folder == "data":
        return (LOADER,)
    if topic in ("decoding_engine", "continuous_batching"):
        return (ENGINE,)
    if file.endswith(("gpu/test_conversations.py", "decoding/language_model/test_engine.py")):
        return (CONVERSATIONS,)
    if folder not in ("gpu", "ops") or topic.startswith("training"):
        return (MODEL,)
    if topic in ("contract", "features") or topic.startswith("operation"):
        # One table of tests for all: the operation is a part of the name.
        words = set(re.split(r"[\[\]-]", name))
        is_named = lambda x: x in words or name.startswith(f"test_{x}")
        return tuple(filter(is_named, OPERATIONS)) or OPERATIONS
    named_after = tuple(x for x in OPERATIONS if topic.split("_")[0] == x.split("_")[0])
    # What they share, such as launches, is proven for those that use it.
    return named_after or _users(topic) or OPERATIONS


@cache
def _users(module: str) -> tuple[str, ...]:
    """Return the operations that import a module of `effasr_kernels.shared`."""
    words = f"effasr_kernels.shared.{module} import", f"effasr_kernels.shared import {module}"

    def uses(name: str) -> bool:
        sources = (path.read_text(encoding="utf-8") for path in (PACKAGE / name).rglob("*.py"))
        return any(word in source for source in sources for word in words)

    return tuple(name for name in OPERATIONS if uses(name))


def gpu_test_files(groups: Collection[str]) -> list[Path]:
    """Return the files with GPU tests of some groups, those of most operations first."""
    paths = [
        path
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        # Those of kernels are marked when collected, where no word in the files says so.
        if path.parent.name == "gpu" or "mark.gpu" in path.read_text(encoding="utf-8")
    ]
    order = {name: number for number, name in enumerate(groups)}
    position = lambda path: min(order.get(name, len(order)) for name in groups_of(str(path)))
    chosen = [path for path in paths if set(groups_of(str(path))) & set(groups)]
    return sorted(chosen, key=lambda path: (position(path), path.name))
