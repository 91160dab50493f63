"""Steps that are replayed, compiled, recomputed or made with weights cast once are those steps."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from effasr.data.config import DataConfig
from effasr.model.transducer import TransducerConfig
from effasr.optim.adamw import OptimizerConfig
from effasr.optim.adascale import AdaScaleConfig
from effasr.training.config import LoopConfig
from effasr.training.step import train_step
from tests.training.shortage import shortage
from tests.training.test_cuda_graph import graphed

FAST = OptimizerConfig(lr=0.01)
LSTM = TransducerConfig(width=8, joint=8, dropout=0.1)
STATELESS = replace(LSTM, predictor="stateless")
RECOMPUTED = {"activation_checkpointing": True}
HALF = {"precision": "bfloat16", "bfloat16_weights": False}
COPIES = {"bfloat16_weights": True}
ADASCALE = {
    "optimizer": OptimizerConfig(lr=0.01, adascale=AdaScaleConfig(scale=2.0)),
    "data": DataConfig(micro_batches=2),
}

# Of each case: settings and loop of both runs, what the second run has in another way, and the step
# and place at which both are short of memory. "graph" and "transducer" are no settings of a run.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "graph": ({}, {}, {"graph": True}, ""),
    "graph of lstm": ({"transducer": LSTM}, {}, {"graph": True}, ""),
    "graph of stateless": ({"transducer": STATELESS}, {}, {"graph": True}, ""),
    "recomputed": ({}, {}, RECOMPUTED, ""),
    "recomputed short in forward": ({}, {}, RECOMPUTED, "forward"),
    "recomputed short in backward": ({}, {}, RECOMPUTED, "backward"),
    "compiled recomputed": ({}, RECOMPUTED, {"compile": True}, ""),
    "compiled lora": ({"lora": True}, {}, {"compile": True}, ""),
    "copies": ({}, HALF, COPIES, ""),
    "copies recomputed": ({}, HALF | RECOMPUTED, COPIES, ""),
    "copies average": ({}, HALF | {"ema_decay": 0.9}, COPIES, ""),
    "copies adascale": (ADASCALE, HALF, COPIES, ""),
    "copies lora": ({"lora": True}, HALF, COPIES, ""),
    "copies freeze": ({}, HALF | {"freeze": ("encoder.layers", "decoder.*.linear1")}, COPIES, ""),
    "copies transducer": ({"transducer": LSTM, "decoder": None}, HALF, COPIES, ""),
    "copies short": ({}, HALF, COPIES, "backward"),
    "copies graph": ({"graph": True}, HALF, COPIES, ""),
    "copies compiled": ({}, HALF | {"compile": True}, COPIES, ""),
}
OFTEN = [
    *("graph", "graph of lstm", "graph of stateless", "copies", "copies recomputed"),
    *("recomputed", "recomputed short in forward", "recomputed short in backward"),
    *("copies lora", "copies transducer", "copies short"),
]


def train(
    make_train_state, batches, loop: dict[str, Any], short: str, steps: int, **settings
) -> list[Tensor]:
    is_graph = bool(loop.pop("graph", False) or settings.pop("graph", False))
    model, state = make_train_state(training=LoopConfig(max_steps=20, **loop), **settings)
    assert (state.weights is not None) == loop.get("bfloat16_weights", False)
    if is_graph:
        state = graphed(model, state)
    figures: list[float] = []
    for step in range(steps):
        calls = [1] if short and step == 1 else []
        with shortage(model, *calls, where=short):
            report = train_step(state, batches[2 * step : 2 * step + 2], step)
        assert (report.read()["finite"], report.read()["splits"]) == (1, len(calls))
        figures += report.read().values()
        figures += [x for _, losses in report.micro_batches for x in losses.tolist()]
    assert all(p.dtype == torch.float32 for p in model.parameters())
    average = [] if state.average is None else state.average.average.values()
    return [*(x.clone() for x in model.state_dict().values()), *average, torch.tensor(figures)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("eager_compiler")
@pytest.mark.representative(case=OFTEN)
def test_the_run_is_the_same(case, make_train_state, make_lora_config, model_config, batches):
    settings, loop, change, short = CASES[case]
    # A compiled model rounds otherwise, which more steps would magnify.
    is_exact = not case.startswith("compiled")
    settings = ({"optimizer": FAST} if is_exact else {}) | settings
    model = {name: settings.pop(name) for name in ("transducer", "decoder") if name in settings}
    if model:
        settings["model"] = replace(model_config, **model)
        # Each batch has its own division of the nodes, within one budget.
        batches = [replace(batch, node_budget=600) for batch in batches]
    if settings.pop("lora", False):
        config = make_lora_config()
        settings |= {"lora": config.lora, "init_from": config.init_from, "data": config.data}
    expected, results = (
        train(make_train_state, batches, loop | way, short, 3 if is_exact else 1, **settings)
        for way in ({}, change)
    )
    tolerance = {"rtol": 0.0, "atol": 0.0} if is_exact else {}
    if case == "copies adascale":
        # On some processors the gain, of sums of squared gradients, differs in its last digit.
        tolerance = {"rtol": 1e-6, "atol": 1e-9}
    torch.testing.assert_close(results, expected, **tolerance)
