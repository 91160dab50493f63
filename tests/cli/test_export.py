"""The model card of an export, and averages of checkpoints."""

import errno
import json
import os
import shutil

import pytest
import soundfile
import torch
import yaml
from safetensors.torch import load_file

from effasr.checkpoint import WEIGHTS, load_model, resolve
from effasr.data.checksums import sha256
from effasr.decoding.config import DecodingConfig
from effasr.evaluation.model_card import ModelCard
from effasr.training.checkpointing.averaging import load_run
from effasr.transcription.transcribe import Waveform, transcribe


@pytest.fixture
def run(workplace, tmp_path):
    """A run of this test, evaluated on a set of 4 utterances."""
    shutil.copytree(workplace.run, tmp_path / "runs" / "mine", ignore=lambda *_: ["evaluation"])
    folder = tmp_path / "runs" / "mine"
    evaluated = sha256(resolve(folder) / WEIGHTS)
    for name, wer in (("dev", 0.125), ("no|words", None)):
        result = {
            "wer": wer, "cer": wer, "utterances": 4, "words": 8, "rtfx": 12.5,
            "normalizer": "basic", "wer_interval": None if wer is None else [0.1, 0.2],
            "model": evaluated, "search": "ctc, beam 4",
        }  # fmt: skip
        (folder / "evaluation" / name).mkdir(parents=True)
        (folder / "evaluation" / name / "wer.json").write_text(json.dumps(result))
    return folder


def front(path):
    _, content, _ = path.read_text(encoding="utf-8").split("---\n", 2)
    return yaml.safe_load(content)


def test_the_card_is_one_of_the_hub(effasr, run, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    out = tmp_path / "hf"
    done = effasr("export", run, out, "--license", "cc-by-4.0", "--author", "Zoë & Co.")
    assert done.code == 0, done.err
    card = hub.ModelCard.load(out / "README.md")
    assert card.data.license == "cc-by-4.0"
    assert card.data.language == ["en"]
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "automatic-speech-recognition"
    assert card.data.model_name == "mine"
    (result,) = card.data.eval_results
    assert (result.dataset_name, result.metric_type, result.metric_value) == ("dev", "wer", 12.5)
    for line in (
        "- Trained on: train",
        "- Updates: ",
        "| dev | 4 | 8 | 12.50 | 10.00 to 20.00 | 12.50 | basic | ctc, beam 4 | 12.5 |",
        "| no\\|words | 4 | 8 | - | - | - | basic | ctc, beam 4 | 12.5 |",
        "feed_forward: 16",
        "Licence: cc-by-4.0. Author: Zoë &amp; Co..",
        "CanaryForConditionalGeneration.from_pretrained",
    ):
        assert line in card.content, line
    assert str(tmp_path) not in card.content


COMMANDS = {
    "nemo": "restore_from('o.nemo')",
    "onnx": "python infer.py recording.wav",
    "sherpa-onnx": 'OfflineRecognizer.from_nemo_ctc(\n    model="model.onnx",',
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_other_formats_have_cards_too(effasr, run, tmp_path, monkeypatch, kind):
    out, card = ("o.nemo", "o.md") if kind == "nemo" else ("onnx", "onnx/README.md")
    if kind != "nemo":
        pytest.importorskip("onnxscript")
    options = ("--license", "mit", "--base-model", "nvidia/canary")
    done = effasr("export", run, tmp_path / out, *("--format", kind), *options)
    assert done.code == 0, done.err
    path = tmp_path / card
    head, text = front(path), path.read_text()
    assert (head["license"], head["base_model"]) == ("mit", "nvidia/canary")
    assert head["library_name"] == kind
    assert head["model-index"][0]["results"][0]["metrics"][0]["value"] == 12.5
    assert "- Trained from: nvidia/canary" in text
    assert COMMANDS[kind] in text


@pytest.mark.parametrize("head", ["decoder", "ctc"])
def test_the_code_of_the_card_transcribes_as_effasr_does(
    effasr, run, workplace, tmp_path, monkeypatch, capsys, head
):
    pytest.importorskip("transformers")
    done = effasr("export", run, tmp_path / "hf", "--head", head)
    assert done.code == 0, done.err
    shutil.copy(workplace.wav, tmp_path / "hf" / "recording.wav")
    method = "attention" if head == "decoder" else head
    loaded = load_model(resolve(run))
    loaded.model.durations = None  # else it would be cut into two
    search = DecodingConfig(method=method, fallback=False)
    samples = [Waveform("0", *soundfile.read(workplace.wav, dtype="float32"))]
    (ours,) = transcribe(
        loaded.model, loaded.tokenizer, samples, prompt=loaded.prompt, config=search
    )
    monkeypatch.chdir(tmp_path / "hf")
    code = (tmp_path / "hf" / "README.md").read_text().split("```python")[1].split("```")[0]
    capsys.readouterr()
    exec(code, {})
    # Special tokens are left out, which unknown ones are in transformers.
    assert capsys.readouterr().out.strip() == ours.text.replace("⁇", "").strip()


def test_results_of_other_weights_are_left_out(effasr, run, tmp_path, caplog):
    other = run / "evaluation" / "dev" / "wer.json"
    other.write_text(json.dumps(json.loads(other.read_text()) | {"model": "0" * 64}))
    assert effasr("export", run, tmp_path / "hf").code == 0
    assert f"{other} is not known to be of" in caplog.text
    caplog.clear()
    # A validation of training, of which its user knows nothing.
    other.write_text(json.dumps(json.loads(other.read_text()) | {"model": None}))
    assert effasr("export", run, tmp_path / "hf").code == 0
    assert "is not known to be of" not in caplog.text
    assert "metrics" not in front(tmp_path / "hf" / "README.md")
    assert "license" not in front(tmp_path / "hf" / "README.md")
    averaged = effasr("export", run, tmp_path / "mean", "--averaged", "2")
    assert averaged.code == 0, averaged.err
    text = (tmp_path / "mean" / "README.md").read_text()
    assert "| dev |" not in text
    assert "- Weights: the mean of the last 2 checkpoints" in text


def test_a_card_written_by_hand_is_left_alone(effasr, run, tmp_path):
    readme = tmp_path / "hf" / "README.md"
    assert effasr("export", run, tmp_path / "hf").code == 0
    readme.write_text(readme.read_text() + "\nand more\n")
    assert effasr("export", run, tmp_path / "hf", "--author", "A").code == 0
    assert "and more" not in readme.read_text()
    readme.write_text("by hand")
    again = effasr("export", run, tmp_path / "hf")
    assert again.code == 0
    assert f"{readme} is kept, because effasr export did not write it" in again.err
    assert readme.read_text() == "by hand"


def test_an_export_over_an_earlier_one_keeps_files_of_others_and_drops_stale_ones(
    effasr, run, tmp_path, monkeypatch
):
    out = tmp_path / "hf"
    assert effasr("export", run, out).code == 0
    (out / "notes.txt").write_text("mine")
    (out / "model.safetensors.index.json").write_text("{}")
    before = (out / "config.json").stat().st_ino
    names = {path.name for path in out.iterdir()} - {"model.safetensors.index.json"}
    assert effasr("export", run, out).code == 0
    assert {path.name for path in out.iterdir()} == names
    assert (out / "notes.txt").read_text() == "mine"
    assert (out / "config.json").stat().st_ino != before
    # In a folder with another folder, or the working directory, each file is replaced.
    (out / ".git").mkdir()
    (out / "model.safetensors.index.json").write_text("{}")
    (out / "model.safetensors").write_bytes(b"old")
    position = out.stat().st_ino
    assert effasr("export", run, out).code == 0
    monkeypatch.chdir(out)
    assert effasr("export", run, ".").code == 0
    assert {path.name for path in out.iterdir()} == names | {".git"}
    assert out.stat().st_ino == position
    assert load_file(out / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("with_folder", [False, True])
def test_an_export_that_fails_leaves_the_earlier_one(
    effasr, run, tmp_path, monkeypatch, with_folder
):
    out = tmp_path / "hf"
    assert effasr("export", run, out).code == 0
    if with_folder:
        (out / ".git").mkdir()
    before = {path.name: sha256(path) for path in out.iterdir() if path.is_file()}

    def full(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "README.md")

    monkeypatch.setattr(ModelCard, "text", full)
    failed = effasr("export", run, out, "--author", "other")
    assert failed.code == 1
    reason = f"{out} cannot be written; is the disk full? No space left on device"
    assert failed.err.splitlines()[-1] == f"effasr export: {reason}"
    assert {path.name: sha256(path) for path in out.iterdir() if path.is_file()} == before
    assert not list(tmp_path.rglob("*.partial"))


def test_a_model_directory_has_a_card_too(effasr, model, tmp_path):
    assert effasr("export", model, tmp_path / "hf").code == 0
    text = (tmp_path / "hf" / "README.md").read_text()
    assert "# model\n" in text
    assert "None of these weights" in text


def test_the_mean_of_checkpoints(effasr, run, tmp_path):
    folders = sorted((run / "checkpoints").glob("step_*"))
    assert len(folders) >= 2
    states = [load_file(folder / "model.safetensors") for folder in folders[-2:]]
    assert effasr("export", run, tmp_path / "one").code == 0
    assert effasr("export", run, tmp_path / "mean", "--averaged", "2").code == 0
    assert effasr("import", tmp_path / "mean", tmp_path / "back").code == 2  # no tokenizer.json
    # No evaluation is of a mean.
    assert "| dev |" in (tmp_path / "one" / "README.md").read_text()
    assert "| dev |" not in (tmp_path / "mean" / "README.md").read_text()
    mean = load_file(tmp_path / "mean" / "model.safetensors")
    item = load_file(tmp_path / "one" / "model.safetensors")
    assert mean.keys() == item.keys()
    assert all(value.dtype == item[name].dtype for name, value in mean.items())
    name = "decoder.embed_tokens.weight"
    expected = (states[0][name].double() + states[1][name].double()) / 2
    assert not torch.equal(states[0][name], states[1][name])
    theirs = next(value for key, value in mean.items() if key.endswith(name))
    assert torch.equal(theirs, expected.float())
    moved = [key for key in mean if key.endswith("running_mean") or key.endswith("running_var")]
    assert moved
    assert any(not torch.equal(mean[key], item[key]) for key in moved)
    # One is itself, and the newest.
    assert effasr("export", run, tmp_path / "newest", "--averaged", "1").code == 0
    newest = load_file(tmp_path / "newest" / "model.safetensors")
    (key,) = (key for key in newest if key.endswith(name))
    assert torch.equal(newest[key], states[1][name])


def test_a_training_may_prune_while_checkpoints_are_read(workplace, run, monkeypatch):
    """As one that goes on: the oldest goes when another comes."""
    folder, read = run / "checkpoints", load_model
    oldest, newest = sorted(folder.glob("step_*"))[-2:]
    later = folder / "step_00000900"

    def load(path, device="cpu"):
        if not later.exists():
            shutil.copytree(newest, later)
            shutil.rmtree(oldest)
        return read(path, device)

    monkeypatch.setattr("effasr.training.checkpointing.averaging.load_model", load)
    loaded, checkpoints = load_run(run, 2)
    assert checkpoints == [later, newest]
    expected = load_file(newest / WEIGHTS)["decoder.embed_tokens.weight"]
    assert torch.equal(loaded.model.decoder.embed_tokens.weight, expected)
    shutil.rmtree(newest)
    with pytest.raises(ValueError, match="must be from 1 to 1"):
        load_run(run, 2)


def test_an_average_is_evaluated_into_a_folder_of_its_own(effasr, run, workplace, model, tmp_path):
    dev = workplace.folder / "dev"
    done = effasr("evaluate", "--run", run, "--manifest", dev, "--averaged", "2")
    assert done.code == 0, done.err
    result = json.loads((run / "evaluation" / "dev-averaged-2" / "wer.json").read_text())
    names = sorted((path.name for path in (run / "checkpoints").glob("step_*")), reverse=True)
    assert (result["set"], result["averaged"], result["model"]) == ("dev", names[:2], None)
    text = effasr("transcribe", "--run", run, "--averaged", "2", workplace.wav)
    assert text.code == 0, text.err
    for command in (
        ("evaluate", "--run", model, "--manifest", dev),
        ("export", model, tmp_path / "hf"),
        ("export", resolve(workplace.run), tmp_path / "hf"),
    ):
        failed = effasr(*command, "--averaged", "1")
        assert failed.code == 2
        assert "`--averaged` must have a run with checkpoints" in failed.error
