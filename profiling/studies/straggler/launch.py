"""Start the processes of a run, let them train for a while, and stop them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from straggler.network import Network
from straggler.settings import ENVIRONMENT, Settings

_ROOT = Path(__file__).resolve().parents[3]
_WORKER = Path(__file__).with_name("worker.py")
_WARM = 2
"""Steps of every rank before time is measured: the first one meets and builds."""


@dataclass(frozen=True, slots=True)
class Window:
    """The time that is measured, by `time.monotonic`: the same clock for all processes."""

    begin: float
    end: float


def train(settings: Settings, network: Network, seconds: float, limit_s: float = 180.0) -> Window:
    """Run all processes until so many seconds have passed since they were all at work.

    Each is started as torchrun would start it. As torchrun's, the store is the parent's. They are
    stopped by a signal, which the trainer answers with a checkpoint.

    Args:
        settings: Settings of the run.
        network: Network of its nodes.
        seconds: Seconds to measure.
        limit_s: Limit in seconds for the start, and for the end.

    Raises:
        RuntimeError: A process failed, or they did not begin or stop in time.
    """
    folder = Path(settings.folder)
    path = folder / "settings.json"
    settings.write(path)
    store = TCPStore(network.address, 0, is_master=True, wait_for_workers=False)
    size = settings.nodes * settings.per_node
    processes, errors = [], []
    try:
        for rank in range(size):
            node, local = divmod(rank, settings.per_node)
            environment = os.environ | network.environment | {
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "GROUP_RANK": str(node),
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(settings.per_node),
                "MASTER_ADDR": network.address,
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(_ROOT), str(_ROOT / "kernels")]),
                ENVIRONMENT: str(path),
            }  # fmt: skip
            errors.append((folder / f"error_{rank}.txt").open("w+"))
            command = [*network.prefixes[node], sys.executable, str(_WORKER)]
            processes.append(
                subprocess.Popen(
                    command, env=environment, stdout=subprocess.DEVNULL, stderr=errors[-1]
                )
            )
        _wait_until_warm(settings, processes, limit_s)
        begin = time.monotonic()
        _sleep(seconds, processes)
        end = time.monotonic()
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(limit_s)
        for rank, process in enumerate(processes):
            if process.returncode:
                raise RuntimeError(f"rank {rank} ended with {process.returncode}")
        return Window(begin, end)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{error}: {_last_words(errors)}") from error
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for file in errors:
            file.close()


def _wait_until_warm(
    settings: Settings, processes: Sequence[subprocess.Popen], limit_s: float
) -> None:
    ends = time.monotonic() + limit_s
    ranks = range(len(processes))
    while not all(_lines(settings.log(rank)) >= _WARM for rank in ranks):
        _check(processes)
        if time.monotonic() > ends:
            raise RuntimeError(f"the processes did not begin within {limit_s:g} s")
        time.sleep(0.1)


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _sleep(seconds: float, processes: Sequence[subprocess.Popen]) -> None:
    ends = time.monotonic() + seconds
    while (left := ends - time.monotonic()) > 0:
        _check(processes)
        time.sleep(min(left, 0.5))


def _check(processes: Sequence[subprocess.Popen]) -> None:
    for rank, process in enumerate(processes):
        if process.poll() is not None:
            raise RuntimeError(f"rank {rank} ended early, with {process.returncode}")


def _last_words(files: Sequence) -> str:
    """Return the last line of each process's standard error."""
    words = []
    for rank, file in enumerate(files):
        file.seek(0)
        if lines := file.read().strip().splitlines():
            words.append(f"rank {rank}: {lines[-1].strip()}")
    return "; ".join(words) or "nothing was said"
