import time
from pathlib import Path

import pytest
import torch

from effasr.distributed.process_group import World, joined


def test_two_ranks_talk_and_share_statistics_and_gradients(run_ranks) -> None:
    for result in run_ranks("exchange"):
        assert result.returncode == 0, result.stderr


def test_three_micro_batches_on_two_ranks_train_as_on_one(run_ranks) -> None:
    script = Path(__file__).parent / "uneven_worker.py"
    for result in run_ranks("uneven", script=script):
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("scenario", ["dies", "hangs"])
def test_nobody_waits_forever_for_a_rank(run_ranks, scenario) -> None:
    """The survivor fails by itself, long before the limit."""
    start = time.perf_counter()
    survivor, lost = run_ranks(scenario, limit_s=30.0)
    assert time.perf_counter() - start < 25
    assert survivor.returncode == 1, survivor.stderr
    assert "RuntimeError" in survivor.stderr or "DistBackendError" in survivor.stderr
    assert lost.returncode == 7


def test_a_process_alone_talks_to_nobody() -> None:
    with joined("cpu", environment={}) as world:
        assert world == World(0, 1, torch.device("cpu"))
        assert world.is_main
        assert world.sum(torch.tensor([2.0])).item() == 2.0
        assert world.gather("x") == ["x"]
        assert world.broadcast("x") == "x"
        assert not torch.distributed.is_initialized()


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="`device` must be auto, cpu or cuda, but is 'tpu'"):
        joined("tpu", environment={}).__enter__()
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="PyTorch sees no GPU"):
            joined("cuda", environment={}).__enter__()
