"""Models as people have them: fine-tuned, of the Trainer, and files that are something else."""

import gzip
import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from effasr.checkpoint import load_model
from tests.interop.whisper import make_tokenizer, make_whisper


@pytest.fixture
def whisper(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    make_whisper(folder)
    return folder


def update(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def forced(*names):
    tokenizer = make_tokenizer()
    return [[place, tokenizer.token_to_id(name)] for place, name in enumerate(names, 1)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"source": "en", "target": "en", "task": "transcribe"}),
        ({"language": "german", "task": "transcribe"}, {"source": "de", "target": "de"}),
        ({"language": "<|de|>"}, {"source": "de", "target": "de"}),
        ({"language": "German", "task": "translate"}, {"source": "de", "target": "en"}),
        (
            {"forced_decoder_ids": forced("<|de|>", "<|transcribe|>", "<|notimestamps|>")},
            {"source": "de", "target": "de"},
        ),
        (
            {"forced_decoder_ids": forced("<|de|>", "<|translate|>")},
            {"source": "de", "target": "en", "task": "translate"},
        ),
        ({"forced_decoder_ids": [[1, None], [2, 5]]}, {"source": "en", "target": "en"}),
        ({"language": "cantonese"}, {"source": "yue", "target": "yue"}),
    ],
)
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_language_and_task_are_those_that_it_was_tuned_for(
    effasr, whisper, tmp_path, settings, expected, file
):
    if file == "config.json":
        (whisper / "generation_config.json").unlink()
    update(whisper / file, **settings)
    assert effasr("import", whisper, tmp_path / "model").code == 0
    prompt = yaml.safe_load((tmp_path / "model" / "model.yaml").read_text())["prompt"]
    assert expected.items() <= prompt.items()
    assert effasr("export", tmp_path / "model", tmp_path / "out").code == 0
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (written["language"], written["task"]) == (prompt["source"], prompt["task"])
    assert effasr("import", tmp_path / "out", tmp_path / "again").code == 0
    assert yaml.safe_load((tmp_path / "again" / "model.yaml").read_text())["prompt"] == prompt


def test_an_older_configuration_names_the_language_where_generation_does_not(
    effasr, whisper, tmp_path
):
    prompt = forced("<|de|>", "<|transcribe|>", "<|notimestamps|>")
    update(whisper / "config.json", forced_decoder_ids=prompt)
    update(whisper / "generation_config.json", forced_decoder_ids=None)
    assert effasr("import", whisper, tmp_path / "model").code == 0
    assert load_model(tmp_path / "model").prompt.source == "de"


def test_a_tokenizer_saved_with_a_language_names_it(effasr, whisper, tmp_path):
    (whisper / "tokenizer_config.json").write_text(json.dumps({"language": "german"}))
    assert effasr("import", whisper, tmp_path / "model").code == 0
    assert load_model(tmp_path / "model").prompt.source == "de"


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_weights_of_torch_save(effasr, whisper, tmp_path, shards, prefix):
    weights = load_file(whisper / "model.safetensors")
    assert effasr("import", whisper, tmp_path / "expected").code == 0
    (whisper / "model.safetensors").unlink()
    parts = [{}, {}]
    for number, (name, value) in enumerate(weights.items()):
        parts[number % shards][prefix + name] = value
    if shards == 1:
        torch.save(parts[0], whisper / "pytorch_model.bin")
    else:
        where = {}
        for number, part in enumerate(parts, 1):
            file = f"pytorch_model-0000{number}-of-00002.bin"
            torch.save(part, whisper / file)
            where |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": where}
        (whisper / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert effasr("import", whisper, tmp_path / "model").code == 0
    ours, theirs = (
        load_model(tmp_path / name).model.state_dict() for name in ("model", "expected")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


class _Program:
    def __reduce__(self):
        return print, ("run",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": _Program()}, "must hold tensors alone, but does not, and is not opened"),
        ({"a": 3}, "must hold tensors by name, but does not"),
        ({"a": torch.zeros(1).expand(10**9)}, "must hold tensors by name, but does not"),
    ],
)
def test_harmful_weights_are_refused(effasr, whisper, tmp_path, content, message):
    (whisper / "model.safetensors").unlink()
    torch.save(content, whisper / "pytorch_model.bin")
    failed = effasr("import", whisper, tmp_path / "model")
    assert failed.code == 2
    assert f"pytorch_model.bin {message}" in failed.error
    assert "run" not in failed.out.split()


def test_a_checkpoint_of_the_trainer_lacks_a_tokenizer(effasr, whisper, tmp_path):
    run = tmp_path / "run"
    for name in ("checkpoint-500", "checkpoint-1000"):
        shutil.copytree(whisper, run / name)
        (run / name / "tokenizer.json").unlink()
    several = effasr("import", run, tmp_path / "model")
    assert "2 checkpoints of transformers' Trainer: name one of them" in several.error
    assert f"such as {run}/checkpoint-1000" in several.error
    failed = effasr("import", run / "checkpoint-1000", tmp_path / "model")
    remedy = (
        "Copy it from the model that was fine-tuned: `hf download openai/whisper-tiny tokenizer"
    )
    assert remedy in failed.error
    update(run / "checkpoint-1000" / "config.json", _name_or_path="openai/whisper-small")
    failed = effasr("import", run / "checkpoint-1000", tmp_path / "model")
    assert f"openai/whisper-small tokenizer.json --local-dir {run}/checkpoint-1000" in failed.error
    shutil.copy(whisper / "tokenizer.json", run)
    failed = effasr("import", run / "checkpoint-1000", tmp_path / "model")
    assert f"there is no such file. Copy that of {run}, if" in failed.error
    shutil.copy(run / "tokenizer.json", run / "checkpoint-1000")
    assert effasr("import", run / "checkpoint-1000", tmp_path / "model").code == 0


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 459\n"
PAGE = b"<!DOCTYPE html><html>401</html>"
THINGS = {
    "a pointer of git-lfs to a file that was not downloaded: run `git lfs pull`": POINTER,
    "a web page, such as a site sends": PAGE,
    "an answer of a server in XML": b"<?xml version='1.0'?><Error>AccessDenied</Error>",
    "an answer of a server with an error": b'{"error": "Invalid username or password."}',
    "a gzip of something else": gzip.compress(b"words " * 1000),
    "a gzip of a web page": gzip.compress(PAGE),
    "a recording": b"RIFF" + bytes(100),
    "an HDF5 file": b"\x89HDF\r\n\x1a\n" + bytes(100),
    "an ONNX graph, which has no weights": b"\x08\x08\x12\x07pytorch" + bytes(100),
    "a ggml file of whisper.cpp": b"lmgg" + bytes(100),
    "a packed file": b"7z\xbc\xaf\x27\x1c" + bytes(100),
    "empty: download it again": b"",
}


@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize(
    "name",
    ["model.nemo", "source/model.safetensors", "source/pytorch_model.bin", "source/config.json"],
)
def test_what_is_no_model_is_named(effasr, whisper, tmp_path, thing, name):
    if name.endswith(".bin"):
        (whisper / "model.safetensors").unlink()
    (tmp_path / name).write_bytes(THINGS[thing])
    if name.endswith("config.json") and THINGS[thing].startswith(b"{"):
        return  # JSON, but of no model: the next check says so
    failed = effasr(
        "import", tmp_path / name if name == "model.nemo" else whisper, tmp_path / "out"
    )
    assert failed.code == 2
    assert len(failed.error.splitlines()) == 1
    assert f"{Path(name).name} must be " in failed.error
    assert f"but is {thing}" in failed.error
    assert not (tmp_path / "out").exists()


def test_files_of_torch_and_safetensors_are_named(effasr, whisper, tmp_path):
    weights = {"encoder.weight": torch.zeros(2)}
    lightning = {"state_dict": weights, "pytorch-lightning_version": "2.2", "epoch": 3}
    openai = {"dims": {"n_audio_ctx": 1500}, "model_state_dict": weights}
    torch.save(lightning, tmp_path / "epoch=3.ckpt")
    torch.save(openai, tmp_path / "small.pt")
    torch.save(weights, tmp_path / "weights.pt")
    save_file(weights, tmp_path / "model.safetensors")
    with zipfile.ZipFile(tmp_path / "folder.zip", "w") as packed:
        packed.writestr("model/config.json", "{}")
    for name, message in {
        "epoch=3.ckpt": "a checkpoint of PyTorch Lightning, which has no tokenizer: write the",
        "small.pt": "a checkpoint of OpenAI's whisper: convert it",
        "weights.pt": "a file of torch.save: name a folder with it, config.json",
        "model.safetensors": "a file of safetensors: name a folder",
        "folder.zip": "a zip with model/config.json: unpack it",
    }.items():
        failed = effasr("import", tmp_path / name, tmp_path / "out")
        assert failed.code == 2
        assert f"{name} must be a .nemo file, a tar, but is {message}" in failed.error


def test_a_pointer_in_a_model_directory_is_named(effasr, model, workplace):
    (model / "model.safetensors").write_bytes(POINTER)
    failed = effasr("transcribe", "--run", model, workplace.wav)
    assert "model.safetensors is a pointer of git-lfs" in failed.error


def test_another_class_is_refused_with_those_that_are_read(effasr, whisper, tmp_path):
    update(whisper / "config.json", model_type="seamless_m4t")
    failed = effasr("import", whisper, tmp_path / "out")
    assert "must be canary or cohere_asr or" in failed.error
    assert "or whisper, but is seamless_m4t" in failed.error
    # Whatever else the folder has not.
    (whisper / "tokenizer.json").unlink()
    assert effasr("import", whisper, tmp_path / "out").error == failed.error


def test_a_classifier_and_weights_without_their_folder_are_named(
    effasr, whisper, tmp_path, workplace
):
    failed = effasr("transcribe", "--run", whisper / "model.safetensors", workplace.wav)
    assert f"was not imported: `effasr import {whisper} models/source`" in failed.error
    update(whisper / "config.json", architectures=["WhisperForAudioClassification"])
    failed = effasr("import", whisper, tmp_path / "out")
    assert "must be of a model that transcribes, but is WhisperForAudioClass" in failed.error
