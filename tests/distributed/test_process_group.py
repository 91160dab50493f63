import os
import time

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from effasr.distributed.averager import average_each
from effasr.distributed.batch_norm import running_statistics
from effasr.distributed.failures import record_failure
from effasr.distributed.process_group import DistributedContext, distributed_context
from tests.support.run_ranks import check_ranks, run_module, run_ranks


def talk(context: DistributedContext):
    assert context.all_reduce(torch.tensor([1.0, context.rank])).tolist() == [2.0, 1.0]
    assert context.all_gather({"rank": context.rank}) == [{"rank": 0}, {"rank": 1}]
    assert context.broadcast("from 0" if context.is_main else None) == "from 0"


def statistics(context: DistributedContext):
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[0].running_mean.fill_(float(context.rank))
    model[0].running_var.fill_(2.0 + 2 * context.rank)
    average_each(running_statistics(model), context)
    assert model[0].running_mean.tolist() == [0.5, 0.5]
    assert model[0].running_var.tolist() == [3.0, 3.0]


def dies(context: DistributedContext):
    if context.rank == 1:
        os._exit(7)
    context.all_reduce(torch.zeros(1))


def hangs(context: DistributedContext):
    if context.rank == 1:
        time.sleep(5)
        os._exit(7)
    context.all_reduce(torch.zeros(1))


def test_two_ranks_talk_and_share_statistics():
    check_ranks(talk, statistics)


@pytest.mark.parametrize(("scenario", "timeout_s"), [(dies, 600.0), (hangs, 1.5)])
def test_nobody_waits_forever_for_a_rank(scenario, timeout_s):
    start = time.perf_counter()
    survivor, lost = run_ranks(scenario, limit_s=30.0, timeout_s=timeout_s)
    assert time.perf_counter() - start < 25
    assert survivor.returncode == 1, survivor.stderr
    assert "RuntimeError" in survivor.stderr or "DistBackendError" in survivor.stderr
    assert lost.returncode == 7


def test_a_rank_that_was_left_out_hides_no_failure_of_the_others():
    store = HashStore()
    assert record_failure(store, 0, "no space left") is None
    assert record_failure(store, 1, "connection closed") == "rank 0: no space left"
    # The run went on without rank 1, which wakes up before rank 2 fails.
    assert record_failure(store, 2, "no memory left", losses=1) is None
    assert record_failure(store, 3, "connection closed", 1) == "rank 2: no memory left"


def test_a_process_alone_talks_to_nobody():
    with distributed_context("cpu", environment={}) as context:
        assert context == DistributedContext(0, 1, torch.device("cpu"))
        assert context.is_main
        assert context.all_reduce(torch.tensor([2.0])).item() == 2.0
        assert context.all_gather("x") == ["x"]
        assert context.broadcast("x") == "x"
        assert not torch.distributed.is_initialized()


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="`device` must be auto, cpu or cuda, but is 'tpu'"):
        distributed_context("tpu", environment={}).__enter__()
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="PyTorch sees no GPU"):
            distributed_context("cuda", environment={}).__enter__()


@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "device"), [("3", "cpu"), ("1", "cuda")])
def test_a_model_that_outlives_its_process_group_blocks_no_process(rounds, device):
    """With a group's destructor, this deadlocks in one of 150 rounds: so each group is kept."""
    for done in run_module("tests.distributed.leaving_ranks", rounds, device):
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout == "left\n"
        assert not done.stderr
