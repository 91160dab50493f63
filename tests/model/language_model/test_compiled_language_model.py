"""A model with a language model compiles once for all batches of a static shape."""

import pytest
import torch

from effasr.data.batch import StaticShape
from effasr.nn.lora import LoRAConfig, adapt
from effasr.nn.stack import apply_activation_checkpointing
from tests.support.speech_llm import conversations, make_conversation_batch, speech_llm

pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "recomputed"), [("llama", False), ("llama", True), ("gemma3_text", False)]
)
@pytest.mark.usefixtures("fresh_compiler", "without_onednn")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.extended
def test_it_compiles_once_and_without_a_break(kind, recomputed):
    model = speech_llm(kind).train()
    if recomputed:
        apply_activation_checkpointing(model, 1)
        model.language_model.checkpoint_activations(1)
    if kind == "llama":
        targets = ("language_model.model.*_proj",)
        adapt(model, LoRAConfig(rank=2, targets=targets, also_train=("encoder",)))
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    shape = StaticShape(40, 60, 6)
    for seed, order in ((0, 1), (1, -1), (2, 1)):
        batch = make_conversation_batch(conversations(seed)[::order], shape=shape)
        results = []
        for call in (compiled, model):
            model.zero_grad()
            with torch._dynamo.config.patch(error_on_recompile=seed > 0):
                losses = call(batch)
            losses.cross_entropy.backward()
            found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            results.append((losses.cross_entropy.detach(), found))
        (loss, grads), (expected, expected_grads) = results
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
        assert grads.keys() == expected_grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected_grads[name], rtol=1e-3, atol=1e-4, msg=name)
