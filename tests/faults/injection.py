"""Runs a scenario again and again, with a fault at one call of the file system after another.

A scenario is a module with functions. ``prepare(folder)`` makes the state before. In a process
of its own, ``act(folder)`` changes it, with a fault at one of the calls that change files below
the folder; it may return a text or raise. ``check(folder, fault, error)`` raises where the state is
not one that the fault may leave.

    LD_PRELOAD=... python -m tests.faults.injection MODULE FAULT STRIDE FOLDER
"""

import ctypes
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

FAULTS = ("none", "kill", "torn", "full", "broken", "read_only", "vanished")
"""``kill``: SIGKILL before the call. ``torn``: a write writes half; the next call is ``kill``.
``full``: no space from that call on, a write first writes half. ``broken``: that call alone fails
with EIO. ``read_only``: every change from that call on fails. ``vanished``: the folder is renamed
before the call. In the order of `inject.c`."""

REASONS = {
    "full": "No space left on device",
    "broken": "Input/output error",
    "read_only": "Read-only file system",
    "vanished": "No such file or directory",
}


@dataclass(frozen=True)
class Outcome:
    # `error`: what `act` raised, as the command line shows it; "killed", or "" where it returned.
    # `problem`: why the state is wrong; "" where it is not.

    fault: str
    call: int
    error: str
    problem: str


def build(folder: Path) -> Path:
    library = folder / "libinject.so"
    if not library.exists():
        local = folder / f"{os.getpid()}.so"
        command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(local)]
        command += [str(Path(__file__).with_name("inject.c")), "-ldl"]
        subprocess.run(command, check=True, capture_output=True, text=True)
        local.replace(library)
    return library


def inject(
    library: Path, module: str, fault: str, folder: Path, *, stride: int = 1, limit_s: float = 280
) -> list[Outcome]:
    """Return the outcomes of a fault at every ``stride``-th call of a scenario."""
    environment = os.environ | {
        "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.faults.injection", module, fault, str(stride)]
    done = subprocess.run(
        [*command, str(folder)], env=environment, cwd=ROOT, capture_output=True, text=True,
        timeout=limit_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [Outcome(**json.loads(line)) for line in done.stdout.splitlines()]


def _in_child(run: Callable[[], Any]) -> Any:
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        try:
            os.write(send, json.dumps(run()).encode())
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, f"the child died with {status}"
        return "killed"
    return json.loads(answer)


def _act(scenario: Any, folder: Path, library: ctypes.CDLL, fault: str, call: int) -> list[Any]:
    """Return the number of calls, and the error as the command line shows it."""
    library.inject_arm(os.fsencode(folder), FAULTS.index(fault), call)
    try:
        text = scenario.act(folder) or ""
    except BaseException as error:
        text = _shown(error)
    finally:
        calls = library.inject_count()
        library.inject_arm(b"", 0, 0)
    return [calls, text[:20_000]]


def _check(scenario: Any, folder: Path, fault: str, error: str) -> str:
    try:
        _check_error(fault, error, folder)
        scenario.check(folder, fault, error)
    except Exception:
        return traceback.format_exc()[-5000:]
    return ""


def _check_error(fault: str, error: str, folder: Path):
    """Check that an error is one line with a path and the reason."""
    assert not error.startswith("TRACEBACK"), error
    if error and error != "killed":
        assert "\n" not in error
        assert len(error) < 600, error
        assert str(folder) in error, f"no path in {error!r}"
        assert REASONS[fault] in error, f"no reason in {error!r}"


def _shown(error: BaseException) -> str:
    from effasr.cli.main import explain

    if not isinstance(error, OSError | ValueError | RuntimeError):
        return "TRACEBACK " + "".join(traceback.format_exception(error))
    return explain(error)


def main(module: str, fault: str, stride: str, root: str):
    scenario, folder = importlib.import_module(module), Path(root) / "state"
    library = ctypes.CDLL(os.environ.pop("LD_PRELOAD"))
    library.inject_arm.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long]
    library.inject_count.restype = ctypes.c_long
    before = Path(root) / "before"
    before.mkdir(parents=True)
    scenario.prepare(before)
    # A collection in a child would write to the header of each object, and so copy its page.
    gc.collect()
    gc.freeze()
    call = 1
    while True:
        for path in (folder, folder.with_name("state.gone")):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(before, folder, symlinks=True)
        done = _in_child(partial(_act, scenario, folder, library, fault, call))
        calls, error = (call, done) if done == "killed" else done
        if calls < call:
            break
        problem = _in_child(partial(_check, scenario, folder, fault, error))
        outcome = Outcome(fault, call, error, problem)
        sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
        sys.stdout.flush()
        call += int(stride)


if __name__ == "__main__":
    main(*sys.argv[1:])
