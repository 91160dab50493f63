"""Locks of files, which the kernel releases with the process that holds them.

The holder writes a record into the locked file, for those that wait or are refused. That is why
`fcntl` is used: libraries truncate the file when they open it, and may remove it.
"""

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

LOCK = "lock"
"""Name of a run's lock file. It stays after a process was killed: the lock counts, not the file."""

BUILD_PATIENCE_S = 600.0  # how long a builder may go without a progress report
_BUILD_POLL_S = 0.2

_RUN_PATIENCE_S = 120.0
"""Seconds to wait for the lock of a process that torchrun has replaced: a file server may keep the
lock of a lost host for its lease, 90 seconds by default with NFS."""
_RUN_POLL_S = 0.5
_TRIES = 100

_held: set[int] = set()
"""Descriptors that this process has locked. A fork shares the lock of an open file, so children
must close their copies: they would otherwise hold the lock of a process that was killed."""


def _close_in_child() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _open(file: Path) -> int:
    # Opened for writing, because NFS grants exclusive locks only then.
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def _lock(descriptor: int) -> None:
    """Lock a file; BlockingIOError if another process has, OSError if there are no locks."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _write(descriptor: int, record: str) -> None:
    content = record.encode()
    os.pwrite(descriptor, content, 0)
    os.ftruncate(descriptor, len(content))


@contextmanager
def writing_alone(folder: Path) -> Iterator[None]:
    """Refuse to write into a folder that another process writes into, until the block ends."""
    # The folder itself is locked, so that no file of the lock stays in it.
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    _held.add(descriptor)
    try:
        with suppress(OSError):
            try:
                _lock(descriptor)
            except BlockingIOError:
                raise ValueError(
                    f"{folder}: another process writes into this folder: wait for its end, or "
                    "choose another folder."
                ) from None
            # Of processes that were killed.
            for partial in folder.glob("*.????????.*.partial"):
                partial.unlink()
        yield
    finally:
        _held.discard(descriptor)
        os.close(descriptor)


class BuilderSilent(RuntimeError):
    """The process that builds a file has reported no progress for too long."""


@contextmanager
def building(
    file: Path, note: Callable[[str], None], patience_s: float = BUILD_PATIENCE_S
) -> Iterator[tuple[Callable[[str], None], bool]]:
    """Let one process build while the others wait and pass its progress to ``note``.

    Yields a function that publishes this process's progress (the others wait as long as it
    changes), and whether the file is locked: it is not where the file system has no locks.
    """
    descriptor = _open(file)
    _held.add(descriptor)
    try:
        is_locked = _wait_for_builder(descriptor, file, note, patience_s)
        name = f"{socket.gethostname()}, process {os.getpid()}"

        def report_progress(text: str) -> None:
            _write(descriptor, f"{text} ({name})")

        report_progress("begins to read")
        yield report_progress, is_locked
        os.ftruncate(descriptor, 0)
    finally:
        # A forked child has closed its copy already and must not release its parent's lock.
        if descriptor in _held:
            _held.discard(descriptor)
            os.close(descriptor)


def _wait_for_builder(
    descriptor: int, file: Path, note: Callable[[str], None], patience_s: float
) -> bool:
    """Wait for the lock; return whether the file system has locks."""
    last_report, changed = None, time.monotonic()
    while True:
        try:
            _lock(descriptor)
        except BlockingIOError:
            pass
        except OSError as error:
            log.debug("%s cannot be locked: %s", file, error)
            return False
        else:
            return True
        report = os.pread(descriptor, 4096, 0)
        if report != last_report:
            last_report, changed = report, time.monotonic()
            if report:
                note(f"waiting for another process: {report.decode(errors='replace')}")
        elif time.monotonic() - changed > patience_s:
            raise BuilderSilent(
                f"{file}: waited {patience_s:g} s for the process that reads the manifests, which "
                f"reports nothing ({report.decode(errors='replace') or 'no name'}): end it, or "
                "start with data.cache=null, with which every process reads the manifests itself."
            )
        time.sleep(_BUILD_POLL_S)


class RunLock:
    """Holds the lock of a run directory until `release` or the end of the process.

    Where the file system has no locks, nothing is locked, with a warning: a second training is not
    refused, but the first ends when `check` finds its name.

    Args:
        folder: Run directory; made if it does not exist.
        run: Name of this start of the run, shared by all of its processes.
        takeover: Whether this process replaces a lost one of the same run, whose lock is then
            ignored even if the process still exists.
    """

    def __init__(self, folder: Path, run: str, *, takeover: bool = False) -> None:
        self.run = run
        self._file = folder / LOCK
        self._descriptor: int | None = None
        self._is_unlocked = False
        self._made = [path for path in (folder, *folder.parents) if not path.exists()]
        deadline, has_warned = time.monotonic() + _RUN_PATIENCE_S, False
        while (holder := self._try()) is not None:
            if takeover and holder.get("run") == run:
                self._replace()
                return
            if not _is_replaced(holder) or time.monotonic() > deadline:
                raise ValueError(_refusal(folder, holder))
            if not has_warned:
                log.warning("waiting for a process that torchrun has replaced: %s", self._file)
            has_warned = True
            time.sleep(_RUN_POLL_S)

    def check(self) -> None:
        """Refuse, where the file system has no locks, that another training has begun here.

        What this one writes from now on would mix with its files.
        """
        if not self._is_unlocked:
            return
        with suppress(FileNotFoundError):
            holder = _parse(self._file.read_bytes())
            if holder.get("run", self.run) != self.run:
                raise ValueError(_refusal(self._file.parent, holder))

    def moved(self, folder: Path) -> None:
        """Record that the run directory was renamed to ``folder``."""
        self._file, self._made = folder / LOCK, []

    def release(self) -> None:
        """Release the lock, and remove empty folders that were made for it."""
        descriptor, self._descriptor = self._descriptor, None
        # A forked child has closed its copy already and must not release its parent's lock.
        if descriptor is None or descriptor not in _held:
            return
        is_current = _is_at(self._file, descriptor)
        if is_current:
            self._file.unlink()
        _held.discard(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
        if is_current:
            for folder in self._made:
                with suppress(OSError):
                    folder.rmdir()

    def _try(self) -> dict[str, Any] | None:
        for _ in range(_TRIES):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = _open(self._file)
            except FileNotFoundError:
                # Its holder has just removed the empty folder.
                continue
            try:
                _lock(descriptor)
            except BlockingIOError:
                with os.fdopen(descriptor, "rb") as file:
                    return _parse(file.read())
            except OSError as error:
                _warn(self._file.parent, error.strerror)
                try:
                    self._record(descriptor)
                finally:
                    os.close(descriptor)
                self._is_unlocked = True
                return None
            # The file may have been removed by its holder; the next process would open another one.
            if _is_at(self._file, descriptor):
                self._hold(descriptor)
                return None
            os.close(descriptor)
        raise OSError(f"{self._file} was removed repeatedly while it was being locked.")

    def _replace(self) -> None:
        """Replace the file of a holder whose lock is ignored by a locked one."""
        partial = self._file.with_name(f".{LOCK}.partial")
        partial.unlink(missing_ok=True)
        descriptor = _open(partial)
        _lock(descriptor)
        self._hold(descriptor)
        partial.replace(self._file)

    def _hold(self, descriptor: int) -> None:
        _held.add(descriptor)
        self._descriptor = descriptor
        self._record(descriptor)

    def _record(self, descriptor: int) -> None:
        holder = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
            "run": self.run,
            "job": torchrun_job()[0],
        }
        try:
            _write(descriptor, json.dumps(holder) + "\n")
            # For readers on other hosts.
            os.fsync(descriptor)
        except OSError as error:
            error.filename = str(self._file)
            raise


def _is_at(file: Path, descriptor: int) -> bool:
    """Return whether a path still refers to an open file."""
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _parse(content: bytes) -> dict[str, Any]:
    """Return the holder's record; an empty one if it has not been written yet."""
    with suppress(ValueError):
        holder = json.loads(content)
        if isinstance(holder, dict):
            return holder
    return {}


def torchrun_job() -> tuple[str | None, int]:
    """Return torchrun's id of the run, over all of its restarts, and how often it restarted."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    return os.environ.get("TORCHELASTIC_RUN_ID"), restarts


def launcher() -> dict[str, str]:
    """Return what tells this start of torchrun from others, of which many have the same id."""
    parent = os.getppid()
    with suppress(OSError):
        # The 22nd field is the start of the process; the second, its name, may contain blanks.
        fields = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()
        return {"host": socket.gethostname(), "process": f"{parent} {fields[19]}"}
    return {"host": socket.gethostname(), "process": str(parent)}


def _is_replaced(holder: dict[str, Any]) -> bool:
    """Return whether torchrun has started this process in place of the holder."""
    job, restarts = torchrun_job()
    return restarts > 0 and job is not None and holder.get("job") == job


def _refusal(folder: Path, holder: dict[str, Any]) -> str:
    if "pid" in holder:
        process = f"process {holder['pid']} on {holder['host']} has trained there since "
        process += holder["started"]
        command = f" with a checkpoint by `kill {holder['pid']}` on {holder['host']}"
    else:
        process, command = "another process has just begun to train there", ""
    return (
        f"`name`: the run directory {folder} must be free, but {process}: wait until "
        f"it has ended, or end it{command}, or choose another `name`."
    )


@cache
def _warn(folder: Path, reason: str) -> None:
    log.warning(
        "%s is on a file system without locks (flock: %s): a second training that writes there "
        "would not be refused",
        folder,
        reason,
    )
