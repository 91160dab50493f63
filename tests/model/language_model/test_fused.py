"""Modules of transformers whose forward is an operation compute what they computed."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from effasr.cli.installation.report import recipe_rows
from effasr.model.language_model import model as fused
from effasr.nn.lora import LoRAConfig, adapt
from tests.support.chat_folder import write_chat_model
from tests.support.speech_llm import FAMILIES, conversations, make_conversation_batch, speech_llm

pytest.importorskip("transformers")

# phi3 has one projection for gate and up.
MODELS = [*FAMILIES, "mistral", "phi3"]
NORMS = {"qwen3": 9, "gemma3_text": 13}
"""With norms of queries and keys."""


@pytest.fixture
def _on_cpu(monkeypatch):
    """Call the operations on a CPU, too."""
    monkeypatch.setattr(fused, "is_fused", lambda x: True)


def _outcome(model):
    """The loss and all gradients."""
    model.zero_grad(set_to_none=True)
    loss = model(make_conversation_batch(conversations())).cross_entropy
    loss.backward()
    grads = [x.grad for x in model.parameters() if x.grad is not None]
    return [loss.detach(), *grads]


def _own(model):
    """The same by transformers' forwards."""
    model.language_model.fused.suspend()
    try:
        return _outcome(model)
    finally:
        model.language_model.fused.resume()


def _assert_close(actual, expected):
    assert len(actual) == len(expected)
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-4 * max(1e-2, float(y.abs().max())))


def _error(actual, expected):
    return sum(float((x - y).square().sum()) for x, y in zip(actual, expected, strict=True)) ** 0.5


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.usefixtures("_on_cpu")
def test_loss_and_gradients_are_those_of_transformers(kind):
    model: Any = speech_llm(kind)
    norms = NORMS.get(kind, 5)
    assert model.language_model.fused.counts == {
        "RMS norms": (norms, norms),
        "gated feed-forward networks": (2, 2),
    }
    exact = _own(model)
    _assert_close(_outcome(model), exact)
    with torch.autocast("cpu", torch.bfloat16):
        narrow, local = _outcome(model), _own(model)
    # The results of norms are rounded to bfloat16 before they are read; so are products.
    assert _error(narrow[1:], exact[1:]) < 1.5 * _error(local[1:], exact[1:])
    torch.testing.assert_close(narrow[0], exact[0], rtol=2**-7, atol=0)


@pytest.mark.usefixtures("_on_cpu")
def test_adapters_frozen_weights_and_recomputed_layers(monkeypatch):
    model: Any = speech_llm("qwen3").train()
    targets = ("language_model.model.*_proj",)
    adapt(model, LoRAConfig(rank=2, targets=targets, also_train=("*q_norm.weight",)))
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            nn.init.normal_(parameter, std=0.1)
    seen, norm = [], fused.rms_norm

    def noted(x, weight, **options):
        seen.append(weight.requires_grad)
        return norm(x, weight, **options)

    monkeypatch.setattr(fused, "rms_norm", noted)
    expected = _own(model)
    assert not seen
    _assert_close(_outcome(model), expected)
    # Only those of queries are trained.
    assert (seen.count(True), len(seen)) == (2, 9)
    model.language_model.checkpoint_activations(1)
    _assert_close(_outcome(model), expected)
    assert len(seen) == 9 + 17


@pytest.mark.usefixtures("_on_cpu")
def test_the_check_compares_with_the_forwards_of_transformers(monkeypatch):
    model: Any = speech_llm().language_model
    model.check_against_transformers()
    norm = fused.rms_norm
    monkeypatch.setattr(fused, "rms_norm", lambda *args, **rest: 1.1 * norm(*args, **rest))
    with pytest.raises(ValueError, match="must be those of transformers"):
        model.check_against_transformers()


@pytest.mark.usefixtures("_on_cpu")
def test_a_copy_computes_with_its_own_weights():
    model: Any = speech_llm()
    before = _outcome(model)[0]
    again = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(_outcome(again)[0], before)


def test_on_a_cpu_modules_keep_their_forwards(monkeypatch):
    model: Any = speech_llm()
    monkeypatch.setattr(fused, "rms_norm", None)
    monkeypatch.setattr(fused, "gated_activation", None)
    _outcome(model)


class _Norm(nn.Module):
    def __init__(self, change=""):
        super().__init__()
        self.weight, self.eps, self.change = nn.Parameter(torch.ones(8)), 1e-6, change

    def forward(self, x):
        wide = x.float()
        if self.change == "mean":
            wide = wide - wide.mean(-1, keepdim=True)
        eps = 1e-5 if self.change == "eps" else self.eps
        y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        if self.change == "rounding":
            return (y * self.weight).to(x.dtype)
        return self.weight * y.to(x.dtype)


class _Gated(nn.Module):
    def __init__(self, change=""):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 6), nn.Linear(8, 6)
        self.down_proj, self.change = nn.Linear(6, 8), change
        self.extra = nn.Dropout(0.0) if change == "dropout" else nn.Identity()

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.change == "swapped":
            gate, up = up, gate
        if self.change == "clamped":
            gate = gate.clamp(max=50.0)
        if self.change == "residual":
            return x + self.down_proj(F.silu(gate) * up)
        return self.down_proj(self.extra(F.silu(gate) * up))


@pytest.mark.parametrize("change", ["", "mean", "eps", "rounding"])
def test_a_norm_that_computes_something_else_keeps_its_forward(change):
    result = fused.fuse(nn.Sequential(_Norm(change)))
    assert result.counts == {"RMS norms": (0 if change else 1, 1)}


@pytest.mark.parametrize("change", ["", "swapped", "clamped", "residual", "dropout"])
def test_a_network_that_computes_something_else_keeps_its_forward(change):
    assert len(fused.fuse(nn.Sequential(_Gated(change))).forwards) == (0 if change else 1)


def test_doctor_counts_them(tmp_path):
    folder = write_chat_model(tmp_path / "llm", "qwen3")
    rows = recipe_rows("speech_llm_lora", [f"model.language_model.path={folder}"])
    (row,) = [x for x in rows if x.name == "fused modules"]
    assert row.value == "9 of 9 RMS norms, 2 of 2 gated feed-forward networks"


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.usefixtures("fresh_compiler", "_on_cpu")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_they_compile_without_a_break():
    model: Any = speech_llm("gemma3_text").language_model
    layout = make_conversation_batch(conversations()).tokens.layout
    x = torch.randn(layout.rows, model.embed_tokens.weight.shape[1])
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(compiled(x, layout), model(x, layout), rtol=1e-4, atol=1e-5)
