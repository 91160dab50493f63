"""Processes of one run, as torchrun would start them, on gloo.

``python -m tests.support.run_ranks TIMEOUT MODULE:FUNCTION...`` is one of them: it calls functions,
each with its `DistributedContext`, and writes their names as they return.
"""

import faulthandler
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from effasr import config as configuration
from effasr.distributed.process_group import distributed_context
from tests.support.preloaded import ROOT, Preloaded

Finished = subprocess.CompletedProcess[str]


@contextmanager
def started(module, *arguments, size=2, own=None, new_session=False):
    """Run a module in several processes, which do not outlive the block.

    ``own``: a last argument for each process. With ``new_session`` each has a group of its own.
    """
    # As torchrun's, the store is the parent's: it outlives the ranks, so that one can tell the
    # others why it failed, and a port that was probed and freed may be taken since.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes: list[subprocess.Popen[str]] = []
    for rank in range(size):
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "OMP_NUM_THREADS": "1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
        }  # fmt: skip
        last = [own[rank]] if own else []
        options = {"env": environment, "cwd": ROOT, "new_session": new_session}
        processes.append(Preloaded(module, *arguments, *last, **options))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            # Read to its end, or what it leaves open fails a test after this one.
            process.communicate()


def run_module(module, *arguments, size=2, limit_s=240.0, own=None):
    with started(module, *arguments, size=size, own=own) as processes:
        results = []
        for process in processes:
            out, error = process.communicate(timeout=limit_s)
            results.append(Finished(module, process.returncode, out, error))
        return results


def recipe_of(config: Any) -> str:
    path = Path(config.output) / f"{config.name}.yaml"
    path.write_text(configuration.dump(config))
    return str(path)


def train_on_ranks(config: Any, *, size: int = 2) -> None:
    """Make a run with several processes, all of which have to succeed."""
    for done in run_module("effasr.train", recipe_of(config), size=size):
        assert done.returncode == 0, done.stderr[-3000:]
        assert "Warning" not in done.stderr


def run_ranks(*functions, size=2, limit_s=240.0, timeout_s=60.0):
    """Call functions, one after the other, in several processes that have joined each other.

    Each is given the `DistributedContext`. The limit is for all, the timeout for a collective call.
    """
    names = [f"{function.__module__}:{function.__name__}" for function in functions]
    arguments = "tests.support.run_ranks", str(timeout_s), *names
    return run_module(*arguments, size=size, limit_s=limit_s)


def check_ranks(*functions: Callable[..., Any], **options: Any) -> list[Finished]:
    """As `run_ranks`, where every rank must return from every function."""
    results = run_ranks(*functions, **options)
    failed = {n: done for n, done in enumerate(results) if done.returncode}
    # A rank that ends fails the others: the cause is in one of several.
    assert not failed, "\n".join(
        f"rank {n} ended with {done.returncode}:\n{done.stderr[-3000:]}"
        for n, done in failed.items()
    )
    for done in results:
        assert "Warning" not in done.stderr, done.stderr[-3000:]
        assert done.stdout.splitlines()[-1] == json.dumps([f.__name__ for f in functions])
    return results


def _main(timeout_s: str, *paths: str) -> None:
    # A crash in C++ writes the Python stacks to standard error.
    faulthandler.enable()
    torch.set_num_threads(1)
    with distributed_context("cpu", timeout_s=float(timeout_s)) as context:
        returned = []
        for path in paths:
            module, name = path.split(":")
            getattr(importlib.import_module(module), name)(context)
            returned.append(name)
        sys.stdout.write(f"{json.dumps(returned)}\n")


if __name__ == "__main__":
    _main(*sys.argv[1:])
