"""Two processes of one run."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed import TCPStore

ROOT = Path(__file__).parents[2]


def run_ranks(module: str, scenario: str, limit_s: float) -> list[subprocess.CompletedProcess[str]]:
    """Run a scenario of a module in two processes, as torchrun would start them."""
    with started(module, scenario) as processes:
        results = []
        for process in processes:
            out, error = process.communicate(timeout=limit_s)
            code = process.returncode
            results.append(subprocess.CompletedProcess(scenario, code, out, error))
        return results


@contextmanager
def started(module: str, *arguments: str) -> Iterator[list[subprocess.Popen[str]]]:
    """The two processes; they do not outlive the block.

    As torchrun's, the store outlives the ranks, so that one can tell the other why it failed.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []
    for rank in range(2):
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "OMP_NUM_THREADS": "1",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        command = [sys.executable, "-m", module, *arguments]
        processes.append(
            subprocess.Popen(
                command, env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            # Read to its end, or what it leaves open fails a test after this one.
            process.communicate()
