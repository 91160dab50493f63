"""Commands that end with all they have started, also where this process is killed.

Each command has a session of its own, and tokens in its environment, which all that it starts in
turn inherit. `Watcher` starts this file as a process that waits for the end of its input, which is
that of the process that watches, and then kills whatever bears the token.
"""

import math
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CALL, COMMAND = "EFFASR_GPU_CALL", "EFFASR_GPU_COMMAND"  # variables of the tokens
GRACE_S = 8.0
TICK_S = 15.0
_KEPT_LINES = 5_000


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
    """Yield the processes that bear a token, perhaps among others, but this one and zombies."""
    name, number = f"{variable}=".encode(), token.encode()
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) != os.getpid():
            with suppress(OSError):  # gone meanwhile, or somebody else's
                entries = (entry / "environ").read_bytes().split(b"\0")
                if any(x.startswith(name) and number in x for x in entries):
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


@dataclass(frozen=True)
class Ended:
    """Outcome of a command: its exit code is negative for a signal, None past its time limit."""

    code: int | None
    seconds: float
    lines: Sequence[str]  # the last ones of stdout and stderr together

    @property
    def reason(self) -> str:
        """The last line that is not empty: of a Python program that failed, the exception."""
        last = next((line for line in reversed(self.lines) if line.strip()), "no output")
        if self.code is None:
            return f"ended after {self.seconds:.0f} s; last line: {last.strip()}"
        return f"exit code {self.code}: {last.strip()}"


def run(
    command: Sequence[str],
    *,
    seconds: float = math.inf,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    echo: Callable[[str], object] = lambda line: None,
    watch: Callable[[subprocess.Popen[str]], object] = lambda process: None,
    tick: Callable[[], object] = lambda: None,
) -> Ended:
    """Run a command in its own process group to its end or its limit, and end all that it started.

    `echo` is called with each line of the output, on another thread; `watch` with the process once
    it has been started, to send it a signal, say; `tick` now and then.
    """
    lines: deque[str] = deque(maxlen=_KEPT_LINES)
    began, token, code = time.monotonic(), new_token(), None
    inherited = dict(os.environ if environment is None else environment)
    tokens = " ".join(filter(None, [inherited.get(COMMAND), token]))
    process = subprocess.Popen(
        list(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**inherited, COMMAND: tokens},
        cwd=directory,
        start_new_session=True,
    )

    def pump() -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                lines.append(line.rstrip("\n"))
                echo(line)

    reader = threading.Thread(target=pump, daemon=True)
    reader.start()
    grace_s = GRACE_S / 4  # of a call that is being ended itself
    try:
        watch(process)
        while code is None and (remaining := began + seconds - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(min(remaining, TICK_S))
            if code is None:
                tick()
        grace_s = GRACE_S
    finally:
        _end_group(process, grace_s)
        kill(COMMAND, token)
        reader.join(grace_s)
    return Ended(code, time.monotonic() - began, list(lines))


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """SIGTERM raises SystemExit in the block, so that `run` ends what it has started."""
    if threading.current_thread() != threading.main_thread():
        yield
        return

    def leave(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_group(process: subprocess.Popen[str], grace_s: float) -> None:
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
