"""A packed batch, one conversation at a time, transformers' own forward and a compiled one are one
function, whose cost is what torch counts.
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from effasr.data.batch import IGNORED, StaticShape
from effasr.model.asr import ASRModel
from effasr.model.cost import cost_model, recomputed_costs
from effasr.model.learning_cost import learning_cost
from effasr.nn.lora import LoRAConfig, adapt
from effasr.nn.parameters import freeze
from effasr.nn.stack import apply_activation_checkpointing
from tests.support.small_model import check_compiled
from tests.support.speech_llm import (
    FAMILIES,
    VOCABULARY,
    conversations,
    make_conversation_batch,
    speech_llm,
    speech_llm_config,
)

pytest.importorskip("transformers")

TOLERANCE = 1e-4
SHAPE = StaticShape(frame_budget=40, token_budget=70, max_sequences=6, longest_frames=20)


def packed(model, shape=None):
    """Logits of the rows that predict, loss and gradients of one packed batch."""
    batch = make_conversation_batch(conversations(), shape=shape)
    logits = model.language_model.logits(model.converse(batch))[batch.targets != IGNORED]
    loss = model(batch).cross_entropy
    return logits.detach(), loss.detach(), gradients(model, loss)


def gradients(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: x.grad for name, x in model.named_parameters()}


def assert_close(actual, expected):
    for item, other in zip(actual[:2], expected[:2], strict=True):
        torch.testing.assert_close(item, other, rtol=TOLERANCE, atol=TOLERANCE)
    assert actual[2].keys() == expected[2].keys()
    for name, grad in expected[2].items():
        assert grad is not None, name
        largest = float(grad.abs().max().clamp(min=1e-2))
        difference = float((actual[2][name] - grad).abs().max())
        assert difference <= TOLERANCE * largest, (name, difference, largest)


@pytest.mark.parametrize("kind", FAMILIES)
def test_packed_is_transformers_with_inputs_embeds(kind):
    model = speech_llm(kind)
    # Transformers' causal model with inputs_embeds and labels, one conversation at a time.
    language_model, logits, loss = model.language_model, [], torch.zeros(())
    for example in conversations():
        batch = make_conversation_batch([example])
        encoded = model.encode(batch).values if example.clips else None
        rows = language_model.embed(batch, encoded)[None]
        with language_model._as_causal() as causal:
            outputs = causal(inputs_embeds=rows, use_cache=False)
        counted = batch.targets != IGNORED
        logits.append(outputs.logits[0][counted])
        loss = loss + torch.nn.functional.cross_entropy(
            logits[-1], batch.targets[counted], reduction="sum"
        )
    expected = torch.cat(logits).detach(), loss.detach(), gradients(model, loss)
    assert len(expected[0]) == 6 + 5 + 7 + 2
    assert_close(packed(model), expected)
    assert_close(packed(model, SHAPE), expected)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_loaded_model_has_the_weights_and_the_tables_of_the_saved_one(kind):
    model = speech_llm(kind)
    saved = {name: x.clone() for name, x in model.state_dict().items()}
    loaded = ASRModel.from_state_dict(model.config, model.vocab_size, saved)
    expected = dict(model.named_parameters()) | dict(model.named_buffers())
    result = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
    assert result.keys() == expected.keys()
    assert [name for name, x in result.items() if not torch.equal(x, expected[name])] == []


@pytest.mark.parametrize("examples", [[], conversations()[1:2]], ids=["empty", "text"])
def test_batches_without_speech_give_every_parameter_a_gradient(examples):
    model = speech_llm()
    model(make_conversation_batch(examples, shape=SHAPE)).cross_entropy.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        is_idle = not examples or name.startswith(("encoder.", "language_model.adapter."))
        assert not is_idle or not parameter.grad.any(), name


def test_activation_checkpointing_keeps_the_gradients():
    model = speech_llm().train()
    expected = packed(model)[2]
    model.language_model.checkpoint_activations(1)
    calls = []
    for layer in model.language_model.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    actual = packed(model)[2]
    # Two forwards, of which one has a backward, of two layers.
    assert len(calls) == 6
    for name, grad in expected.items():
        torch.testing.assert_close(actual[name], grad, rtol=1e-5, atol=1e-6)


def test_a_batch_is_split_into_its_conversations():
    model = speech_llm()
    batch = make_conversation_batch(conversations(), shape=SHAPE)
    whole = model(batch)
    parts = [model(batch.part(0, 2)), model(batch.part(2, 4))]
    total = sum(part.cross_entropy for part in parts)
    torch.testing.assert_close(total, whole.cross_entropy, rtol=1e-5, atol=1e-5)
    assert batch.part(2, 4).ids == ("c2", "c3")
    assert batch.part(0, 2).num_targets + batch.part(2, 4).num_targets == batch.num_targets


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
    examples = conversations(0), conversations(1)[::-1], conversations(2)
    shape = StaticShape(40, 60, 6)
    check_compiled(model, [make_conversation_batch(x, shape=shape) for x in examples])


def lengths():
    batch = make_conversation_batch(conversations()[:1])
    return (
        batch,
        torch.tensor(batch.frame_lengths).numpy(),
        torch.tensor(batch.token_lengths).numpy(),
    )


@pytest.mark.parametrize("kind", ["llama", "gemma", "qwen2"])
def test_the_cost_is_what_a_forward_computes(kind):
    model = speech_llm(kind)
    batch, frames, rows = lengths()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.language_model.logits(model.converse(batch))
    # The cost leaves out the table of relative positions, of 2 * 64 - 1 distances.
    expected = counter.get_total_flops() - 2 * 127 * 32 * 32
    cost = int(cost_model(model.config, VOCABULARY).of(frames, rows)[0])
    # Rows of the adapter are rounded up.
    assert cost == pytest.approx(expected, rel=0.01)


def test_frozen_weights_and_adapters_cost_less():
    _, frames, rows = lengths()

    def total(change):
        model = speech_llm()
        change(model)
        return int(learning_cost(model).of(frames, rows)[0])

    whole = total(lambda model: None)
    frozen = total(lambda model: freeze(model, ["language_model.model", "encoder"]))
    targets = ("language_model.model.*_proj",)
    lora = total(
        lambda model: adapt(
            model, LoRAConfig(rank=1, targets=targets, also_train=("language_model.adapter",))
        )
    )
    assert frozen < lora < whole
    # Two of three products of frozen layers remain behind the trained adapter.
    assert frozen > whole / 3


def test_recomputed_layers_add_their_share():
    config = speech_llm_config()
    each_item, _ = recomputed_costs(config, VOCABULARY, 1)
    half, _ = recomputed_costs(config, VOCABULARY, 2)
    assert each_item.token == pytest.approx(2 * half.token)
    assert each_item.token_pair == cost_model(config, VOCABULARY).token_pair
