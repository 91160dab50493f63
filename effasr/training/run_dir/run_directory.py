"""The files of a run, written by rank 0: they are the interface to everything else."""

import json
import logging
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from effasr.config import RUN_CONFIG
from effasr.data.locks import LOCK, RunLock, launcher, torchrun_job
from effasr.training.run_dir.loggers import Loggers
from effasr.untrusted.display import utf8
from effasr.untrusted.documents import with_checksum_line
from effasr.untrusted.remote import shown

if TYPE_CHECKING:
    from effasr.training.run_dir.remote_run import RemoteRun

log = logging.getLogger(__name__)

METRICS, VALIDATION, WARNINGS, SKIPPED, UNREADABLE, DROPPED, BLEND = (
    "metrics.jsonl",
    "validation.jsonl",
    "warnings.jsonl",
    "skipped.jsonl",
    "unreadable.jsonl",
    "dropped.jsonl",
    "blend.json",
)

RESTARTED = "restarted"
"""Name of the file that names torchrun's start of a run with ``training.restart``."""

_IDS = "loggers.json"

_GROWING = (METRICS, VALIDATION, WARNINGS, SKIPPED, UNREADABLE)


class RunDirectory:
    """``runs/NAME``.

    config.yaml        resolved configuration, with a checksum in its last line
    metrics.jsonl      one object per logged step
    validation.jsonl   one object per validation
    warnings.jsonl     one object per condition that began or ended, with cause and remedy
    skipped.jsonl      one object per skipped update, with its utterances
    unreadable.jsonl   one object per utterance or noise that could not be read
    dropped.jsonl      one object per utterance that cannot be trained on
    blend.json         amounts drawn from every source, and the intended shares
    tensorboard/       the same figures as curves
    loggers.json       the ids of the run in other loggers
    checkpoints/       see `effasr.checkpoint`
    evaluation/        the last validation
    lock               exists during training and names the training process
    restarted          names torchrun's start of the run, if it had ``training.restart``
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._loggers: Loggers | None = None
        self._lock: RunLock | None = None
        self._sums: dict[str, list[int]] = {}
        self._expected: dict[str, list[int]] = {}
        self.remote: RemoteRun | None = None  # The copy in an object store
        self.must_restart = False  # Whether `open` sets the directory of an earlier run aside

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def lock(self, run: str, *, takeover: bool = False) -> None:
        self._lock = RunLock(self.path, run, takeover=takeover)

    def check_lock(self) -> None:
        if self._lock is not None:
            self._lock.check()

    def restart(self) -> Path | None:
        """Set an existing directory aside for ``training.restart``: see `set_aside`.

        When torchrun starts processes again after a failure, it gives them the same arguments. The
        directory is then that of the same run, and remains.
        """
        if not self.begins_anew():
            return None
        job, aside = torchrun_job()[0], self.set_aside()
        if self.remote is not None:
            self.remote.set_aside()
        if job is not None:
            self.path.mkdir(parents=True, exist_ok=True)
            _replace(self.path / RESTARTED, json.dumps({"job": job, **launcher()}) + "\n")
        return aside

    def begins_anew(self) -> bool:
        """Return whether this start is not torchrun's restart of one that has begun anew."""
        job, restarts = torchrun_job()
        if job is None:
            return True
        local, before = {"job": job, **launcher()}, {}
        with suppress(OSError, ValueError):
            before = json.loads((self.path / RESTARTED).read_text(encoding="utf-8"))
        # Where nodes come and go, torchrun restarts without counting it. Rank 0 may have moved.
        has_moved = before.get("job") == job and before.get("host") != local["host"]
        return before != local and not (restarts and has_moved)

    def set_aside(self) -> Path | None:
        """Rename an existing directory to the first free ``NAME.old-1``, ``NAME.old-2``, ..."""
        selected = (LOCK, RESTARTED)
        if not self.path.exists() or all(file.name in selected for file in self.path.iterdir()):
            return None
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.old-{number}")).exists():
            number += 1
        self.path.rename(aside)
        if self._lock is not None:
            # The new folder is locked first, so that one of them is locked at any time.
            before, self._lock = self._lock, None
            before.moved(aside)
            try:
                self.lock(before.run)
            finally:
                before.release()
        return aside

    def state_dict(self) -> dict[str, Any]:
        """Return sizes and checksums of the growing files."""
        return {"sums": {name: list(of) for name, of in self._sums.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let `open` compare the growing files with a `state_dict`."""
        self._expected = dict(state["sums"])

    def open(self, config: str, step: int, *, loggers: Sequence[str] = ()) -> None:
        """Open the files for writing from a step on; remove later lines.

        Lines that were damaged since they were written give a warning: nothing depends on them.
        """
        if self.must_restart and (renamed := self.restart()):
            log.warning("renamed the earlier run %s to %s", self.path, renamed)
        self.must_restart = False
        self.path.mkdir(parents=True, exist_ok=True)
        if self.remote is not None:
            self.remote.start()
        _replace(self.path / RUN_CONFIG, with_checksum_line(config))
        for name in _GROWING:
            self._sums[name] = _truncate(self.path / name, step, self._expected.get(name))
        if self._loggers is not None:
            self._loggers.close()
        ids = {}
        with suppress(OSError, ValueError):
            ids = json.loads((self.path / _IDS).read_text(encoding="utf-8"))
        self._loggers = Loggers(loggers, self.path, ids, yaml.safe_load(config) or {}, step)
        if self._loggers.ids:
            _replace(self.path / _IDS, json.dumps({**ids, **self._loggers.ids}) + "\n")

    def close(self) -> None:
        try:
            if self._loggers is not None:
                self._loggers.close()
        finally:
            if self.remote is not None:
                self.remote.close()
            if self._lock is not None:
                self._lock.release()

    def metrics(self, line: Mapping[str, Any]) -> None:
        self._append(METRICS, line)
        if self._loggers is not None:
            self._loggers.figures("train", line)

    def validation(self, line: Mapping[str, Any]) -> None:
        self._append(VALIDATION, line)
        if self._loggers is not None:
            group = f"validation/{line['set']}"
            self._loggers.figures(group, line)
            texts = (
                f"{each['id']}\n\nreference: {each['reference']}\n\n"
                f"hypothesis: {each['hypothesis']}"
                for each in line.get("examples") or ()
            )
            if text := "\n\n".join(texts):
                self._loggers.text(f"{group}/examples", text, line["step"])

    def warning(self, line: Mapping[str, Any], text: str) -> None:
        """Add a line to warnings.jsonl, and its text to the loggers."""
        self._append(WARNINGS, line)
        if self._loggers is not None:
            self._loggers.text("warnings", text, line["step"])

    def skipped(self, line: Mapping[str, Any]) -> None:
        self._append(SKIPPED, line)

    def unreadable(self, lines: Iterable[Mapping[str, Any]]) -> None:
        for line in lines:
            self._append(UNREADABLE, line)

    def dropped(self, lines: Iterable[Mapping[str, Any]]) -> None:
        _replace(self.path / DROPPED, "".join(_encode(line) for line in lines))

    def blend(self, step: int, sources: list[dict[str, Any]]) -> None:
        """Write blend.json: the amounts drawn from every source up to a step."""
        content = {"step": step, "sources": sources}
        _replace(self.path / BLEND, json.dumps(content, ensure_ascii=False, indent=1) + "\n")

    def _append(self, name: str, line: Mapping[str, Any]) -> None:
        data = utf8(_encode(line))
        self.check_lock()
        with _naming(self.path / name), (self.path / name).open("ab") as file:
            file.write(data)
        size, value = self._sums.get(name, (0, 0))
        self._sums[name] = [size + len(data), zlib.crc32(data, value)]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file; damaged lines, and a truncated last one, are left out."""
    return [json.loads(text) for text in _readable(path)[0]]


def _readable(path: Path) -> tuple[list[str], list[int]]:
    """Return the lines that are JSON objects, and the numbers of the others but the last."""
    if not path.is_file():
        return [], []
    lines, damaged = [], []
    # Not `splitlines`, which would also split at other characters in names.
    texts = path.read_bytes().decode("utf-8", "replace").removesuffix("\n").split("\n")
    for number, text in enumerate(texts, 1):
        try:
            if isinstance(json.loads(text), dict):
                lines.append(text)
                continue
        except (ValueError, RecursionError):
            pass
        damaged.append(number)
    return lines, [number for number in damaged if number < len(texts)]


def _encode(line: Mapping[str, Any]) -> str:
    return shown(json.dumps(_finite(line), ensure_ascii=False, allow_nan=False)) + "\n"


def _finite(value: Any) -> Any:
    """Replace numbers that JSON does not have by null."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _truncate(path: Path, step: int, expected: list[int] | None) -> list[int]:
    """Remove lines of later steps; return size and checksum of what is left."""
    if not path.is_file():
        if expected is not None and expected[0]:
            log.warning("%s is missing, and begins anew at step %d.", path, step)
        return [0, 0]
    lines, damaged = _readable(path)
    if damaged:
        log.warning("%s is damaged: line %d is left out.", path, damaged[0])
    elif expected is not None and _sum(path.read_bytes()[: expected[0]]) != expected:
        log.warning("%s does not match its checksum: a line of it was changed.", path)
    elif expected is not None:
        # A validation may have written lines of this step since; it is made again.
        content = path.read_bytes()[: expected[0]].decode("utf-8", "replace")
        lines = content.removesuffix("\n").split("\n") if content else []
    # A line without a step is none of this run.
    selected = [text for text in lines if json.loads(text).get("step", step + 1) <= step]
    content = "".join(f"{text}\n" for text in selected)
    _replace(path, content)
    return _sum(utf8(content))


def _sum(content: bytes) -> list[int]:
    return [len(content), zlib.crc32(content)]


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with _naming(path):
        with partial.open("wb") as file:
            file.write(utf8(text))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Context in which a file is written; its errors name the file."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from error
