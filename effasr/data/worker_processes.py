"""Start and end of the processes that load audio."""

import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

_SIGNAL_PATIENCE_S = 1.0

_OPEN_FILES = 65_536
_OPEN_FILES_BESIDE = 64
_TENSORS = 12  # of a batch, each a file of its own in shared memory

_PR_SET_PDEATHSIG = 1  # from Linux's <sys/prctl.h>

_DEATH = "DataLoader worker (pid"
"""How torch reports a dead worker; it reports an error of a living one otherwise."""


_REMEDY = "enlarge /dev/shm (docker's --shm-size), or lower `workers` or `prefetch`."


class SharedMemoryError(RuntimeError):
    """A worker cannot put a batch into shared memory."""


def check_open_files(workers: int, prefetch: int) -> None:
    """Raise this process's limit of open files, and check that it is enough for its workers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if 0 <= soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    needed = _OPEN_FILES_BESIDE + _TENSORS * workers * prefetch
    if 0 <= soft < needed:
        raise ValueError(
            f"the limit of open files must be at least {needed} with data.workers={workers} and "
            f"data.prefetch={prefetch}, but is {soft}: raise it by `ulimit -n {_OPEN_FILES}`, or "
            "set data.workers=0."
        )


def share(tensors: "Iterable[Tensor]") -> None:
    """Put tensors of a worker into the shared memory from which the training process takes them.

    torch would do it in a thread of the worker that prints errors, drops the batch and goes on:
    the training process would wait for that batch without end.
    """
    try:
        for tensor in tensors:
            tensor.share_memory_()
    except (RuntimeError, OSError) as error:
        raise SharedMemoryError(
            f"a loading process cannot put a batch into shared memory ({_line(error)}): {_REMEDY}"
        ) from error


def start(loader: Iterable[T]) -> Iterator[T]:
    """Start the workers of a torch DataLoader."""
    try:
        return iter(loader)
    except OSError as error:
        reason, hook = _line(error), sys.unraisablehook
        # torch's iterator cannot be deleted before it is complete, and would print that.
        sys.unraisablehook = lambda _: None
        traceback.clear_frames(error.__traceback__)
        sys.unraisablehook = hook
        raise SharedMemoryError(
            f"no loading process can be started ({reason}): {_REMEDY}"
        ) from None


def next_item(loaded: Iterator[T]) -> T:
    """Return the next item that workers have loaded; RuntimeError if a worker was killed."""
    try:
        try:
            return next(loaded)
        except (EOFError, ConnectionError):
            # The pipe of a dead worker can break before the signal comes by which torch learns of
            # its death: waiting for that gives one error, with the worker's name, and not two.
            time.sleep(_SIGNAL_PATIENCE_S)
            raise
    except (RuntimeError, EOFError, ConnectionError) as error:
        if isinstance(error, RuntimeError) and _DEATH not in str(error):
            raise
        reason = _line(error) or "its pipe broke"
        raise RuntimeError(
            f"a loading process died ({reason}): if memory or shared memory (/dev/shm; docker's "
            "--shm-size) ran out, lower `workers` or `prefetch`."
        ) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def context() -> BaseContext | None:
    """Forked workers share the corpus's memory; where there is no safe fork, torch's default."""
    if sys.platform == "linux":
        return multiprocessing.get_context("fork")
    return None


def end_with_parent(parent: int, worker: int) -> None:
    """Let this worker end with the training process: at once when that dies, and not before.

    A batch system or a terminal sends its signal to all processes; the training process finishes
    its step on SIGTERM and SIGINT, and for that it needs its workers.
    """
    del worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        signal_at_death_of_parent(signal.SIGKILL)
        if os.getppid() != parent:
            # It died between the fork and the line above, of which the kernel then says nothing.
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_obey_parent_alone, daemon=True).start()


def signal_at_death_of_parent(number: signal.Signals) -> None:
    """Let the kernel send this process a signal when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _obey_parent_alone() -> None:
    """End on the SIGTERM of the training process, with which multiprocessing ends leftovers."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
