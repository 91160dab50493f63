"""Models, devices and files that cannot be used: one line that says what to do."""

import shutil

import pytest


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
