"""Folders of causal language models: what is read, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from effasr.interop.huggingface.language_model import read_language_model, write_language_model
from effasr.model.language_model.architecture import max_rows, model_config, read_architecture
from effasr.model.language_model.config import LanguageModelConfig
from effasr.model.language_model.model import LanguageModel
from tests.support.chat_folder import write_chat_model
from tests.support.speech_llm import architecture

pytest.importorskip("transformers")


def build(folder):
    return LanguageModel(LanguageModelConfig(architecture=read_architecture(folder)), 32)


@pytest.fixture(params=["llama", "gemma"])
def folder(request, tmp_path):
    """Of separate and of tied embeddings."""
    return write_chat_model(tmp_path / "llm", request.param)


def weights_of(folder):
    return load_file(folder / "model.safetensors")


def test_weights_come_back_as_they_were(folder, tmp_path):
    model = build(folder)
    read_language_model(folder, model)
    write_language_model(model, tmp_path / "copy")
    saved, copied = weights_of(folder), weights_of(tmp_path / "copy")
    assert saved.keys() == copied.keys()
    for name, value in saved.items():
        assert torch.equal(value, copied[name])
    again = json.loads((tmp_path / "copy/config.json").read_text())
    assert again["model_type"] == json.loads((folder / "config.json").read_text())["model_type"]


def test_folders_of_the_base_model_and_with_a_tied_weight_twice(tmp_path):
    folder = write_chat_model(tmp_path / "llm", "gemma")
    weights = weights_of(folder)
    expected = weights["model.embed_tokens.weight"].clone()
    bare = {name.removeprefix("model."): value for name, value in weights.items()}
    for saved in ({**weights, "lm_head.weight": expected}, bare):
        save_file(saved, folder / "model.safetensors")
        model = build(folder)
        read_language_model(folder, model)
        assert torch.equal(model.output_weight, expected)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.norm.weight", None, "lacks model.norm.weight"),
        ("model.extra", torch.zeros(1), "has model.extra, which is unknown"),
        ("model.norm.weight", torch.zeros(3), r"must have the shape \(48,\)"),
    ],
)
def test_other_weights_are_refused(tmp_path, name, value, message):
    folder = write_chat_model(tmp_path / "llm")
    weights = weights_of(folder) | {name: value}
    weights = {name: value for name, value in weights.items() if value is not None}
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        read_language_model(folder, build(folder))


def test_pickled_weights_are_not_read(tmp_path):
    folder = write_chat_model(tmp_path / "llm")
    model = build(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="safetensors alone"):
        read_language_model(folder, model)


def test_code_of_a_folder_is_never_run(tmp_path):
    folder = write_chat_model(tmp_path / "llm")
    (folder / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    mapping = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    mapping["auto_map"] = names
    (folder / "config.json").write_text(json.dumps(mapping))
    build(folder)
    (folder / "config.json").write_text(json.dumps({**mapping, "model_type": "mine"}))
    with pytest.raises(ValueError, match=r"`model_type`.*code of their folder"):
        build(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": "wide"}, "llama"),
        ({"quantization_config": {"bits": 4}}, "must not be quantized"),
        ({"num_attention_heads": 5}, "cannot be built|not a configuration"),
    ],
)
def test_wrong_configurations_are_refused(tmp_path, fields, message):
    with pytest.raises(ValueError, match=r"language_model\.path"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text(architecture("llama", **fields))
    with pytest.raises(ValueError, match=message):
        build(tmp_path)


@pytest.mark.parametrize(
    ("kind", "fields", "limit"),
    [
        ("llama", {}, 512),
        ("mistral", {"sliding_window": 64}, 64),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False}, 512),
        ("gemma3_text", {"sliding_window": 100}, 100),
    ],
)
def test_most_rows(kind, fields, limit):
    assert max_rows(architecture(kind, **fields)) == limit


def test_implementations_in_a_configuration_are_ignored():
    text = architecture("llama", _attn_implementation="kernels-community/x", use_kernels=True)
    assert getattr(model_config(text), "_attn_implementation", None) != "kernels-community/x"


@pytest.mark.parametrize("kind", ["gemma2", "cohere"])
def test_families_that_compute_more_are_refused(kind):
    model = LanguageModel(LanguageModelConfig(architecture=architecture(kind)), 32)
    with pytest.raises(ValueError, match="family of language models"):
        model.check_against_transformers()


@pytest.mark.parametrize(
    ("name", "value"),
    [("vocab_size", 10**7), ("num_hidden_layers", 1000), ("intermediate_size", 10**7)],
)
def test_sizes_that_the_weights_do_not_have_take_no_memory(folder, name, value):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(ValueError, match=f"config.json: must have the sizes .* `{name}` {value}"):
        read_architecture(folder)
    # Without weights they are drawn, with whatever sizes the user asks for.
    (folder / "model.safetensors").unlink()
    assert str(value) in read_architecture(folder)
