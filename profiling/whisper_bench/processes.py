"""Runs each system in a separate process, so that their memory is separate in turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from whisper_bench.settings import Settings

_FOLDERS = (
    Path(__file__).parents[1],
    Path(__file__).parents[2],
    Path(__file__).parents[2] / "kernels",
)


class SystemFailed(Exception):
    """A system cannot be measured; the message says why."""


class SystemProcess:
    """A system in a separate process, which waits between requests.

    Attributes:
        system: Name of the system.
    """

    def __init__(self, settings: Settings, system: str) -> None:
        """Begin to load the system; `loaded` waits for it."""
        self.system = system
        self._log = (Path(settings.folder) / f"{settings.task}_{system}.log").open("w+")
        threads = str(settings.threads)
        paths = [*map(str, _FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "whisper_bench.worker", settings.to_json(), system],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._process.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # A process that has ended already was reported by `loaded` or `ask`.
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        self._log.close()

    def loaded(self) -> dict[str, Any]:
        """Wait until the system is there; returns ``version`` and ``base_bytes``.

        Raises:
            SystemFailed: It cannot be loaded.
        """
        return self._answer()

    def ask(self, request: str, *arguments: int) -> dict[str, Any]:
        """Send a request and wait for the answer.

        Raises:
            SystemFailed: The system could not do it, or its process ended.
        """
        assert self._process.stdin is not None
        # Of a process that has ended, the missing answer is reported.
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([request, *arguments]) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemFailed(f"its process ended with code {self._process.wait()}{self._end()}")
        reply = json.loads(line)
        if "error" in reply:
            raise SystemFailed(reply["error"].splitlines()[0])
        return reply

    def _end(self) -> str:
        self._log.seek(0)
        lines = self._log.read().split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        return f": {last}" if last else ""
