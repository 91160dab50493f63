import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import TCPStore

WORKERS = Path(__file__).parent / "workers.py"


@pytest.fixture
def run_ranks() -> Callable[..., list[subprocess.CompletedProcess]]:
    """Run a scenario of a script in several processes, as torchrun would start them.

    As torchrun's, the store is the parent's: a port that was probed and freed may be taken since.
    """

    def run(scenario: str, size: int = 2, limit_s: float = 60.0, script: Path = WORKERS):
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        processes = []
        for rank in range(size):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, str(script), scenario]
            processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )
        try:
            results = []
            for process in processes:
                out, error = process.communicate(timeout=limit_s)
                results.append(
                    subprocess.CompletedProcess(scenario, process.returncode, out, error)
                )
            return results
        finally:
            for process in processes:
                process.kill()
                # Read to its end, or what it leaves open fails a test after this one.
                process.communicate()

    return run
