"""A T5 behind a speech encoder learns, resumes, transcribes and translates by commands."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file

from effasr.cli.main import main
from effasr.training.run_dir.run_directory import read_lines
from tests.cli.conftest import write_rows
from tests.support.chat_folder import write_chat_model
from tests.support.talks import model_mapping, write_talks

transformers = pytest.importorskip("transformers")
pytest.importorskip("sacrebleu")

INSTRUCTION = "translate English to German: "
LANGUAGES = {"source_lang": "en", "target_lang": "de"}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    root = tmp_path_factory.mktemp("t5")
    write_talks(root / "data", texts=0)
    write_chat_model(root / "llm", "t5")
    pairs = [
        {"source_text": INSTRUCTION + source, "text": text, **LANGUAGES}
        for source, text in (("cat", "Katze"), ("dog", "Hund"), ("bird", "Vogel"))
    ]
    turns = [
        [{"role": "user", "content": x["source_text"]}, {"role": "assistant", "content": x["text"]}]
        for x in pairs
    ]
    written = [{"id": str(number), "messages": messages} for number, messages in enumerate(turns)]
    spoken = [
        {"id": row["id"], "audio_filepath": row["messages"][0]["content"][0]["audio"],
         "text": row["messages"][1]["content"]}
        for row in read_lines(root / "data/speech.jsonl")[1:4]
    ]  # fmt: skip
    training = {
        "log_every": 1,
        "max_steps": 40,
        "validate_every": 40,
        "device": "cpu",
        "threads": 1,
    }
    mapping = {
        "name": "t5",
        "output": str(root / "runs"),
        "model": model_mapping(root / "llm", speech_input="decoder"),
        "data": {
            "mix": {"sources": {
                "speech": str(root / "data/speech.jsonl"),
                "text": {"manifests": str(write_rows(root / "data/written.jsonl", written)),
                         "weight": 0.8},
            }},
            "validation": [str(write_rows(root / "data/dev.jsonl", spoken)),
                           str(write_rows(root / "data/pairs.jsonl", pairs))],
            **{"frame_budget": 60, "workers": 0, "cache": None},
        },
        "loss": {"label_smoothing": 0.0},
        "optimizer": {"lr": 1e-2},
        "schedule": {"warmup_steps": 5},
        "training": training | {"tensorboard": False},
    }  # fmt: skip
    (root / "t5.yaml").write_text(yaml.safe_dump(mapping))
    return root


@pytest.fixture(scope="module")
def run(recipe):
    assert main(["train", str(recipe / "t5.yaml"), "training.stop_at=20"]) == 0
    assert main(["train", str(recipe / "t5.yaml")]) == 0
    return recipe / "runs/t5"


def test_it_learns_to_translate(run):
    lines = [row for row in read_lines(run / "metrics.jsonl") if "loss" in row]
    assert lines[-1]["loss"] < lines[0]["loss"] / 2
    results = {row["set"]: row for row in read_lines(run / "validation.jsonl")}
    assert results["pairs"]["chrf"] > 90
    assert results["dev"]["wer"] > 0


@pytest.mark.extended
def test_it_resumes_bit_by_bit(recipe, run):
    assert main(["train", str(recipe / "t5.yaml"), f"output={recipe / 'whole'}"]) == 0
    name = "checkpoints/step_00000040/model.safetensors"
    weights, whole = load_file(run / name), load_file(recipe / "whole/t5" / name)
    assert weights.keys() == whole.keys()
    assert all(torch.equal(value, whole[name]) for name, value in weights.items())


def test_commands(effasr, recipe, run, tmp_path):
    common = (str(run), "--device", "cpu")
    clips = [str(recipe / f"data/s{n}.wav") for n in (1, 2)]
    together = effasr("transcribe", *common, *clips, "--beam", "2").out
    assert [line.split("\t")[0] for line in together.splitlines()] == clips
    assert "WER" in effasr("evaluate", *common, str(recipe / "data/dev.jsonl")).out
    assert effasr("chat", *common, INSTRUCTION + "dog").out == "Hund\n"
    assert effasr("export", str(run), str(tmp_path / "exported")).code == 0
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "exported")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "exported/tokenizer.json"),
        **{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    )
    ids = tokenizer(INSTRUCTION + "cat<|im_end|>", return_tensors="pt").input_ids
    start = {"decoder_start_token_id": tokenizer.pad_token_id}
    tokens = theirs.generate(ids, eos_token_id=tokenizer.eos_token_id, max_new_tokens=9, **start)
    assert tokenizer.decode(tokens[0], skip_special_tokens=True) == "Katze"
    readme = (tmp_path / "exported/README.md").read_text()
    assert "AutoModelForSeq2SeqLM" in readme
    assert json.loads((tmp_path / "exported/config.json").read_text())["model_type"] == "t5"


def test_what_needs_one_shape_is_refused(effasr, recipe):
    refused = effasr("train", str(recipe / "t5.yaml"), "training.compile=true", "name=other")
    assert "`training.compile` must be false for an encoder-decoder language model" in refused.err
