"""Costs of a speech language model, against FLOPs that are counted while it runs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from effasr.model.cost import cost_model, recomputed_costs
from effasr.model.learning_cost import learning_cost
from effasr.nn.lora import LoRAConfig, adapt
from effasr.nn.parameters import freeze
from tests.support.speech_llm import (
    VOCABULARY,
    conversations,
    make_conversation_batch,
    speech_llm,
    speech_llm_config,
)

pytest.importorskip("transformers")


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
    every, _ = recomputed_costs(config, VOCABULARY, 1)
    half, _ = recomputed_costs(config, VOCABULARY, 2)
    assert every.token == pytest.approx(2 * half.token)
    assert every.token_pair == cost_model(config, VOCABULARY).token_pair
