import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.distributed import HashStore, TCPStore

from effasr.distributed.averager import average_each
from effasr.distributed.batch_norm import running_statistics
from effasr.distributed.failures import record_failure
from effasr.distributed.process_group import (
    DistributedContext,
    agree_on_restart_id,
    distributed_context,
    slurm_variables,
)
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


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def meet(server: TCPStore, ranks: list[int], size: int, timeout_s: float = 10.0) -> list:
    def one(rank: int):
        # A connection alone may take longer than ranks shall be waited for.
        store = TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=60))
        store.set_timeout(timedelta(seconds=timeout_s))
        try:
            return agree_on_restart_id(store, rank, size, timeout_s)
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(one, ranks))


def test_all_have_the_same_name_and_nobody_had_it_before(server):
    first, second = meet(server, [0, 1, 2], 3), meet(server, [2, 0, 1], 3)
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]


def test_those_who_died_before_all_had_come_are_not_taken_for_those_who_come(server):
    """Of the first three, rank 2 never came, and of the second three rank 0."""
    for ranks in ([0, 1], [1, 2]):
        assert all(isinstance(error, RuntimeError) for error in meet(server, ranks, 3, 0.3))
    assert len(set(meet(server, [0, 1, 2], 3))) == 1
    # And on fewer ranks than before.
    assert len(set(meet(server, [0, 1], 2))) == 1


def test_who_is_missing_is_said(server):
    (error,) = meet(server, [0], 3, 0.2)
    assert str(error) == "rank 0: not all 3 ranks joined within 0.2 s; missing: [1, 2]."
    (error,) = meet(server, [2], 3, 0.2)
    assert str(error) == "rank 2: rank 0 did not join within 0.2 s."


@pytest.mark.parametrize(
    ("environment", "missing"),
    [
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"WORLD_SIZE": "2", "RANK": ""}, "RANK"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR"),
        ({"RANK": "0"}, "WORLD_SIZE"),
    ],
)
def test_half_set_variables_are_refused(environment, missing):
    with (
        pytest.raises(ValueError, match=f"`{missing}` must be set where .*torchrun"),
        distributed_context("cpu", environment=environment),
    ):
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "2"}, "`RANK` must be below WORLD_SIZE, 2, .* but is 2"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "`RANK` must be below WORLD_SIZE, 1"),
        ({"WORLD_SIZE": "0"}, "`RANK` must be below WORLD_SIZE, 0"),
        ({"RANK": "-1"}, "`RANK` must be a number, but is '-1'"),
        ({"MASTER_PORT": "a"}, "`MASTER_PORT` must be a number, but is 'a'"),
        ({"MASTER_PORT": "99999"}, "`MASTER_PORT` must be a port from 1 to 65535, but is 99999"),
        ({"MASTER_ADDR": "no.such.invalid"}, "`MASTER_ADDR` must be a host .* 'no.such.invalid'"),
    ],
)
def test_variables_that_cannot_be_are_refused(changes, message, monkeypatch):
    def unknown(host, port):
        if host != "localhost":
            raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    with (
        pytest.raises(ValueError, match=message),
        distributed_context("cpu", environment=environment | changes),
    ):
        pass


def test_a_rank_0_that_does_not_answer_is_named():
    with socket.socket() as silent:
        silent.bind(("localhost", 0))
        port = str(silent.getsockname()[1])
        environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        done = run_environment(environment | {"RANK": "1", "WORLD_SIZE": "2"}, timeout_s=1)
    assert f"rank 1 cannot join the others at localhost:{port} (`MASTER_ADDR`" in done
    assert "within 1 s (training.timeout_s): start all 2 ranks" in done


def test_the_tasks_of_srun_are_ranks():
    step = {
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_NODELIST": "gpu[003-005,9],login",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_ID": "31234",
    }
    assert slurm_variables(step) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu003",
        "MASTER_PORT": "21234",
    }
    # torchrun's processes, and a batch script that is no step.
    assert slurm_variables(step | {"RANK": "0"}) == {}
    assert slurm_variables({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) == {}


def test_a_port_in_use_is_named():
    with socket.socket() as used:
        used.bind(("localhost", 0))
        used.listen()
        port = str(used.getsockname()[1])
        environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        done = run_environment(environment | {"RANK": "0", "WORLD_SIZE": "2"})
    assert f"`MASTER_PORT` must be a free port of localhost, but {port} is in use" in done


def run_environment(environment: dict[str, str], timeout_s: float = 5) -> str:
    code = (
        "from effasr.distributed.process_group import distributed_context\n"
        f"with distributed_context('cpu', {timeout_s}): pass"
    )
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    ).stderr
