"""Weights that are cast to bfloat16 once an update give the results of autocast."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from effasr.data.config import DataConfig
from effasr.distributed.process_group import DistributedContext
from effasr.model.transducer import TransducerConfig
from effasr.nn.lora import LoRAConfig, adapt
from effasr.nn.parameters import freeze
from effasr.optim.adamw import OptimizerConfig
from effasr.optim.adascale import AdaScaleConfig
from effasr.training import build
from effasr.training.config import LoopConfig, TrainConfig
from effasr.training.resolve import resolve_config
from effasr.training.step import train_step
from tests.support.quiet_run import VOCABULARY, make, quiet_config, uneven_batch
from tests.support.run_ranks import check_ranks
from tests.training.conftest import built
from tests.training.shortage import shortage
from tests.training.test_cuda_graph import graphed

CPU = torch.device("cpu")
ADASCALE = OptimizerConfig(lr=0.01, adascale=AdaScaleConfig(scale=2.0))
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"training": {"activation_checkpointing": True}},
    "average": {"training": {"ema_decay": 0.9}},
    "adascale": {"optimizer": ADASCALE, "data": DataConfig(micro_batches=2)},
    "transducer": {},
    **{name: {} for name in ("lora", "freeze", "shortage", "graph")},
    "compile": {"training": {"compile": True}},
}


def config_of(case: str, model_config, *, copies: bool) -> TrainConfig:
    settings = {"model": model_config, "optimizer": OptimizerConfig(lr=0.01)} | CASES[case]
    if case == "transducer":
        transducer = TransducerConfig(width=8, joint=8)
        settings["model"] = replace(model_config, decoder=None, transducer=transducer)
    training = {"max_steps": 20, "precision": "bfloat16"} | settings.pop("training", {})
    loop = LoopConfig(bfloat16_weights=copies, **training)
    return resolve_config(TrainConfig(training=loop, **settings), None)


def train(case: str, model_config, batches, *, copies: bool) -> list[Tensor]:
    """Train for three steps of two micro-batches; return the weights, averages and reports."""
    config = config_of(case, model_config, copies=copies)
    model = build.build_model(config, VOCABULARY, None, CPU)
    if case == "lora":
        torch.manual_seed(0)
        adapt(model, LoRAConfig(rank=2, also_train=("*norm*", "ctc_head")))
    if case == "freeze":
        freeze(model, ["encoder.layers", "decoder.*.linear1"])
    state = build.build_train_state(config, model, DistributedContext(0, 1, CPU))
    assert (state.weights is not None) == copies
    if case == "graph":
        state = graphed(model, state)
    figures = []
    for step in range(3):
        calls = [1] if case == "shortage" and step == 1 else []
        with shortage(model, *calls, where="backward"):
            report = train_step(state, batches[2 * step : 2 * step + 2], step)
        figures.append(torch.tensor(list(report.read().values())))
    assert all(p.dtype == torch.float32 for p in model.parameters())
    average = [] if state.average is None else state.average.average.values()
    return [*model.state_dict().values(), *average, *figures]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("eager_compiler")
@pytest.mark.representative(case=["plain", "checkpointing", "lora", "transducer", "shortage"])
def test_the_run_is_bitwise_that_of_autocast(case, model_config, batches) -> None:
    expected, results = (
        train(case, model_config, batches, copies=copies) for copies in (False, True)
    )
    # On some processors the gain, of sums of squared gradients, differs in its last digit.
    tolerance = {"rtol": 1e-6, "atol": 1e-9} if case == "adascale" else {"rtol": 0, "atol": 0}
    for x, y in zip(results, expected, strict=True):
        torch.testing.assert_close(x, y, **tolerance)


def distributed(context: DistributedContext) -> None:
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
            own = [uneven_batch(4 * step + n) for n in range(4)][context.rank :: 2]
            train_step(state, own, step)
        results.append([p.detach() for p in model.parameters()])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_ranks_exchange_the_gradients_of_autocast() -> None:
    check_ranks(distributed)


class _Casts(TorchDispatchMode):
    """Counts casts of given weights to bfloat16, one by one, and casts of many tensors at once."""

    def __init__(self, weights: list[Tensor]) -> None:
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


def test_weights_are_cast_once_a_step(model_config, batches) -> None:
    counts = {}
    for copies in (False, True):
        model, state = built(config_of("plain", model_config, copies=copies))
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


def test_frozen_weights_are_cast_again_where_they_change(model_config, batches) -> None:
    config = config_of("plain", model_config, copies=True)
    model = build.build_model(config, VOCABULARY, None, CPU)
    freeze(model, ["encoder"])
    state = build.build_train_state(config, model, DistributedContext(0, 1, CPU))
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


def test_copies_are_refused_where_they_are_of_no_use(make_train_state) -> None:
    # The default is autocast on a CPU.
    _, state = make_train_state(training=LoopConfig(precision="bfloat16"))
    assert state.weights is None
    with pytest.raises(ValueError, match=r"`training\.bfloat16_weights` must be false or auto"):
        make_train_state(training=LoopConfig(precision="float32", bfloat16_weights=True))
    with pytest.raises(ValueError, match=r"with training\.strategy fsdp2"):
        make_train_state(training=LoopConfig(strategy="fsdp2", bfloat16_weights=True))
