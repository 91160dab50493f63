"""Weights that are cast to bfloat16 once an update give the results of autocast."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from effasr.distributed.process_group import DistributedContext
from effasr.optim.adamw import OptimizerConfig
from effasr.training.config import LoopConfig
from effasr.training.step import train_step
from tests.support.quiet_run import make, quiet_config, uneven_batch
from tests.support.run_ranks import check_ranks

CPU = torch.device("cpu")


def distributed(context: DistributedContext):
    """Two ranks, which exchange gradients during the last backward of a step."""
    results = []
    for copies in (False, True):
        config = quiet_config(
            OptimizerConfig(lr=1e-2, eps=1e-4),
            precision="bfloat16",
            bfloat16_weights=copies,
            clip=0.5,
        )
        model, state = make(config, context)
        for step in range(3):
            local = [uneven_batch(4 * step + n) for n in range(4)][context.rank :: 2]
            train_step(state, local, step)
        results.append([p.detach() for p in model.parameters()])
    for item, other in zip(*results, strict=True):
        assert torch.equal(item, other)


def test_ranks_exchange_the_gradients_of_autocast():
    check_ranks(distributed)


class _Casts(TorchDispatchMode):
    """Counts casts of given weights to bfloat16, one by one, and casts of many tensors at once."""

    def __init__(self, weights: list[Tensor]):
        super().__init__()
        self.count = self.together = 0
        self._addresses = {x.data_ptr() for x in weights}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name == "aten::_to_copy" and out.dtype == torch.bfloat16:
            self.count += args[0].data_ptr() in self._addresses
        if name == "aten::_foreach_copy_":
            self.together += args[0][0].dtype != args[1][0].dtype
        return out


def half(*, copies: bool, **settings) -> LoopConfig:
    return LoopConfig(max_steps=20, precision="bfloat16", bfloat16_weights=copies, **settings)


def test_weights_are_cast_once_a_step(make_train_state, batches):
    counts = {}
    for copies in (False, True):
        model, state = make_train_state(training=half(copies=copies))
        linear = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
        train_step(state, batches[:2], 0)
        with _Casts(linear) as casts:
            train_step(state, batches[:2], 1)
        counts[copies] = casts.count, casts.together
    assert counts[False][0] >= 10
    assert counts[False][1] == 0
    assert counts[True][0] == 0
    # One for all weights, and one for the gradients of each layer and the rest in a micro-batch.
    assert counts[True][1] == 1 + 2 * 3


def test_frozen_weights_are_cast_again_where_they_change(make_train_state, batches):
    model, state = make_train_state(training=half(copies=True, freeze=("encoder",)))
    train_step(state, batches[:1], 0)
    layer = model.encoder.layers[0].feed_forward1.linear1
    with torch.no_grad():
        layer.weight.mul_(3)
    assert state.weights is not None
    state.weights.refresh()
    with state.weights.in_use():
        state.weights._layers[0][1].connect()
        assert layer.weight.dtype == torch.bfloat16
        used = layer.weight.clone()
    assert torch.equal(used, layer.weight.to(torch.bfloat16))


def test_copies_are_refused_where_they_are_of_no_use(make_train_state):
    # The default is autocast on a CPU.
    _, state = make_train_state(training=LoopConfig(precision="bfloat16"))
    assert state.weights is None
    with pytest.raises(ValueError, match=r"`training\.bfloat16_weights` must be false or auto"):
        make_train_state(training=LoopConfig(precision="float32", bfloat16_weights=True))
    with pytest.raises(ValueError, match=r"with training\.strategy fsdp2"):
        make_train_state(training=LoopConfig(strategy="fsdp2", bfloat16_weights=True))
