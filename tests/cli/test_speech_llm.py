"""A speech language model is trained, asked, evaluated and exported by commands."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
import soundfile
import torch
import yaml

from effasr.checkpoint import load_model, resolve, save_model
from effasr.cli.main import main
from effasr.config import from_mapping
from effasr.data.conversation.messages import AudioPart, Message
from effasr.data.tokenizer import load_tokenizer
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.training.run_dir.run_directory import read_lines
from effasr.transcription.answers import Answer, Responder
from effasr_kernels import PackedLayout
from tests.cli.conftest import write_rows
from tests.support.chat_folder import write_chat_model
from tests.support.talks import model_mapping, write_talks

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("speech_llm")
    write_talks(root / "data")
    write_chat_model(root / "llm")
    rows = []
    for row in read_lines(root / "data/speech.jsonl")[1:4]:
        audio = row["messages"][0]["content"][0]["audio"]
        text = row["messages"][1]["content"]
        rows.append({"id": row["id"], "audio_filepath": audio, "text": text})
    training = {"max_steps": 3, "validate_every": 3, "device": "cpu", "threads": 1}
    recipe = {
        "name": "talks",
        "output": str(root / "runs"),
        "model": model_mapping(root / "llm"),
        "data": {
            "train": [str(root / "data/speech.jsonl"), str(root / "data/text.jsonl")],
            "validation": str(write_rows(root / "data/dev.jsonl", rows)),
            **{"frame_budget": 60, "workers": 0, "cache": None},
        },
        "training": training | {"tensorboard": False},
    }
    (root / "talks.yaml").write_text(yaml.safe_dump(recipe))
    return root


@pytest.fixture(scope="module")
def run(folder):
    assert main(["train", str(folder / "talks.yaml")]) == 0
    return folder / "runs/talks"


def test_validation_transcribes_utterances_by_the_instruction(run):
    (line,) = read_lines(run / "validation.jsonl")
    assert line["utterances"] == 3
    assert line["wer"] > 0


def test_transcribe_and_evaluate(effasr, folder, run):
    clips = [str(folder / f"data/s{n}.wav") for n in (1, 2)]
    common = ("--run", str(run), "--device", "cpu")
    requested = ("transcribe", *common, "--instruction", "what is said here")
    together = effasr(*requested, *clips).out
    assert [line.split("\t")[0] for line in together.splitlines()] == clips
    assert together == "".join(effasr(*requested, clip).out for clip in clips)
    assert len(effasr("transcribe", *common, *clips, "--beam", "3").out.splitlines()) == 2
    manifest = str(folder / "data/dev.jsonl")
    assert "WER" in effasr("evaluate", *common, "--manifest", manifest).out


def test_what_a_language_model_does_not_do_is_refused(effasr, folder, run, tmp_path):
    clip = str(folder / "data/s1.wav")
    common = ("--run", str(run), "--device", "cpu")
    refused = effasr("transcribe", *common, clip, "--target-language", "de")
    assert refused.code == 2
    assert "`instruction` must ask for the translation from en to de" in refused.err
    requested = ("--instruction", "what is said here")
    assert effasr("transcribe", *common, clip, "--target-language", "de", *requested).code == 0
    refused = effasr("label", str(run), clip, str(tmp_path / "labels"), "--device", "cpu")
    assert refused.code == 2
    assert "`confidence` must be left out for the method language_model" in refused.err


def test_chat(effasr, folder, run):
    common = ("chat", "--run", str(run), "--device", "cpu", "--max-tokens", "5")
    requested = effasr(*common, "--audio", str(folder / "data/s1.wav"), "what is said here")
    assert len(requested.out.splitlines()) == 1
    again = effasr(*common, "--audio", str(folder / "data/s2.wav"), "what is said here")
    assert effasr(*common, "hello world").code == requested.code == again.code == 0
    # Relative paths are relative to the manifest.
    path = folder / "data/questions.jsonl"
    lines = (folder / "data/speech.jsonl").read_text().splitlines()[:5]
    wrong = {"id": "wrong", "messages": [{"role": "user", "content": "a"}]}
    # A control character that JSON allows, and terminals obey.
    odd = json.loads(lines[1])
    odd["messages"][1]["content"] = "one\x85two"
    lines[1] = json.dumps(odd)
    path.write_text("\n".join([*lines[:2], json.dumps(wrong), *lines[2:]]) + "\n")
    result = effasr(*common, "--manifest", str(path))
    assert result.code == 1
    rows = [json.loads(line) for line in result.out.splitlines()]
    assert [row["id"] for row in rows] == ["s0", "s1", "wrong", "s2", "s3", "s4"]
    assert rows[0]["reference"] == json.loads(lines[0])["messages"][1]["content"]
    assert rows[1]["reference"] == "one\x85two"
    assert "\x85" not in result.out
    assert isinstance(rows[0]["answer"], str)
    assert "last turn is of user" in rows[2]["error"]
    for slots in ("1", "2"):
        assert effasr(*common, "--manifest", str(path), "--slots", slots).out == result.out
    refused = effasr(*common, "--manifest", str(path), "--system", "be brief")
    assert "leave out QUESTION, --audio and --system" in refused.err


def test_chat_goes_on_after_an_empty_answer(effasr, folder, run, monkeypatch):
    """The next question takes the place of the one that was not answered, with its recording."""
    requested = []

    def answer(self, messages):
        requested.append([(message.role, len(message.parts)) for message in messages])
        return Answer("" if len(requested) == 1 else "yes", truncated=False)

    monkeypatch.setattr(Responder, "answer", answer)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\nthree\n"))
    clip = str(folder / "data/s1.wav")
    done = effasr("chat", "--run", str(run), "--device", "cpu", "--audio", clip)
    assert done.out == "\nyes\nyes\n"
    first = ("user", 2)
    assert requested == [[first], [first], [first, ("assistant", 1), ("user", 1)]]


def test_recordings_that_the_model_cannot_read_are_errors_of_their_row(
    effasr, folder, run, tmp_path
):
    soundfile.write(tmp_path / "short.wav", np.zeros(50), 16_000)
    rows = read_lines(folder / "data/speech.jsonl")[1:3]
    for row in rows:
        part = row["messages"][0]["content"][0]
        part["audio"] = str(folder / "data" / part["audio"])
    rows[0]["messages"][0]["content"][0]["audio"] = str(tmp_path / "short.wav")
    path = write_rows(tmp_path / "questions.jsonl", rows)
    common = ("chat", "--run", str(run), "--device", "cpu", "--max-tokens", "5")
    result = effasr(*common, "--manifest", str(path))
    assert result.code == 1
    short, whole = (json.loads(line) for line in result.out.splitlines())
    assert "has no frame" in short["error"]
    assert "answer" in whole
    loaded = load_model(resolve(run))
    config = loaded.model.config
    loaded.model.config = replace(config, encoder=replace(config.encoder, max_frames=1))
    (long,) = Responder(loaded).answers([(Message("user", (AudioPart(part["audio"]),)),)])
    assert "encoder frames, over 1" in str(long)


def test_the_exported_folder_is_transformers(effasr, folder, run, tmp_path):
    out = tmp_path / "exported"
    assert "AutoModelForCausalLM" in effasr("export", str(run), str(out)).out
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    loaded = load_model(resolve(run))
    model = loaded.model
    turns = [{"role": "user", "content": "hello"}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert ids == loaded.tokenizer.encode(loaded.tokenizer.render(turns, asks=True), "")
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
        x = model.language_model.embed_tokens(torch.tensor(ids))
        hidden = model.language_model(x, PackedLayout.from_lengths([len(ids)]))
    torch.testing.assert_close(model.language_model.logits(hidden), expected, rtol=1e-4, atol=1e-4)
    assert (out / "speech/speech.safetensors").is_file()
    assert "Stack\n2 neighbouring frames" in (out / "README.md").read_text()


def test_an_exported_folder_begins_another_run(effasr, folder, run, tmp_path):
    out = tmp_path / "exported"
    effasr("export", str(run), str(out))
    settings = (f"model.language_model.path={out}", "name=again", f"output={tmp_path}")
    effasr("train", str(folder / "talks.yaml"), *settings, "training.max_steps=1")
    assert (tmp_path / "again/checkpoints/step_00000001").is_dir()


def test_a_model_without_a_language_model_cannot_chat(effasr, folder, tmp_path):
    recipe = yaml.safe_load((folder / "talks.yaml").read_text())["model"]
    plain = from_mapping(ModelConfig, {**recipe, "language_model": None, "ctc": True})
    save_model(tmp_path / "m", ASRModel(plain, 320), load_tokenizer(folder / "llm"))
    refused = effasr("chat", "--run", str(tmp_path / "m"), "hello")
    assert refused.code == 2
    assert "must have a language model" in refused.error
