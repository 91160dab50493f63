"""Which operations may be measured: a speed counts only behind green tests."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPERATIONS = tuple(
    sorted(path.parent.name for path in ROOT.glob("kernels/effasr_kernels/*/definition.py"))
)
MODEL = "model"
"""The group of the tests of the whole model and of its training."""
EXTENSION = "extension"
"""That of the compiled extension, on which nothing that is measured rests."""
CANARY = (*(name for name in OPERATIONS if name != "transducer_loss"), MODEL)
"""What Canary's training and inference rest on."""
_OF_OPERATIONS = ("gpu", "ops", "csrc")
_OF_MODEL = ("training", "on_gpu")


@dataclass
class Group:
    """Outcomes of the tests of an operation, or of the model.

    Attributes:
        passed: How many.
        failed: Which.
        unfinished: How many were still to be run when time was over.
    """

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    unfinished: int = 0

    @property
    def reason(self) -> str:
        """Why it is not proven; empty where it is."""
        if self.failed:
            return f"{len(self.failed)} of its tests failed, such as {self.failed[0]}"
        if self.unfinished:
            return f"{self.unfinished} of its tests were not reached"
        return "" if self.passed else "none of its tests has run: run the part tests"


def groups_of(test: str) -> tuple[str, ...]:
    """What a test proves: operations, or the model; all operations where it names none.

    Args:
        test: As pytest names it, ``tests/gpu/test_ctc_loss.py::test_x[float32]``.
    """
    path = Path(test.split("::")[0])
    topic = path.stem.removeprefix("test_")
    if path.parent.name not in _OF_OPERATIONS or topic.startswith(_OF_MODEL):
        return (MODEL,)
    named = [name for name in OPERATIONS if topic.split("_")[0] == name.split("_")[0]]
    if path.parent.name == "csrc":
        return (EXTENSION,)
    return tuple(named) or OPERATIONS


class Gate:
    """What the tests have shown.

    Attributes:
        groups: By name.
    """

    def __init__(self, groups: Mapping[str, Group] | None = None) -> None:
        """Nothing shown, by default."""
        names = *OPERATIONS, MODEL, EXTENSION
        self.groups = {name: Group() for name in names} | dict(groups or {})

    @classmethod
    def read(cls, files: Iterable[Path]) -> Gate:
        """From what the plugin `outcomes` wrote; a missing file is one without tests."""
        gate = cls()
        for path in files:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            gate._add([json.loads(line) for line in lines])
        return gate

    def _add(self, lines: list[dict]) -> None:
        collected: set[str] = set()
        outcomes: dict[str, str] = {}
        for line in lines:
            collected.update(line.get("collected", ()))
            if "test" in line and outcomes.get(line["test"]) != "failed":
                outcomes[line["test"]] = line["outcome"]
        for test in sorted(collected | set(outcomes)):
            for name in groups_of(test):
                group, outcome = self.groups[name], outcomes.get(test)
                group.passed += outcome == "passed"
                group.unfinished += outcome is None
                if outcome == "failed":
                    group.failed.append(test)

    def reasons(self, names: Collection[str]) -> dict[str, str]:
        """Why each of these is not proven; those that are have none."""
        return {name: self.groups[name].reason for name in names if self.groups[name].reason}

    def save(self, path: Path, key: Mapping[str, str]) -> None:
        """Keep it for later runs on the same sources and device."""
        content = {"key": dict(key), "groups": {k: asdict(v) for k, v in self.groups.items()}}
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path, key: Mapping[str, str]) -> Gate:
        """What was kept; nothing shown where it is of other sources or another device."""
        if not path.exists():
            return cls()
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["key"] != dict(key):
            return cls()
        return cls({name: Group(**group) for name, group in found["groups"].items()})
