"""Replicas under torchft: one dies in the middle of a step, another comes."""

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from effasr.distributed.torchft import Replicas, why_not_torchft
from tests.distributed.torchft_worker import ALONE, make, make_step, weights

ROOT = Path(__file__).parents[2]
MISSING = why_not_torchft()


@pytest.fixture
def lighthouse() -> Iterator[str]:
    """Its address."""
    coordination = importlib.import_module("torchft.coordination")
    server = coordination.LighthouseServer(
        # It waits for every replica that it hears of, as a slow machine may keep one busy.
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=20_000, heartbeat_timeout_ms=3000
    )  # fmt: skip
    yield f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
    server.shutdown()


def start(folder: Path, name: str, address: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {"TORCHFT_LIGHTHOUSE": address, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "tests.distributed.torchft_worker", name, str(folder)]
    with (folder / f"{name}.out").open("w") as out, (folder / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            command, env=os.environ | environment, cwd=ROOT, stdout=out, stderr=log
        )


@pytest.mark.slow
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_no_micro_batch_is_lost_with_a_replica(lighthouse: str, tmp_path: Path) -> None:
    """The weights are those of one process that nothing happened to."""
    processes = {name: start(tmp_path, name, lighthouse) for name in ("first", "dies")}
    try:
        assert processes["dies"].wait(120) == 9, (tmp_path / "dies.log").read_text()[-3000:]
        processes["late"] = start(tmp_path, "late", lighthouse)
        for name in ("first", "late"):
            code = processes[name].wait(120)
            assert code == 0, (tmp_path / f"{name}.log").read_text()[-3000:]
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    shown = (tmp_path / "first.out").read_text()
    assert " of 2: failed\n" in shown, shown
    model, trainee = make(0)
    for step in range(int((tmp_path / "end").read_text())):
        assert make_step(trainee, ALONE, step)
    rows = torch.load(tmp_path / "first"), torch.load(tmp_path / "late"), weights(model)
    for first, late, alone in zip(*rows, strict=True):
        assert torch.equal(first, late)
        torch.testing.assert_close(first, alone, rtol=1e-4, atol=1e-4)


def test_it_is_refused_with_the_reason(monkeypatch) -> None:
    nothing = lambda *_: None

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ValueError, match=r"here: torchft-nightly is not installed \(pip"):
        Replicas(ALONE.device, nothing, nothing)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2026.10.26")
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(ValueError, match="`lighthouse` must be the address of torchft's"):
        Replicas(ALONE.device, nothing, nothing)
