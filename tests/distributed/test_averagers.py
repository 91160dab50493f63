from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from effasr.distributed import averager
from effasr.distributed.averager import (
    DelayedAveraging,
    DelayedConfig,
    HierarchicalConfig,
    LocalSGD,
    LocalSGDConfig,
)
from effasr.distributed.ddp import replicate
from effasr.distributed.grad_sync import gradient_sync
from effasr.distributed.process_group import DistributedContext
from tests.support.run_ranks import check_ranks


def learner(context: DistributedContext) -> tuple[nn.Module, torch.optim.Optimizer, list[Tensor]]:
    model = nn.Linear(3, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(10.0 * context.rank)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer, [torch.full((2,), float(context.rank))]


def values(context: DistributedContext, tensor: Tensor) -> list[float]:
    """The first element on every rank."""
    return context.all_gather(tensor.flatten()[0].item())


def timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    assert group is not None
    return group._get_backend(torch.device("cpu")).options._timeout


def hierarchical(context: DistributedContext):
    """Pairs every second step after the warm-up, all four every fourth."""
    model, optimizer, statistics = learner(context)
    what = LocalSGD(model, optimizer, statistics, context, 1, {2: 2, 4: None})
    assert timeout_of(what._groups[2].group) == timeout_of(dist.group.WORLD)
    weight = next(model.parameters())
    seen = []
    for step in range(5):
        with torch.no_grad():
            weight.fill_(float(context.rank))
        statistics[0].fill_(2.0 * context.rank)
        assert what.is_local(step) == (step > 0)
        what.before(step)
        what.after(step)
        assert statistics[0][0] == 2 * weight[0, 0]
        seen.append(values(context, weight))
    apart, pairs = [0.0, 1.0, 2.0, 3.0], [0.5, 0.5, 2.5, 2.5]
    assert seen == [apart, apart, pairs, apart, [1.5] * 4], seen


def delayed(context: DistributedContext):
    """Each rank adds its update to the mean of the weights before it."""
    model, optimizer, statistics = learner(context)
    what = DelayedAveraging(model, optimizer, statistics, context, warmup_steps=1)
    assert timeout_of(what._group) == timeout_of(dist.group.WORLD)
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
            weight.add_(updates[context.rank])
        what.after(step)
        torch.testing.assert_close(torch.tensor(values(context, weight)), expected)
    what.synchronize()
    torch.testing.assert_close(
        torch.tensor(values(context, weight)), expected.mean().expand(4), msg="weights"
    )
    assert len(set(values(context, optimizer.state[weight]["exp_avg"]))) == 1


def refused(context: DistributedContext):
    model, optimizer, statistics = learner(context)
    with pytest.raises(ValueError, match="groups that divide the 4 ranks, but one is of 3"):
        LocalSGD(model, optimizer, statistics, context, 0, {2: 3, 4: None})


def apart(context: DistributedContext):
    """A learner exchanges gradients with nobody outside, in as many steps as it likes."""
    first = context.rank - context.rank % 2
    local = context.subgroup(range(first, first + 2))
    assert timeout_of(local.group) == timeout_of(dist.group.WORLD)
    model = replicate(nn.Linear(1, 1, bias=False), local)
    sync = gradient_sync(model)
    for _ in range(1 + first):
        sync.begin(lambda: None)
        model.zero_grad()
        model(torch.full((1, 1), float(context.rank))).sum().backward()
        assert model.module.weight.grad.item() == first + 0.5


def test_ranks_average_when_and_with_whom_they_should():
    check_ranks(hierarchical, delayed, refused, apart, size=4)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        *((HierarchicalConfig, {"periods": periods}, message) for periods, message in (
            ({}, "`periods` must be steps, at least 1 each, but is {}"),
            ({0: None}, "`periods` must be steps, at least 1 each"),
            ({2: 8}, "`periods` must have null, all ranks, at its longest"),
            ({2: 8, 4: 4, 8: None}, "groups of at least 2 ranks that grow with the period"),
            ({2: None, 8: None}, "groups of at least 2 ranks that grow with the period"),
            ({2: 1, 8: None}, "groups of at least 2 ranks that grow with the period"),
        )),
        (LocalSGDConfig, {"period": 0}, "`period` must be at least 1, but is 0"),
        *((config, {"warmup_steps": -1}, "`warmup_steps` must be at least 0, but is -1")
          for config in (LocalSGDConfig, HierarchicalConfig, DelayedConfig)),
    ],
)  # fmt: skip
def test_error_messages(config, options, message):
    with pytest.raises(ValueError, match=message):
        config(**options)


def test_small_tensors_are_averaged_together(monkeypatch):
    """Large ones and those of another dtype by themselves: each call waits for the network."""
    sizes: list[int] = []

    class Two(DistributedContext):
        def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor.mul_(2)

    monkeypatch.setattr(averager, "_MOST_ELEMENTS", 10)
    tensors = [torch.randn(n) for n in (2, 3, 40, 4, 5)] + [torch.randn(3).double()]
    expected = [x.clone() for x in tensors]
    averager.average_each(tensors, Two(0, 2, torch.device("cpu")))
    assert sizes == [5, 40, 9, 3]
    torch.testing.assert_close(tensors, expected)
