"""Models, devices and files that cannot be used: one line that says what to do."""

import json
import shutil

import pytest
import torch

from effasr.checkpoint import load_model, save_model
from effasr.training.run_dir.run_directory import read_lines


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors", "abc", "model.safetensors is damaged"),
        ("tokenizer", None, "tokenizer: holds neither"),
        ("tokenizer/en.model", "abc", "is no SentencePiece model"),
        ("model.yaml", None, "must be a model directory or a run with a checkpoint"),
        ("", None, "must be a model directory or a run with a checkpoint"),
    ],
)
def test_a_damaged_model_directory(effasr, workplace, model, tmp_path, file, content, message):
    path = model / file
    if content is None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    else:
        path.write_text(content)
    out = tmp_path / "out"
    for outcome in (
        effasr("evaluate", "--run", model, "--manifest", workplace.folder / "dev"),
        effasr("transcribe", "--run", model, workplace.wav),
        effasr("export", model, out),
    ):
        assert outcome.code == 2
        assert message in outcome.error
        assert outcome.out == ""
    assert not out.exists()


def test_a_manifest_in_another_language(effasr, workplace, manifest, tmp_path):
    path = manifest({"lang": "fr"}, {"lang": "de", "id": "german"})
    command = ("evaluate", "--run", workplace.run, "--manifest", path, "--output", tmp_path / "out")
    failed = effasr(*command)
    assert failed.code == 2
    message = "none of its 2 utterances can be evaluated; the first, train-0: the language"
    assert message in failed.error
    assert failed.out == ""
    assert not (tmp_path / "out").exists()


def test_many_failures_do_not_flood_the_terminal(effasr, workplace, manifest, tmp_path):
    path = manifest({}, *({"lang": "fr", "id": str(number)} for number in range(50)))
    command = ("evaluate", "--run", workplace.run, "--manifest", path, "--output", tmp_path / "out")
    done = effasr(*command)
    assert done.code == 1
    assert done.err == "effasr evaluate: 50 utterances failed and are not counted\n"
    assert "50 failed and are not counted" in done.out
    assert "  and 30 more\n" in done.out


def test_one_bad_file_does_not_keep_the_others_from_being_transcribed(
    effasr, workplace, recordings, monkeypatch
):
    monkeypatch.setenv("PATH", "")
    (recordings / "nothing").mkdir()
    names = ("gone.wav", "garbage.wav", "empty.wav", "nothing")
    files = (recordings / names[0], workplace.wav, *(recordings / name for name in names[1:]))
    failed = effasr("transcribe", "--run", workplace.run, *files)
    assert failed.code == 1
    assert [line.split("\t")[0] for line in failed.out.splitlines()] == [workplace.wav]
    lines = failed.err.splitlines()
    assert lines[:4] == [
        f"effasr transcribe: {recordings}/gone.wav: there is no such file.",
        f"effasr transcribe: {recordings}/garbage.wav: not a readable audio file: "
        "Format not recognised. ffmpeg might read it, but is not on the PATH: install it.",
        f"effasr transcribe: {recordings}/empty.wav: the file is empty.",
        f"effasr transcribe: {recordings}/nothing: a folder without recordings.",
    ]
    assert lines[-1].endswith(", 4 failed")
    told = effasr("transcribe", "--run", workplace.run, "--json", *files)
    assert told.code == 1
    assert told.out.count('"error"') == 4
    assert len([row for row in map(json.loads, told.out.splitlines()) if "text" in row]) == 1


def test_a_loss_that_is_not_finite_names_the_utterances(train, model, tmp_path):
    loaded = load_model(model)
    with torch.no_grad():
        loaded.model.decoder.embed_tokens.weight[5] = torch.inf
    save_model(model, loaded.model, loaded.tokenizer)
    failed = train(f"init_from={model}", "data.tokenizer=''", "data.validation=[]")
    assert failed.code == 1
    assert "Traceback" not in failed.err
    last = failed.err.splitlines()[-1]
    assert "failed: step 1: the loss is not finite; utterances: train-" in last
    (line,) = read_lines(tmp_path / "runs" / "first" / "skipped.jsonl")
    assert line["utterances"]
