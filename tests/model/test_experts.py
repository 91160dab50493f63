"""Speech models with experts: losses, costs, decoding, and what refuses them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from effasr.model.asr import ASRModel
from effasr.model.cost import cost_model
from effasr.model.encoder import FastConformerEncoder
from effasr.model.learning_cost import learning_cost
from effasr.nn.experts import ExpertFeedForward, ExpertsConfig, ExpertUse
from effasr.nn.lora import (
    LoRAConfig,
    LoRAGroupedLinear,
    adapt,
    adapters,
    merged,
    without_adapters,
)
from effasr.optim.adamw import parameter_groups
from effasr.training.strategies import weight_copies

VOCABULARY = 40
NAMED = ExpertsConfig(count=2, route="task", names=("transcribe", "translate"))
LEARNED = ExpertsConfig(count=3, top_k=2, balance=0.1, z_loss=0.01)


def _with(config, encoder, decoder):
    # Rotary positions have no table, which would count.
    return replace(
        config,
        encoder=replace(config.encoder, experts=encoder, position="rotary"),
        decoder=replace(config.decoder, experts=decoder),
    )


@pytest.fixture
def speech(examples, make_batch):
    """Utterances whose experts take turns."""
    numbered = enumerate(examples)
    return make_batch([replace(x, prompt=[7], monotonic=True, expert=n % 2) for n, x in numbered])


@pytest.mark.parametrize("experts", [NAMED, LEARNED], ids=["named", "learned"])
def test_a_row_costs_the_experts_that_it_uses(experts, tiny_config, speech):
    config = _with(tiny_config, experts, LEARNED)
    model = ASRModel(config, VOCABULARY).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(speech)
    frames, tokens = np.array(speech.frames.lengths), np.array(speech.tokens.layout.lengths)
    assert cost_model(config, VOCABULARY).of(frames, tokens).sum() == counter.get_total_flops()
    # What is all trained costs three times the forward, experts included.
    assert learning_cost(model).frame == cost_model(config, VOCABULARY).frame


def test_a_named_expert_is_the_model_with_its_weights(tiny_config, speech):
    model = ASRModel(_with(tiny_config, NAMED, None), VOCABULARY).eval()
    encoded = model.encode(speech).unpack()
    for expert in (0, 1):
        dense = ASRModel(
            replace(model.config, encoder=replace(model.config.encoder, experts=None)), VOCABULARY
        ).eval()
        local = {
            name: value[expert] if ".feed_forward" in name and "norm" not in name else value
            for name, value in model.state_dict().items()
        }
        dense.load_state_dict(local)
        for number, (x, y) in enumerate(zip(encoded, dense.encode(speech).unpack(), strict=True)):
            if number % 2 == expert:
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
            else:
                assert not torch.allclose(x, y, rtol=1e-2, atol=1e-2)
    with pytest.raises(ValueError, match=r"`expert` must be given .* \(transcribe, translate\)"):
        model(replace(speech, expert=None))


def test_the_losses_of_routers_are_a_mean_for_each_target(tiny_config, speech):
    model = ASRModel(_with(tiny_config, LEARNED, LEARNED), VOCABULARY).train()
    losses = model(speech)
    use = ExpertUse(model).line()
    layers = {"encoder": 2 * tiny_config.encoder.layers, "decoder": tiny_config.decoder.layers}
    balance = sum(0.1 * count * use[f"{x}_expert_balance"] for x, count in layers.items())
    per_target = losses.router.item() / speech.num_targets
    # The rest is the z-loss, of small logits.
    assert balance < per_target < balance + 0.05 * sum(layers.values()) * 3
    assert sum(use["encoder_expert_shares"]) == pytest.approx(1.0)
    # Counted anew.
    assert ExpertUse(model).line()["encoder_expert_shares"] is None
    routers = [p for name, p in model.named_parameters() if "router" in name]
    assert all(x.any() for x in torch.autograd.grad(losses.router, routers))
    # Validation counts errors of the model, not of its routers.
    assert model.eval()(speech).router is None
    # The lists hold the graph of a step, so they do not outlive it.
    assert not any(getattr(stack, "router_losses", ()) for stack in model.children())


@pytest.mark.parametrize("experts", [NAMED, LEARNED], ids=["named", "learned"])
@pytest.mark.parametrize("read", [0, 1])
def test_steps_of_decoding_are_the_forward(read, experts, tiny_config, speech):
    model = ASRModel(_with(tiny_config, NAMED, experts), VOCABULARY).eval()
    with torch.no_grad():
        encoded = model.encode(speech)
        if model.projection is not None:
            encoded = encoded.with_values(model.projection(encoded.values))
        hidden, _ = model.decoder(speech.tokens, encoded)
        expected = speech.tokens.with_values(hidden).unpack()
        tokens = speech.tokens.unpack()
        state = model.decoder.start(encoded, 3, [x[:read].tolist() for x in tokens])
        for position in range(read, 2):
            step = model.decoder.step(torch.stack([x[position] for x in tokens]), state)
            torch.testing.assert_close(step, torch.stack([x[position] for x in expected]))


def test_weights_are_saved_decayed_and_copied_like_others(tiny_config):
    config = _with(tiny_config, LEARNED, LEARNED)
    model = ASRModel(config, VOCABULARY)
    again = ASRModel.from_state_dict(config, VOCABULARY, model.state_dict())
    for (name, x), y in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(x, y), name
    network = next(x for x in again.modules() if isinstance(x, ExpertFeedForward))
    assert network.rows.tolist() == [0, 0, 0]
    decayed, spared = (group["params"] for group in parameter_groups(model, 0.1, ("biases",)))
    first = next(x for x in model.modules() if isinstance(x, ExpertFeedForward))
    assert any(first.linear1.weight is x for x in decayed)
    assert any(first.linear1.bias is x for x in spared)
    # Autocast casts what `WeightCopies` has copies of; narrow logits would change choices.
    assert list(weight_copies._names(first.linear1)) == ["weight", "bias"]
    assert not list(weight_copies._names(first.router))


@pytest.mark.parametrize("experts", [NAMED, LEARNED], ids=["named", "learned"])
def test_experts_have_adapters_of_their_own(experts, tiny_config, speech):
    config = _with(tiny_config, NAMED, experts)
    torch.manual_seed(0)
    model = ASRModel(config, VOCABULARY).eval()
    before = model(speech).cross_entropy.item()
    adapt(model, LoRAConfig(rank=2, alpha=4.0, also_train=("*norm*",)))
    grouped = [x for x in adapters(model) if isinstance(x, LoRAGroupedLinear)]
    assert len(grouped) == 2 * (2 * config.encoder.layers + len(model.decoder.layers))
    assert model(speech).cross_entropy.item() == before
    with torch.no_grad():
        for layer in adapters(model):
            layer.lora_b.normal_(std=0.5)
    losses = model(speech)
    assert losses.cross_entropy.item() != pytest.approx(before, rel=1e-2)
    with merged(model):
        again = model(speech).cross_entropy
    torch.testing.assert_close(again, losses.cross_entropy, rtol=1e-4, atol=0.0)
    plain = without_adapters(model.state_dict())
    again = ASRModel.from_state_dict(config, VOCABULARY, plain).eval()(speech).cross_entropy
    torch.testing.assert_close(again, losses.cross_entropy, rtol=1e-4, atol=0.0)

    # All of the second expert's.
    model(replace(speech, expert=torch.ones_like(speech.expert))).cross_entropy.backward()
    assert isinstance(model.encoder, FastConformerEncoder)
    for layer in model.encoder.modules():
        if isinstance(layer, LoRAGroupedLinear):
            assert layer.weight.grad is None
            for adapter in (layer.lora_a, layer.lora_b):
                assert not adapter.grad[0].any()
                assert adapter.grad[1].any()


def test_layers_of_experts_may_be_trained_beside_adapters(tiny_config):
    model = ASRModel(_with(tiny_config, NAMED, None), VOCABULARY)
    adapt(model, LoRAConfig(rank=2, targets=("*_proj",), also_train=("*feed_forward1*",)))
    network = next(x for x in model.modules() if isinstance(x, ExpertFeedForward))
    assert network.linear1.weight.requires_grad
    assert not any(isinstance(x, LoRAGroupedLinear) for x in adapters(model))
