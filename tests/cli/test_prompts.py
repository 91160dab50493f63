"""What a line of a manifest does not say is as the model was trained, in every command."""

import json
import shutil

import pytest
import yaml

from effasr.data.manifest.cuts import prompt_of
from effasr.data.manifest.reader import iterate
from effasr.data.prompt import Prompt
from effasr.model.config import ModelConfig
from effasr.transcription.recognizer import Recognizer

PLAIN = Prompt(punctuation=False)
PUNCTUATED = Prompt()


@pytest.fixture
def asked(monkeypatch):
    """The prompts of all recordings that are transcribed."""
    prompts, decode = set(), Recognizer.prompt

    def record(recognizer, prompt):
        prompts.add(prompt)
        return decode(recognizer, prompt)

    monkeypatch.setattr(Recognizer, "prompt", record)
    return prompts


@pytest.fixture
def unsaid(manifest):
    """A manifest whose lines say neither language nor punctuation."""
    rows = [{"id": str(number), "lang": None, "pnc": None} for number in range(2)]
    return manifest(*rows)


COMMANDS = {
    "file": ("transcribe", "--run", "{run}", "{wav}"),
    "transcribe": ("transcribe", "--run", "{run}", "--manifest", "{manifest}"),
    "evaluate": ("evaluate", "--run", "{run}", "--manifest", "{manifest}", "--output", "{out}"),
    "label": ("label", "{run}", "{manifest}", "{out}"),
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("prepared", [False, True])
def test_a_missing_field_is_as_trained(
    effasr, workplace, model, unsaid, asked, tmp_path, name, prepared
):
    if prepared:
        assert effasr("prepare", unsaid, tmp_path / "prepared").code == 0
        unsaid = tmp_path / "prepared"
    places = {"run": model, "manifest": unsaid, "wav": workplace.wav}
    for punctuation in (False, True):
        description = yaml.safe_load((model / "model.yaml").read_text())
        description["prompt"]["punctuation"] = punctuation
        (model / "model.yaml").write_text(yaml.safe_dump(description))
        places["out"] = tmp_path / f"out-{punctuation}"
        asked.clear()
        done = effasr(*(part.format(**places) for part in COMMANDS[name]))
        assert done.code == 0, done.err
        assert asked == {Prompt(punctuation=punctuation)}


@pytest.mark.parametrize("name", ["prepare", "train", "transcribe", "evaluate"])
def test_lines_that_name_no_language_are_counted(
    effasr, train, model, manifest, monkeypatch, caplog, tmp_path, name
):
    path = manifest({"id": "a", "lang": None}, {"id": "b"}, {"id": "c", "lang": ""})
    if name == "prepare":
        assert "2 utterances name no language" in effasr("prepare", path, tmp_path / "out").out
        return
    places = {"run": model, "manifest": path, "out": tmp_path / "out"}
    line = [part.format(**places) for part in COMMANDS.get(name, ())]
    data = f"data.train={path}", "data.validation=[]", "training.max_steps=1"
    for told, counted in ((False, False), (True, True)):
        monkeypatch.setattr(ModelConfig, "is_told_language", lambda *_, told=told: told)
        done = train(f"name=told-{told}", *data) if name == "train" else effasr(*line)
        assert done.code == 0, done.err
        warned = "2 of 3 utterances name no language, and are prompted as 'en'" in caplog.text
        assert warned == counted
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        (tmp_path / "out").unlink(missing_ok=True)
    if name != "train":
        caplog.clear()
        assert effasr(*line, "--language", "en").code == 0
        assert "name no language" not in caplog.text


@pytest.mark.parametrize("command", [COMMANDS["transcribe"], COMMANDS["evaluate"]])
def test_options_have_precedence_over_lines(effasr, model, manifest, asked, tmp_path, command):
    path = manifest({"id": "a", "pnc": False}, {"id": "b", "pnc": None})
    places = {"run": model, "manifest": path, "out": tmp_path / "out"}
    line = [part.format(**places) for part in command]
    assert effasr(*line).code == 0
    assert asked == {PLAIN}
    assert effasr(*line, "--punctuation").code == 0
    assert asked == {PLAIN, PUNCTUATED}
    asked.clear()
    assert effasr(*line, "--target-language", "fr").code != 0
    assert Prompt("en", "fr", "translate", False) in asked


def test_transcribing_a_manifest_needs_no_text(effasr, workplace, corpus_rows, tmp_path):
    lines = [{"audio_filepath": row["audio_filepath"], "id": str(n)}
             for n, row in enumerate(corpus_rows[:2])]  # fmt: skip
    path = tmp_path / "silent.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = effasr("transcribe", "--run", workplace.run, "--manifest", path)
    assert done.code == 0
    assert [line.split("\t")[0] for line in done.out.splitlines()] == ["0", "1"]
    assert "`text` is missing" in effasr(
        "evaluate", "--run", workplace.run, "--manifest", path, "--output", tmp_path / "out"
    ).err  # fmt: skip


def test_validation_asks_for_what_was_trained(effasr, train, unsaid, asked, tmp_path):
    done = train("name=plain", f"data.validation={unsaid}", "training.max_steps=1")
    assert done.code == 0, done.err
    assert asked == {PLAIN}


DE_EN = Prompt("de", "en", "translate", False)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, DE_EN),
        ({"pnc": "yes"}, Prompt("de", "en", "translate", True)),
        ({"pnc": False}, DE_EN),
        ({"lang": "fr"}, Prompt("fr", "en", "translate", False)),
        ({"lang": "en"}, Prompt("en", "en", "transcribe", False)),
        ({"target_lang": "fr"}, Prompt("de", "fr", "translate", False)),
        ({"target_lang": "de"}, Prompt("de", "de", "transcribe", False)),
        ({"task": "asr"}, Prompt("de", "de", "transcribe", False)),
        ({"taskname": "ast"}, DE_EN),
        ({"source_lang": "de", "lang": "de"}, Prompt("de", "de", "transcribe", False)),
    ],
)
def test_lines_beside_a_translating_model(effasr, manifest, tmp_path, fields, expected):
    path = manifest({"lang": None, "pnc": None} | fields)
    (cut,) = iterate(path, prompt=DE_EN)
    assert prompt_of(cut) == expected
    if "taskname" in fields:
        return  # a training set must say into which language
    # A prepared folder says no more than the lines; `prepare` decides the language alone.
    assert effasr(*("prepare", path, tmp_path / "out", "--language", "de")).code == 0
    (again,) = iterate(tmp_path / "out", prompt=DE_EN)
    assert prompt_of(again) == expected
