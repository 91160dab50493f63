"""Processes of tests that need not import torch again: forks of one that has.

Torch and the trainer take seconds of processor time to import, most of what a short run of several
ranks takes. `Preloaded` is ``python -m MODULE ARGUMENT...``, or ``python FILE.py ARGUMENT...``,
without that: a server, started with the first of them, imports once, and each process is a fork of
it in which the module runs as ``__main__``. It is a child of the process that asked for it, which
can wait for it and kill it. Unless it ends with an exception, it ends as a fork of
`multiprocessing` does: without freeing what the server imported, which would copy most pages of
memory that it shares with the server.

What a test says of the start or the end of an interpreter, such as imports or finalization, needs
a real one. ``torch.distributed.run`` may be the module: the ranks that it starts are interpreters.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]

_IMPORTED = (
    # Functions that ranks call are in modules of tests.
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.run",
    "effasr.cli.main",
    "effasr.training.trainer",
)
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Libraries start no threads then when they are imported, which a fork would lack."""
_PR_SET_CHILD_SUBREAPER = 36
_MOST_BYTES = 2**18


class Preloaded(subprocess.Popen[str]):
    """A process that runs a module or a ``.py`` file as ``__main__``, with pipes for its output.

    With ``new_session`` it leads a session and a process group of its own.
    """

    def __init__(self, module, *arguments: str, env, cwd=ROOT, new_session=False):
        self._new_session = new_session
        command = [module, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        super().__init__(command, env=env, cwd=cwd, text=True, **pipes)

    def _execute_child(self, args: list[str], *rest: Any) -> None:  # type: ignore[override]
        # What Popen does between opening the pipes and reading from them; the names of `rest` are
        # those of CPython 3.11 to 3.14.
        (_, _, _, _, cwd, env, _, _, _, _, _, read_out, write_out, read_error, write_error, *_) = (
            rest
        )
        assert read_out != -1
        assert read_error != -1
        provided = {"command": args, "cwd": str(cwd), "env": dict(env), "leads": self._new_session}
        request = json.dumps(provided).encode()
        assert len(request) < _MOST_BYTES
        server = _server()
        libc = ctypes.CDLL(None)
        # An orphan becomes the child of its closest ancestor that is a subreaper.
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            socket.send_fds(server, [request], [write_out, write_error])
            self.pid = int(server.recv(64))
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)
            os.close(write_out)
            os.close(write_error)
        self._child_created = True


def finished(module, *arguments, limit_s=240.0, cwd=ROOT):
    process = Preloaded(str(module), *arguments, env=dict(os.environ), cwd=cwd)
    try:
        out, error = process.communicate(timeout=limit_s)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, error)


@cache
def _server() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.preloaded", str(theirs.fileno())],
        env=os.environ | _ENVIRONMENT | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"},
        cwd=ROOT,
        pass_fds=[theirs.fileno()],
        # No terminal: Python would write there line by line, as its forks would.
        stdout=subprocess.DEVNULL,
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _serve(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Fork a process for each request; returns the request in each, and None at the end."""
    while True:
        message, provided, _, _ = socket.recv_fds(channel, _MOST_BYTES, 2)
        if not message:
            return None
        _wait_for_other_threads()
        read, write = os.pipe()
        between = os.fork()
        if not between:
            between = os.getpid()
            process = os.fork()
            if process:
                os.write(write, str(process).encode())
                os._exit(0)
            for descriptor in (read, write, channel.detach()):
                os.close(descriptor)
            # Not before it is the child of who asked.
            while os.getppid() == between:
                time.sleep(0.001)
            return json.loads(message), provided
        os.waitpid(between, 0)
        channel.send(os.read(read, 64))
        for descriptor in (read, write, *provided):
            os.close(descriptor)


def _wait_for_other_threads(most_s: float = 60.0) -> None:
    """Wait until this is the only thread, because a fork has none of the others."""
    until = time.monotonic() + most_s
    while len(os.listdir("/proc/self/task")) > 1:
        assert time.monotonic() < until, "another thread does not end, which a fork would lack"
        time.sleep(0.01)


def _main(channel: int) -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    # A collection in a fork would write to the header of each object, and so copy its page.
    gc.collect()
    gc.freeze()
    result = _serve(socket.socket(fileno=channel))
    if result is None:
        return
    request, outputs = result
    for descriptor, output in zip((1, 2), outputs, strict=True):
        os.dup2(output, descriptor)
        os.close(output)
    if request["leads"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    module, *arguments = request["command"]
    sys.argv = [module, *arguments]
    try:
        if module.endswith(".py"):
            sys.path.insert(0, str(Path(module).parent))
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        _end(end.code or 0)
    _end(0)


def _end(code: int) -> NoReturn:
    """End the process without finalization, after threads and exit functions."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
