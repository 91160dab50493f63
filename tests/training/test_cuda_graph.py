"""Recorded micro-batches, with a recording that a CPU can replay."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from effasr.model.transducer import TransducerConfig
from effasr.training.config import LoopConfig
from effasr.training.cuda_graph.graph import MicroBatchGraph
from effasr.training.step import run_micro_batch, train_step
from tests.training.conftest import make_batch

Outputs = tuple[Tensor, ...]


def record(run: Callable[[], Outputs]) -> tuple[Callable[[], Any], Outputs]:
    """As a CUDA graph: nothing runs now, and each replay writes to the same outputs."""
    outputs: Outputs = (torch.full((5,), torch.nan), torch.full((4,), torch.nan))

    def replay() -> None:
        for old, new in zip(outputs, run(), strict=True):
            old.copy_(new)

    return replay, outputs


def graphed(model, train_state):
    run = partial(run_micro_batch, train_state)
    device = torch.device("cpu")
    graph = MicroBatchGraph(run, device, model.parameters(), model.buffers(), record)
    return replace(train_state, graph=graph)


def train(make_train_state, batches, *, recorded: bool) -> tuple[dict[str, Tensor], list[float]]:
    model, train_state = make_train_state()
    if recorded:
        train_state = graphed(model, train_state)
    losses = []
    for step in range(3):
        report = train_step(train_state, batches[2 * step : 2 * step + 2], step)
        losses += report.values.read()
        losses += [x for _, seen in report.micro_batches for x in seen.tolist()]
    return {name: x.clone() for name, x in model.state_dict().items()}, losses


def test_replayed_steps_are_those_that_would_have_run(make_train_state, batches) -> None:
    weights, losses = train(make_train_state, batches, recorded=True)
    expected, expected_losses = train(make_train_state, batches, recorded=False)
    assert losses == expected_losses
    for name, x in expected.items():
        assert torch.equal(weights[name], x), name


def test_the_recording_has_inputs_of_its_own(make_train_state, batches) -> None:
    model, train_state = make_train_state()
    before = [x.clone() for x in batches[0].tensors()]
    train_step(graphed(model, train_state), batches[:2], 0)
    assert all(map(torch.equal, before, batches[0].tensors()))


def test_refuses_another_shape(make_train_state, batches) -> None:
    model, train_state = make_train_state()
    train_state = graphed(model, train_state)
    train_step(train_state, batches[:1], 0)
    other = make_batch(0)
    other = replace(other, targets=other.targets[:-1])
    with pytest.raises(ValueError, match=r"static shape of the first.*cuda_graph=false"):
        train_step(train_state, [other], 1)


def test_needs_a_gpu(make_train_state) -> None:
    with pytest.raises(ValueError, match=r"`training\.cuda_graph` needs a GPU"):
        make_train_state(training=LoopConfig(cuda_graph=True))


def test_cannot_record_a_transducer(make_train_state, model_config) -> None:
    config = replace(model_config, transducer=TransducerConfig())
    with pytest.raises(ValueError, match=r"cannot record a transducer.*set it to false"):
        make_train_state(model=config, training=LoopConfig(cuda_graph=True))
