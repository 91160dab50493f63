"""Which language models a CUDA graph can record, and that a recording computes the same."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from effasr.data.batch import StaticShape
from effasr.model.language_model.architecture import host_read
from effasr.training import cuda_graph
from effasr.training.cuda_graph import MicroBatchGraph
from tests.support.speech_llm import (
    FAMILIES,
    architecture,
    conversations,
    make_conversation_batch,
    speech_llm,
    speech_llm_config,
)

pytest.importorskip("transformers")

DYNAMIC: dict[str, Any] = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
GPU = torch.device("cuda")


@pytest.mark.parametrize("kind", FAMILIES)
def test_usual_families_read_nothing(kind):
    assert host_read(architecture(kind)) is None


def test_positions_chosen_by_the_host_are_found():
    result = host_read(architecture("llama", **DYNAMIC))
    assert "modeling_rope_utils.py line" in result
    assert "_local_scalar_dense" in result


def test_a_graph_is_refused_only_where_transformers_reads():
    assert not list(cuda_graph.obstacles_of_model(speech_llm_config("qwen3"), GPU))
    config = speech_llm_config("llama", **DYNAMIC)
    (obstacle,) = cuda_graph.obstacles_of_model(config, GPU)
    assert obstacle.setting == "model.language_model"
    assert "modeling_rope_utils.py" in obstacle.message
    assert "choose another language model" in obstacle.message
    # Of a folder that is not read yet nothing is known.
    unread = replace(config.language_model, architecture=None, path="models/llm")
    assert not list(cuda_graph.obstacles_of_model(replace(config, language_model=unread), GPU))


def test_a_recording_of_speech_serves_batches_of_text():
    """The recorded encoder runs on nothing but tail, and leaves no gradient."""
    shape = StaticShape(40, 70, 6, longest_frames=20, longest_tokens=40)
    model = speech_llm()
    parameters = list(model.parameters())

    def run(batch, counts, **_):
        losses = model(batch)
        (losses.cross_entropy / counts).backward()
        return losses.cross_entropy.detach(), losses.per_utterance

    def record(function):
        outputs = torch.full((), torch.nan), torch.full((6,), torch.nan)

        def replay():
            for old, new in zip(outputs, function(), strict=True):
                old.copy_(new)

        return replay, outputs

    graph = MicroBatchGraph(run, torch.device("cpu"), parameters, [], record)
    speech, counts = conversations(), torch.tensor(3.0)
    for number, examples in enumerate([speech, speech[1:2], speech[::-1], [], speech[2:]]):
        batch = make_conversation_batch(examples, shape=shape)
        results = []
        for call in (graph, run):
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.zero_()
            loss, losses = call(batch, counts)
            result = [p.grad.clone() for p in parameters if p.grad is not None]
            assert len(result) == len(parameters)
            results.append((loss, losses, result))
        (loss, losses, grads), (expected, expected_losses, expected_grads) = results
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-5)
        for item, other in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(item, other, rtol=1e-4, atol=1e-5)
        if number == 1:
            idle = [p.grad for p in model.encoder.parameters()]
            assert not any(g is None or g.any() for g in idle)
