"""Recorded micro-batches, with a recording that a CPU can replay."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from effasr import config as configuration
from effasr.training import cuda_graph
from effasr.training.config import LoopConfig, TrainConfig
from effasr.training.cuda_graph import MicroBatchGraph
from effasr.training.resolve import resolve_config
from effasr.training.step import run_micro_batch, train_step
from tests.training.conftest import make_batch

Outputs = tuple[Tensor, ...]


def record(run: Callable[[], Outputs]) -> tuple[Callable[[], Any], Outputs]:
    """As a CUDA graph: nothing runs now, and each replay writes to the same outputs."""
    outputs: Outputs = (torch.full((5,), torch.nan), torch.full((4,), torch.nan))

    def replay():
        for old, new in zip(outputs, run(), strict=True):
            old.copy_(new)

    return replay, outputs


def graphed(model, train_state):
    run = partial(run_micro_batch, train_state)
    device = torch.device("cpu")
    graph = MicroBatchGraph(run, device, model.parameters(), model.buffers(), record)
    return replace(train_state, graph=graph)


def test_the_recording_has_inputs_of_its_own(make_train_state, batches):
    model, train_state = make_train_state()
    before = [x.clone() for x in batches[0].tensors()]
    train_step(graphed(model, train_state), batches[:2], 0)
    assert all(map(torch.equal, before, batches[0].tensors()))


def test_error_messages(make_train_state, batches):
    model, train_state = make_train_state()
    train_state = graphed(model, train_state)
    train_step(train_state, batches[:1], 0)
    other = make_batch(0)
    other = replace(other, targets=other.targets[:-1])
    with pytest.raises(ValueError, match=r"static shape of the first.*cuda_graph=false"):
        train_step(train_state, [other], 1)
    with pytest.raises(ValueError, match=r"`training\.cuda_graph` needs a GPU"):
        make_train_state(training=LoopConfig(cuda_graph=True))


GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("overrides", "settings"),
    [
        ([], []),
        (["training.compile=true"], []),
        (["training.bfloat16_weights=true"], []),
        (["training.strategy=fsdp2"], ["training.strategy"]),
        (["training.strategy=h_adpsgd"], []),
        (["training.activation_checkpointing=2"], ["training.activation_checkpointing"]),
        (["data.text_share=0.5", "data.micro_batches=2"], ["data.text_share"]),
        (["data.strategy=bucketed", "data.batch_duration=100"], ["data.strategy"]),
        (["model.transducer.width=16"], []),
        (["model.transducer.durations=[0,1,2]"], []),
        (
            ["training.strategy=fsdp2", "training.activation_checkpointing=true"],
            ["training.strategy", "training.activation_checkpointing"],
        ),
    ],
)
def test_the_default_records_wherever_it_can(overrides, settings):
    config = configuration.load(TrainConfig, "small", overrides)
    assert config.training.cuda_graph == "auto"
    assert [x.setting for x in cuda_graph.obstacles(config, GPU)] == settings
    assert cuda_graph.uses_graph(config, GPU) == (not settings)
    on_cpu = cuda_graph.obstacles(config, torch.device("cpu"))
    assert [x.setting for x in on_cpu] == [*settings, "training.device"]
    assert not cuda_graph.uses_graph(config, torch.device("cpu"))


@pytest.mark.parametrize("asked", [True, False])
def test_a_choice_is_not_changed(asked):
    overrides = ["training.activation_checkpointing=true", f"training.cuda_graph={asked}"]
    config = configuration.load(TrainConfig, "small", overrides)
    assert cuda_graph.uses_graph(config, GPU) == asked
    if asked:
        # The messages are those of `obstacles`.
        with pytest.raises(ValueError, match=r"cannot be rewound while a graph is recorded"):
            resolve_config(config, None)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.usefixtures("eager_compiler")
@pytest.mark.representative(compiled=False)
def test_the_default_builds_a_recording(make_train_state, batches, monkeypatch, compiled):
    """On a device that counts as a GPU, with a recording that a CPU can replay."""
    monkeypatch.setattr(cuda_graph, "obstacles_of_model", lambda model, device: [])
    monkeypatch.setattr(cuda_graph, "check_recordable", lambda model, context: None)
    monkeypatch.setattr(cuda_graph, "_capture", record)
    compile_module, calls = torch.nn.Module.compile, []

    def watched(self, **options):
        calls.append(options)
        compile_module(self, **options)

    monkeypatch.setattr(torch.nn.Module, "compile", watched)
    results = []
    for choice in (False, "auto"):
        loop = LoopConfig(max_steps=20, compile=compiled, cuda_graph=choice)
        model, state = make_train_state(training=loop)
        assert (state.graph is not None) == (choice == "auto")
        assert len(calls) == (len(results) + 1 if compiled else 0)
        for step in range(2):
            train_step(state, batches[2 * step : 2 * step + 2], step)
        results.append(model.state_dict())
    for name, x in results[0].items():
        assert torch.equal(results[1][name], x), name
