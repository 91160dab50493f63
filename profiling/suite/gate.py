"""Gate of measurements: a speed counts only if the tests of all that it uses have passed."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PACKAGE = ROOT / "kernels" / "effasr_kernels"
OPERATIONS = tuple(sorted(path.parent.name for path in _PACKAGE.glob("*/reference.py")))
MODEL = "model"
"""The group of the tests of the whole model and of its training."""
ENGINE = "decoding engine"
CONVERSATIONS = "conversations"
LOADER = "data loader"
GOSSIP = "gossip"
"""Asynchronous averaging over a network, which nothing here measures."""
ADAPTERS = {f"attention: {x}": x for x in ("varlen", *(f"flash_attn_{n}" for n in (2, 3, 4)))}
"""Other projects' attention behind ours: for each group, the backend whose rows rest on it."""
_FORWARD = (
    *("audio_windows", "normalize_features"),
    *("attention", "depthwise_conv", "strided_depthwise", "subsampling_stem", "batch_norm"),
    *("dropout_add_layer_norm", "bias_activation_dropout"),
)
TRAINING = (*_FORWARD, "update_running_statistics", "linear_cross_entropy", MODEL)
"""Operations of a training step of Canary, which is measured without SpecAugment."""
INFERENCE = (
    *(*_FORWARD, "append_to_pages", "decode_attention", "projected_top_k"),
    *(MODEL, ENGINE),
)
"""Operations of its inference."""
ANSWERING = (
    *("append_to_pages", "attention", "decode_attention", "gated_activation", "rms_norm"),
    CONVERSATIONS,
)
"""Operations of a language model that answers conversations."""
GROUPS = (*OPERATIONS, MODEL, ENGINE, CONVERSATIONS, LOADER, GOSSIP, *ADAPTERS)
_OF_OPERATIONS = ("gpu", "ops")
_OF_CONVERSATIONS = "gpu/test_conversations.py", "decoding/language_model/test_engine.py"


@dataclass
class Group:
    """Outcomes of the tests of an operation, or of the model.

    Attributes:
        passed: Number of passed tests.
        skipped: Number of tests that could not run here.
        failed: Failed tests.
        unfinished: Number of tests that were still to be run when time was over.
    """

    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)
    unfinished: int = 0

    @property
    def reason(self) -> str:
        """Why nothing that uses it is measured; empty where it may be.

        Tests that were not reached are no reason where others have passed: `note` tells of them.
        """
        if self.failed:
            return f"{len(self.failed)} of its tests failed, such as {self.failed[0]}"
        return "" if self.passed else "none of its tests has run: run the part tests"

    @property
    def note(self) -> str:
        """Said beside all that uses it, where its tests have run in part."""
        if self.reason or not self.unfinished:
            return ""
        run = self.passed + self.skipped
        return f"{run} of {run + self.unfinished} tests run, all green"

    @property
    def verdict(self) -> str:
        """Verdict for the table of tests."""
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        if not (self.passed or self.failed or self.unfinished):
            return f"none has passed{skipped}" if self.skipped else "none has run"
        if self.failed:
            return f"{self.reason}; {self.passed} passed{skipped}, {self.unfinished} not reached"
        if self.unfinished and not self.passed:
            return f"none of {self.unfinished + self.skipped} has passed{skipped}"
        return f"{self.note or f'{self.passed} passed'}{skipped}"


@cache
def _users(module: str) -> tuple[str, ...]:
    """Return the operations that import a module of `effasr_kernels.shared`."""
    if not (_PACKAGE / "shared" / f"{module}.py").exists():
        return ()
    words = f"effasr_kernels.shared.{module} import", f"effasr_kernels.shared import {module}"

    def imports(name: str) -> bool:
        sources = (path.read_text(encoding="utf-8") for path in (_PACKAGE / name).rglob("*.py"))
        return any(word in source for source in sources for word in words)

    return tuple(name for name in OPERATIONS if imports(name))


def groups_of(test: str) -> tuple[str, ...]:
    """Return the operations that a test covers.

    Args:
        test: Test id as in pytest, ``tests/gpu/test_ctc_loss.py::test_x[float32]``; or its file.
    """
    file, _, test_name = test.partition("::")
    path = Path(file)
    topic = path.stem.removeprefix("test_")
    if topic == "attention_packages":
        return _adapters(test_name)
    if topic.startswith("gossip"):
        return (GOSSIP,)
    if path.parent.name == "data":
        return (LOADER,)
    if topic in ("decoding_engine", "continuous_batching"):
        return (ENGINE,)
    if file.endswith(_OF_CONVERSATIONS):
        return (CONVERSATIONS,)
    if path.parent.name not in _OF_OPERATIONS or topic.startswith("training"):
        return (MODEL,)
    if topic.startswith("operation"):
        return tuple(name for name in OPERATIONS if name in test_name) or OPERATIONS
    named = [name for name in OPERATIONS if topic.split("_")[0] == name.split("_")[0]]
    # What they share, such as launches, is proven for those that use it.
    return tuple(named) or _users(topic) or OPERATIONS


def _adapters(test: str) -> tuple[str, ...]:
    """Return the packages of a test by its name or parameters; all packages of a file."""
    by_name = {"version_3": "flash_attn_3", "version_4": "flash_attn_4"}
    words = {backend for word, backend in by_name.items() if word in test}
    found = [group for group, backend in ADAPTERS.items() if backend in test or backend in words]
    return tuple(found) or tuple(ADAPTERS)


class Gate:
    """Results of the tests.

    Attributes:
        groups: Groups by name.
    """

    def __init__(self, groups: Mapping[str, Group] | None = None) -> None:
        """Nothing shown, by default."""
        self.groups = {name: Group() for name in GROUPS} | dict(groups or {})

    @classmethod
    def read(cls, files: Iterable[Path]) -> Gate:
        """Read the files of the plugin `outcomes`; a missing file counts as one without tests."""
        gate = cls()
        for path in files:
            collected, outcomes = outcomes_in(path)
            gate._add(collected, outcomes)
        return gate

    def _add(self, collected: Collection[str], outcomes: Mapping[str, str]) -> None:
        for test in sorted({*collected, *outcomes}):
            for name in groups_of(test):
                group, outcome = self.groups[name], outcomes.get(test)
                group.passed += outcome == "passed"
                group.skipped += outcome == "skipped"
                group.unfinished += outcome is None
                if outcome == "failed":
                    group.failed.append(test)

    def reasons(self, names: Collection[str]) -> dict[str, str]:
        """Return why each of these is not proven, without those that are."""
        return {name: self.groups[name].reason for name in names if self.groups[name].reason}

    def note(self, names: Collection[str]) -> str:
        """Return the remark on a measurement that uses these operations."""
        notes = {name: self.groups[name].note for name in names}
        return "; ".join(f"{name}: {note}" for name, note in notes.items() if note)

    def lacking(self, names: Collection[str]) -> list[str]:
        """Return the operations with tests still to run; failed ones stay failed."""
        groups = {name: self.groups[name] for name in names}
        return [
            name
            for name, group in groups.items()
            if group.unfinished or not (group.passed or group.skipped or group.failed)
        ]

    def save(self, path: Path, key: Mapping[str, str]) -> None:
        """Keep it for later runs on the same sources and device."""
        content = {"key": dict(key), "groups": {k: asdict(v) for k, v in self.groups.items()}}
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)


def is_of(path: Path, key: Mapping[str, str]) -> bool:
    """Return whether what `Gate.save` wrote is of these sources and this device."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["key"] == dict(key)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def outcomes_in(path: Path) -> tuple[set[str], dict[str, str]]:
    """Return the tests in a file of the plugin `outcomes`, and how those ended that have run."""
    collected: set[str] = set()
    outcomes: dict[str, str] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:
            # The last one, of a process that was killed while it wrote.
            continue
        collected.update(line.get("collected", ()))
        if "test" in line and outcomes.get(line["test"]) != "failed":
            outcomes[line["test"]] = line["outcome"]
    return collected, outcomes
