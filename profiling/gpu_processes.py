"""Commands that end with all they have started, also where this process is killed.

Each command has a session of its own, and tokens in its environment, which all that it starts in
turn inherit. `Watcher` starts this file as a process that waits for the end of its input, which is
that of the process that watches, and then kills whatever bears the token.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CALL, COMMAND = "EFFASR_GPU_CALL", "EFFASR_GPU_COMMAND"  # variables of the tokens
GRACE_S = 8.0  # more than benchmarks give to what they start
TICK_S = 15.0


def environment(*, dry: bool, **variables: str) -> dict[str, str]:
    """Return the variables of commands that import this repository; a dry run sees no GPU."""
    sources = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "profiling")]
    paths = os.pathsep.join(filter(None, [*sources, os.environ.get("PYTHONPATH")]))
    inherited = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    cpu = {"CUDA_VISIBLE_DEVICES": "-1", "OMP_NUM_THREADS": "1"} if dry else {}
    return {**inherited, "PYTHONPATH": paths, **variables, **cpu}


def new_token() -> str:
    return uuid.uuid4().hex


def marked(variable: str, token: str) -> Iterator[int]:
    """Yield the processes that bear a token, but this one and zombies."""
    text = f"{variable}={token}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):  # gone meanwhile, or somebody else's
                if text in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def kill(variable: str, token: str) -> None:
    for _ in range(20):  # some are started while others are being killed
        numbers = list(marked(variable, token))
        for number in numbers:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        if not numbers:
            return
        time.sleep(0.05)


class Watcher:
    def __init__(self, token: str) -> None:
        command = [sys.executable, "-S", "-E", __file__, token]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def close(self) -> None:
        self._process.communicate()


class Ended(NamedTuple):
    code: int | None  # None: it was ended at its time limit
    seconds: float


def run(
    command: Sequence[str],
    seconds: float,
    log: Path,
    environment: Mapping[str, str],
    directory: Path,
    tick: Callable[[], object] = lambda: None,
) -> Ended:
    """Run a command to its end or its limit; ``tick`` is called now and then."""
    began, token, code = time.monotonic(), new_token(), None
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        process = subprocess.Popen(
            list(command),
            **{"cwd": directory, "env": {**environment, COMMAND: token}},
            **{"stdout": file, "stderr": subprocess.STDOUT, "start_new_session": True},
        )
    grace_s = GRACE_S / 4  # of a call that is being ended itself
    try:
        while code is None and (remaining := began + seconds - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(min(remaining, TICK_S))
            if code is None:
                tick()
        grace_s = GRACE_S
    finally:
        _end_group(process, grace_s)
        kill(COMMAND, token)
    return Ended(code, time.monotonic() - began)


def _end_group(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Ask the group to end, and wait for it a little; also where its leader has ended."""
    until = time.monotonic() + grace_s
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < until:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    sys.stdin.read()
    kill(CALL, sys.argv[1])
