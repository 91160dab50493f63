"""Copies a run directory to an object store while the run trains in a folder of this machine.

A checkpoint is whole there when its manifest.json is, which is written last and removed first.
"""

import json
import logging
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from effasr.checkpoint import MANIFEST, newest_first
from effasr.data.checksums import verify
from effasr.data.locks import LOCK
from effasr.untrusted.documents import read_json_object
from effasr.untrusted.remote import CACHE, canonical, filesystem, retried

log = logging.getLogger(__name__)

_EVERY_S = 10.0  # between two looks for files that have changed
_FLUSH_S = 600.0  # most that the end of a run waits for its last files
_STALE_S = 45.0  # a run that has not renewed its lock for so long has ended

_OF_STEP = re.compile(r"checkpoints/(step_\d+)/(.+)")
_NOT_COPIED = re.compile(
    r"(^|/)\.[^/]+\.(partial|removed|outdated)(/|$)|\.partial$|^lock$|^restarted$"
)

T = TypeVar("T")


class RemoteRun:
    """The copy of a run directory; the process that holds the directory's lock has it."""

    def __init__(self, url: str, folder: Path, keep: int, run: str) -> None:
        self._url, self._folder, self._keep, self._run = canonical(url), folder, keep, run
        self._sent: dict[str, tuple[int, int]] = {}  # size and time of each file when it was sent
        self._remote: set[str] = set()
        self._is_locked = False
        self._problem = ""
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._copy, daemon=True, name="copy of the run")
        if os.environ.get("LOCAL_WORLD_SIZE", "1") != os.environ.get("WORLD_SIZE", "1"):
            rule = f"`output` may be a URL on several nodes only with {CACHE}"
            if CACHE not in os.environ:
                raise ValueError(
                    f"{rule}, a folder that all nodes share, in which checkpoints are written."
                )

    def fetch(self, *, must_restart: bool) -> None:
        """Lock the copy, and get its newest whole checkpoint, if it is newer than that here."""
        log.warning("training in %s, copied to %s while it trains", self._folder, self._url)
        self._lock()
        steps: dict[str, dict[str, int]] = {}
        if must_restart:
            return
        for name, size in self._list().items():
            if (match := _OF_STEP.fullmatch(name)) is not None:
                steps.setdefault(match[1], {})[match[2]] = size
        here = [path.name for path in newest_first(self._folder / "checkpoints")]
        for step in sorted(steps, reverse=True):
            if here and step <= here[0]:
                break
            if self._fetch_step(step, steps[step]):
                self._fetch_others(steps)
                break
        else:
            if any(MANIFEST in files for files in steps.values()):
                raise ValueError(
                    f"no checkpoint of {self._url} can be read: restore one, or begin anew with "
                    "training.restart=true."
                )
        for path in newest_first(self._folder / "checkpoints"):
            names = {f"checkpoints/{path.name}/{name}" for name in steps.get(path.name, ())}
            if f"checkpoints/{path.name}/{MANIFEST}" in names:
                self._sent |= {name: _version(self._folder / name) for name in names}

    def set_aside(self) -> None:
        """Rename the copy as `RunDirectory.set_aside` renames a folder."""
        names = sorted((name for name in self._list() if name != LOCK), key=_order)
        if not names:
            return
        number = 1
        while self._call(lambda fs, path, n=number: fs.exists(f"{path}.old-{n}")):
            number += 1
        aside = f".old-{number}"
        for name in names:
            self._call(lambda fs, path, n=name: fs.cp_file(f"{path}/{n}", f"{path}{aside}/{n}"))
        self._remove(names[::-1])
        log.warning("renamed the earlier run %s to %s%s", self._url, self._url, aside)

    def start(self) -> None:
        """Begin to copy what changes."""
        if not self._thread.is_alive() and not self._ends.is_set():
            self._thread.start()

    def close(self) -> None:
        """Copy what is left, for a limited time, and release the lock."""
        self._ends.set()
        if self._thread.ident is None:
            if self._is_locked:
                self._remove([LOCK])
            return
        self._thread.join(_FLUSH_S)
        if self._thread.is_alive() or self._problem:
            log.warning(
                "%s is not complete%s: the same command copies what is missing from %s",
                *(self._url, f" ({self._problem})" if self._problem else "", self._folder),
            )

    def _copy(self) -> None:
        while True:
            is_last = self._ends.wait(_EVERY_S)
            try:
                holder = self._holder()
                if holder and holder.get("run") != self._run:
                    self._is_locked = False
                    raise ValueError(
                        f"{self._url}: another run, on {holder.get('host')}, writes there now: "
                        f"nothing more is copied; {self._folder} has all of this run."
                    )
                self._write_lock()
                self._send_all()
                self._remove_outdated()
                if is_last:
                    self._remove([LOCK])
                self._problem = ""
            except Exception as error:  # training goes on; the next look tries again
                problem = " ".join(str(error).split())
                if problem != self._problem:
                    log.warning("%s", problem)
                self._problem = problem
            if is_last or not self._is_locked:
                return

    def _send_all(self) -> None:
        files = [path for path in self._folder.rglob("*") if path.is_file()]
        names = sorted(str(path.relative_to(self._folder)) for path in files)
        # Logs have at least the lines of a checkpoint, and pointers name what is whole.
        for name in sorted(names, key=_order):
            with suppress(FileNotFoundError):  # it was removed meanwhile
                version = _version(self._folder / name)
                if _NOT_COPIED.search(name) or self._sent.get(name) == version:
                    continue
                self._call(lambda fs, path, name=name: fs.put_file(*self._places(path, name)))
                self._sent[name] = version
                self._remote.add(name)

    def _places(self, path: str, name: str) -> tuple[str, str]:
        return str(self._folder / name), f"{path}/{name}"

    def _remove_outdated(self) -> None:
        """Remove checkpoints that are neither here nor among the newest, and later ones."""
        here = {path.name for path in newest_first(self._folder / "checkpoints")}
        steps: dict[str, list[str]] = {}
        for name in self._remote:
            if (match := _OF_STEP.fullmatch(name)) is not None:
                steps.setdefault(match[1], []).append(name)
        if not here:
            return
        past = {step for step in steps if step <= max(here)} | here
        kept = here | set(sorted(past)[-self._keep :])
        for step in sorted(steps.keys() - kept):
            self._remove(sorted(steps[step], key=_order, reverse=True))

    def _remove(self, names: list[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                self._call(lambda fs, path, name=name: fs.rm_file(f"{path}/{name}"))
            self._sent.pop(name, None)
            self._remote.discard(name)

    def _fetch_step(self, step: str, files: dict[str, int]) -> bool:
        """Download a checkpoint; False, with a line, if it is not whole."""
        path = self._folder / "checkpoints" / step
        partial = path.with_name(f".{step}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            if MANIFEST not in files:
                raise ValueError("its manifest.json is missing")
            for name in files:
                self._download(f"checkpoints/{step}/{name}", partial / name)
            verify(partial, read_json_object(partial / MANIFEST)["files"])
        except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
            log.warning(
                "%s/checkpoints/%s is not whole (%s): the checkpoint before it is used",
                *(self._url, step, " ".join(str(error).split())),
            )
            return False
        partial.rename(path)
        log.warning("downloaded %s/checkpoints/%s", self._url, step)
        return True

    def _fetch_others(self, steps: dict[str, dict[str, int]]) -> None:
        """Download logs, pointers, and the best checkpoint."""
        for name in self._remote:
            if not name.startswith("checkpoints/step_") and not _NOT_COPIED.search(name):
                self._download(name, self._folder / name)
        with suppress(OSError):
            best = (self._folder / "checkpoints" / "best").read_text(encoding="utf-8").strip()
            if best in steps and not (self._folder / "checkpoints" / best).exists():
                self._fetch_step(best, steps[best])

    def _download(self, name: str, file: Path) -> None:
        canonical(f"{self._url}/{name}")  # no .. in it
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.name}.partial")
        self._call(lambda fs, path: fs.get_file(f"{path}/{name}", str(partial)))
        partial.replace(file)

    def _list(self) -> dict[str, int]:
        def find(fs: Any, path: str) -> Iterator[tuple[str, int]]:
            fs.invalidate_cache()
            for name, info in fs.find(path, detail=True).items():
                yield name[len(path) :].strip("/"), info["size"]

        files = self._call(lambda fs, path: dict(find(fs, path)))
        self._remote = set(files)
        return files

    def _holder(self) -> dict[str, Any]:
        with suppress(FileNotFoundError, ValueError):
            return json.loads(self._call(lambda fs, path: fs.cat_file(f"{path}/{LOCK}")))
        return {}

    def _lock(self) -> None:
        """Wait until another run's lock is stale; refuse if that run renews it."""
        holder = self._holder()
        if holder and holder.get("host") != socket.gethostname():
            # This machine's folder is locked, so that a run of this machine has ended.
            log.warning("%s: waiting %.0f s for the run of %s", self._url, _STALE_S, holder["host"])
            time.sleep(_STALE_S)
            if self._holder() not in ({}, holder):
                raise ValueError(
                    f"`name`: {self._url} must be free, but process {holder.get('pid')} on "
                    f"{holder.get('host')} trains there: end it, or choose another `name`."
                )
        self._write_lock()
        self._is_locked = True

    def _write_lock(self) -> None:
        text = {"run": self._run, "host": socket.gethostname(), "pid": os.getpid()}
        content = json.dumps(text | {"beat": time.monotonic()}).encode()
        self._call(lambda fs, path: fs.pipe_file(f"{path}/{LOCK}", content))

    def _call(self, work: Any) -> Any:
        return retried(self._url, lambda: work(*filesystem(self._url)))


def _order(name: str) -> tuple[int, str, bool, str]:
    """Return the rank in which files are sent."""
    match = _OF_STEP.fullmatch(name)
    if match is None:
        return 2 if name.startswith("checkpoints/") else 0, "", False, name
    return 1, match[1], match[2] == MANIFEST, name


def _version(path: Path) -> tuple[int, int]:
    state = path.stat()
    return state.st_size, state.st_mtime_ns
