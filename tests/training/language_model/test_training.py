"""Runs that train a speech language model through the trainer."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from effasr import checkpoint
from effasr.data.tokenizer import load_tokenizer
from effasr.model.asr import ASRModel
from effasr.training.trainer import run
from tests.support.chat_folder import THINKING, write_chat_model, write_tokenizer
from tests.support.talks import talks_config, write_folders

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_folders(tmp_path_factory.mktemp("talks"))


def config(folders, output, steps=4, training=None, **sections):
    training = {"max_steps": steps} | (training or {})
    return talks_config(folders, output, training=training, **sections)


def metrics(output):
    lines = (output / "talks" / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "loss" in line]


def weights(output, step):
    return load_file(output / "talks" / "checkpoints" / f"step_{step:08d}" / "model.safetensors")


def test_a_template_that_shows_earlier_answers_otherwise(folders, tmp_path, capsys):
    write_tokenizer(write_chat_model(tmp_path / "llm"), THINKING)
    thinking = folders | {"llm": str(tmp_path / "llm")}
    assert run(config(thinking, tmp_path, steps=2)) == 0
    assert (tmp_path / "talks" / "dropped.jsonl").read_text() == ""
    assert "4 conversations have an example for each answer" in capsys.readouterr().err


LORA = {
    "rank": 4,
    "targets": ["language_model.model.*_proj"],
    "also_train": ["encoder", "language_model.adapter"],
}


def test_a_checkpoint_is_whole_without_the_folder(folders, tmp_path):
    assert run(config(folders, tmp_path, steps=2)) == 0
    result = tmp_path / "talks" / "checkpoints" / "step_00000002"
    described = yaml.safe_load((result / "model.yaml").read_text())["model"]["language_model"]
    assert json.loads(described["architecture"])["model_type"] == "llama"
    loaded = checkpoint.load_model(result)
    saved = load_file(result / "model.safetensors")
    assert torch.equal(
        loaded.model.language_model.output_weight, saved["language_model.lm_head.weight"]
    )
    # Tables that are not saved are computed.
    loaded.model.language_model.check_against_transformers()


def test_adapters_and_frozen_weights(folders, tmp_path):
    assert run(config(folders, tmp_path, steps=2, lora=LORA)) == 0
    before = load_file(f"{folders['llm']}/model.safetensors")
    after = weights(tmp_path, 2)
    name = "model.layers.0.self_attn.q_proj"
    assert torch.equal(after[f"language_model.{name}.weight"], before[f"{name}.weight"])
    assert after[f"language_model.{name}.lora_b"].any()
    assert run(config(folders, tmp_path, steps=3, lora=LORA)) == 0


def test_an_encoder_is_joined_from_another_run(folders, tmp_path):
    source = tmp_path / "asr"
    model_config = config(folders, tmp_path).model
    asr = ASRModel(replace(model_config, language_model=None, ctc=True), 320)
    checkpoint.save_model(source, asr, load_tokenizer(folders["llm"]))
    options = {"init_from": str(source), "training": {"freeze": ["encoder"]}}
    assert run(config(folders, tmp_path / "b", steps=1, **options)) == 0
    joined = weights(tmp_path / "b", 1)
    for name, value in asr.encoder.state_dict().items():
        assert torch.equal(joined[f"encoder.{name}"], value), name
    # One step of 3e-3 from the weights of the folder.
    for name, value in load_file(f"{folders['llm']}/model.safetensors").items():
        assert (joined[f"language_model.{name}"] - value).abs().max() < 4e-3, name


def test_wrong_conversations_are_listed(folders, tmp_path):
    first = json.loads(Path(folders["speech"]).read_text().splitlines()[1])
    first["messages"][0]["content"][0]["audio"] = folders["speech"].replace(
        "speech.jsonl", "s1.wav"
    )
    turns = first["messages"]
    missing = {"type": "audio", "audio": "gone.wav"}
    long = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "word " * 600}]
    rows = [
        first,
        {"id": "missing", "messages": [{"role": "user", "content": [missing]}, turns[1]]},
        {"id": "roles", "messages": [turns[1], turns[0]]},
        {"id": "long", "messages": long},
        {"id": "empty", "messages": [turns[0], {"role": "assistant", "content": ""}]},
    ]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"mix": None, "train": str(path), "filters": {"max_dropped": 0.5}}
    assert run(config(folders, tmp_path, steps=1, data=data)) == 0
    listed = (tmp_path / "talks" / "dropped.jsonl").read_text().splitlines()
    reasons = {row["id"]: row["reason"] for row in map(json.loads, listed)}
    assert reasons == {
        "missing": "missing_audio",
        "roles": "wrong_roles",
        "long": "over_model_length",
        "empty": "empty_text",
    }


def test_error_messages(folders, tmp_path):
    path = tmp_path / "utterances.jsonl"
    path.write_text('{"audio_filepath": "a.wav", "text": "b", "duration": 1}\n')
    joined = {"ctc": True, "decoder": None, "language_model": {"path": folders["llm"]}}
    for sections, message in (
        ({"lora": LORA | {"also_train": []}}, r"language_model\.adapter.*lora\.also_train"),
        ({"loss": {"guided_weight": 1.0}}, "guided_weight"),
        ({"model": joined}, "`ctc` must be false"),
        ({"data": {"mix": None, "train": str(path)}}, "JSON lines with `messages`"),
    ):
        with pytest.raises(ValueError, match=message):
            run(config(folders, tmp_path, **sections))
