"""What four processes do in test_averagers.py."""

import sys

import pytest
import torch
from torch import Tensor, nn

from effasr.distributed.ddp import replicate
from effasr.distributed.ddp_comm_hook import GradientExchange
from effasr.distributed.delayed_averaging import DelayedAveraging
from effasr.distributed.local_sgd import LocalSGD
from effasr.distributed.process_group import World, joined


def learner(world: World) -> tuple[nn.Module, torch.optim.Optimizer, list[Tensor]]:
    """A weight, a moment and a running mean, which differ between ranks."""
    model = nn.Linear(3, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(10.0 * world.rank)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer, [torch.full((2,), float(world.rank))]


def values(world: World, tensor: Tensor) -> list[float]:
    """The first element on every rank."""
    return world.gather(tensor.flatten()[0].item())


def hierarchical(world: World) -> None:
    """Pairs every second step after the warm-up, all four every fourth."""
    model, optimizer, statistics = learner(world)
    what = LocalSGD(model, optimizer, statistics, world, {2: 2, 4: None}, warmup_steps=1)
    weight = next(model.parameters())
    seen = []
    for step in range(5):
        with torch.no_grad():
            weight.fill_(float(world.rank))
        statistics[0].fill_(2.0 * world.rank)
        assert what.is_local(step) == (step > 0)
        what.before(step)
        what.after(step)
        assert statistics[0][0] == 2 * weight[0, 0]
        seen.append(values(world, weight))
    apart, pairs = [0.0, 1.0, 2.0, 3.0], [0.5, 0.5, 2.5, 2.5]
    assert seen == [apart, apart, pairs, apart, [1.5] * 4], seen


def delayed(world: World) -> None:
    """Each rank adds its update to the mean of the weights before it."""
    model, optimizer, statistics = learner(world)
    what = DelayedAveraging(model, optimizer, statistics, world, warmup_steps=1)
    weight = next(model.parameters())
    with torch.no_grad():
        weight.fill_(0.0)
    expected = torch.zeros(4)
    for step in range(6):
        # Gradients are exchanged in the warm-up, so that ranks make the same update.
        updates = torch.tensor([1.0, -2.0, 3.0, 5.0]) * (step + 1) if step else torch.ones(4)
        before = expected.mean() if step > 1 else expected
        expected = before + updates
        what.before(step)
        with torch.no_grad():
            weight.add_(updates[world.rank])
        what.after(step)
        torch.testing.assert_close(torch.tensor(values(world, weight)), expected)
    what.settle()
    torch.testing.assert_close(
        torch.tensor(values(world, weight)), expected.mean().expand(4), msg="weights"
    )
    moments = values(world, optimizer.state[weight]["exp_avg"])
    assert len(set(moments)) == 1


def refused(world: World) -> None:
    """Groups that do not divide the ranks."""
    model, optimizer, statistics = learner(world)
    with pytest.raises(ValueError, match="groups that divide the 4 ranks, but one is of 3"):
        LocalSGD(model, optimizer, statistics, world, {2: 3, 4: None}, warmup_steps=0)


def apart(world: World) -> None:
    """A learner exchanges gradients with nobody outside, in as many steps as it likes."""
    first = world.rank - world.rank % 2
    own = world.part(range(first, first + 2))
    model = replicate(nn.Linear(1, 1, bias=False), own)
    exchange = GradientExchange(model)
    for _ in range(1 + first):
        exchange.begin(lambda: None)
        model.zero_grad()
        model(torch.full((1, 1), float(world.rank))).sum().backward()
        assert model.module.weight.grad.item() == first + 0.5


def everything() -> None:
    with joined("cpu", timeout_s=30) as world:
        for scenario in (hierarchical, delayed, refused, apart):
            scenario(world)


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]]()
