"""What the processes of the tests in this folder do; each scenario is a function."""

import os
import sys
import time

import torch
from torch import nn

from effasr.distributed.batch_norm import average, running_statistics
from effasr.distributed.ddp import replicate, without_exchange
from effasr.distributed.process_group import joined


def talk() -> None:
    with joined("cpu") as world:
        assert world.sum(torch.tensor([1.0, world.rank])).tolist() == [2.0, 1.0]
        assert world.gather({"rank": world.rank}) == [{"rank": 0}, {"rank": 1}]
        assert world.broadcast("from 0" if world.is_main else None) == "from 0"


def statistics() -> None:
    with joined("cpu") as world:
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
        model[0].running_mean.fill_(float(world.rank))
        model[0].running_var.fill_(2.0 + 2 * world.rank)
        average(running_statistics(model), world)
        assert model[0].running_mean.tolist() == [0.5, 0.5]
        assert model[0].running_var.tolist() == [3.0, 3.0]


def gradients() -> None:
    """Two micro-batches on each of two ranks give the gradient of all four."""
    with joined("cpu") as world:
        torch.manual_seed(world.rank)
        model = replicate(nn.Linear(3, 1), world)
        torch.manual_seed(7)
        micro_batches = torch.randn(4, 5, 3)
        mine = micro_batches[world.rank :: 2]
        for index, batch in enumerate(mine):
            with without_exchange(model, index == 0):
                (model(batch).square().sum() * world.size).backward()
        alone = nn.Linear(3, 1)
        alone.load_state_dict(model.module.state_dict())
        alone(micro_batches).square().sum().backward()
        torch.testing.assert_close(model.module.weight.grad, alone.weight.grad)
        assert len(set(world.gather(model.module.weight.sum().item()))) == 1


def dies() -> None:
    with joined("cpu") as world:
        if world.rank == 1:
            os._exit(7)
        world.sum(torch.zeros(1))


def hangs() -> None:
    with joined("cpu", timeout_s=1.5) as world:
        if world.rank == 1:
            time.sleep(5)
            os._exit(7)
        world.sum(torch.zeros(1))


def exchange() -> None:
    talk()
    statistics()
    gradients()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
