"""Adapters beside linear layers, by their definition."""

import copy

import pytest
import torch
from torch import nn

from effasr.nn.attention import CrossAttention
from effasr.nn.linear import JoinedLinear
from effasr.nn.lora import LoRAConfig, LoRALinear, adapt, adapters, merged, without_adapters
from effasr.nn.parameters import evaluate_frozen, freeze, matching
from tests.support.speech_llm import speech_llm


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(6, 4)
        self.linear1 = nn.Linear(4, 5, bias=False)
        self.other = nn.Linear(5, 3)
        self.norm = nn.LayerNorm(3)

    def forward(self, x):
        return self.norm(self.other(self.linear1(self.q_proj(x)).relu()))


def make_adapted(config, seed=0, *, trained=True):
    torch.manual_seed(seed)
    model = Block().double()
    adapt(model, config)
    if trained:
        with torch.no_grad():
            for module in adapters(model):
                module.lora_b.normal_()
    return model


X = torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_gradients_are_those_of_the_definition_and_of_nothing_else():
    model = make_adapted(LoRAConfig(rank=3, alpha=3.0, also_train=("norm",)))
    model(X).square().sum().backward()
    weights = {}
    for name, parameter in model.named_parameters():
        weights[name] = parameter.detach().clone().requires_grad_(parameter.requires_grad)
        assert (parameter.grad is not None) == ("lora" in name or "norm" in name), name
    x = X
    for layer in ("q_proj", "linear1"):
        w, a, b = (weights[f"{layer}.{part}"] for part in ("weight", "lora_a", "lora_b"))
        x = nn.functional.linear(x, w + b @ a, weights.get(f"{layer}.bias"))
    x = nn.functional.linear(x.relu(), weights["other.weight"], weights["other.bias"])
    x = nn.functional.layer_norm(x, (3,), weights["norm.weight"], weights["norm.bias"])
    x.square().sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, weights[name].grad, msg=name)


def test_dropout_is_on_the_adapter_alone_and_only_in_training():
    model = make_adapted(LoRAConfig(rank=2, dropout=0.5))
    (layer, *_) = adapters(model)
    torch.manual_seed(0)
    dropped = layer(X) - nn.functional.linear(X, layer.weight, layer.bias)
    torch.manual_seed(0)
    expected = 16 * nn.functional.dropout(X, 0.5) @ layer.lora_a.T @ layer.lora_b.T
    torch.testing.assert_close(dropped, expected)
    model.eval()
    assert torch.equal(layer(X), layer(X))


def test_merged_is_the_same_function_without_adapters():
    model = make_adapted(LoRAConfig(rank=2)).eval()
    before, expected = copy.deepcopy(model.state_dict()), model(X)
    parameters = dict(model.named_parameters())
    with merged(model):
        assert model.state_dict().keys() == Block().state_dict().keys()
        torch.testing.assert_close(model(X), expected)
        plain = Block().double().eval()
        plain.load_state_dict(model.state_dict())
        torch.testing.assert_close(plain(X), expected)
        with merged(model):
            torch.testing.assert_close(model(X), expected)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameters[name] is value for name, value in model.named_parameters())
    assert list(model.state_dict()) == list(before)


def test_what_fails_while_merged_leaves_the_adapters():
    model = make_adapted(LoRAConfig(rank=2))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyError), merged(model):
        raise KeyError
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_state_dict_is_merged_as_a_model_is(dtype):
    model = make_adapted(LoRAConfig(rank=2, rslora=True)).to(dtype)
    plain = without_adapters(model.state_dict())
    with merged(model):
        assert plain.keys() == model.state_dict().keys()
        assert all(torch.equal(plain[name], x) for name, x in model.state_dict().items())
    assert without_adapters(plain).keys() == plain.keys()


def test_targets_are_chosen_by_patterns():
    model = make_adapted(LoRAConfig())
    assert adapters(model) == [model.q_proj, model.linear1]
    model = make_adapted(LoRAConfig(targets=("o*",)))
    assert adapters(model) == [model.other]


@pytest.mark.parametrize(
    ("kind", "fields", "without"),
    [
        ("llama", {}, set()),
        ("phi", {}, set()),
        ("phi3", {}, set()),
        ("gpt_neox", {}, set()),
        ("starcoder2", {}, set()),
        ("phimoe", {"num_local_experts": 2}, {"router"}),
    ],
)
def test_a_language_model_of_any_family_is_adapted_in_all_its_layers(kind, fields, without):
    pytest.importorskip("transformers")
    model = speech_llm(kind, **fields)
    adapt(model, LoRAConfig(rank=2))
    inner = model.language_model.model
    linear = {name: x for name, x in inner.named_modules() if isinstance(x, nn.Linear)}
    plain = {name for name, x in linear.items() if not isinstance(x, LoRALinear)}
    assert {name.rpartition(".")[2] for name in plain} == without
    assert len(plain) < len(linear)
    assert not isinstance(model.language_model.lm_head, LoRALinear)


@pytest.mark.parametrize("biased", [(True, False, True), (False, True), (True, False)])
def test_it_is_its_parts(biased):
    torch.manual_seed(0)
    joined = JoinedLinear(5, 4, biased)
    assert not joined.bias.any()
    nn.init.normal_(joined.bias)
    weights, biases = joined.weight.chunk(len(biased)), iter(joined.bias.split(4))
    x = torch.randn(3, 5)
    expected = [
        nn.functional.linear(x, weight, next(biases) if has else None)
        for weight, has in zip(weights, biased, strict=True)
    ]
    torch.testing.assert_close(joined(x), torch.cat(expected, -1))
    joined(x).sum().backward()
    torch.testing.assert_close(joined.bias.grad, torch.full_like(joined.bias, 3.0))


def test_adapters_stand_beside_it():
    torch.manual_seed(0)
    module = CrossAttention(8, 2, 4, key_bias=False)
    nn.init.normal_(module.kv_proj.bias)
    x = torch.randn(3, 8)
    before = module.kv_proj(x)
    adapt(module, LoRAConfig(rank=2))
    assert isinstance(module.kv_proj, LoRALinear)
    assert torch.equal(module.kv_proj(x), before)
    nn.init.normal_(module.kv_proj.lora_b)
    adapted = module.kv_proj(x)
    with merged(module):
        torch.testing.assert_close(module.kv_proj(x), adapted)
    assert not torch.equal(adapted, before)


PATHS = ["encoder.layers.0.weight", "encoder.layers.1.weight", "encoder.layers.12.weight", "head.b"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("encoder", PATHS[:3]),
        ("encoder.*", PATHS[:3]),
        ("encoder.layers.[0-9]", PATHS[:2]),
        ("encoder.layers.[0-9].*", PATHS[:2]),
        ("*.weight", PATHS[:3]),
        ("head.b", PATHS[3:]),
    ],
)
def test_a_pattern_matches_paths_and_modules(pattern, expected):
    assert matching(PATHS, [pattern], "x") == set(expected)


def test_patterns_add_up():
    assert matching(PATHS, ["head", "*.0.*"], "x") == {PATHS[0], PATHS[3]}
    assert matching(PATHS, [], "x") == set()


def make_model():
    model = nn.Sequential(
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout()),
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout()),
    )
    return model.train()


def test_frozen_parameters_require_no_gradient():
    model = make_model()
    freeze(model, ["0"])
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"1.0.weight", "1.0.bias", "1.1.weight", "1.1.bias"}


def test_only_modules_without_anything_to_train_are_in_evaluation_mode():
    model = make_model()
    freeze(model, ["0", "1.1"])
    evaluate_frozen(model)
    training = {name for name, module in model.named_modules() if module.training}
    # A dropout has no parameters, and goes with the module that holds it.
    assert training == {"", "1", "1.0", "1.2"}
