"""From recordings to a model, and on to Hugging Face and back, with the commands alone."""

import json
import shutil
from pathlib import Path

import torch

from effasr.checkpoint import load_model, resolve
from effasr.training.run_dir.run_directory import read_lines

METRICS = {
    "step", "epoch", "loss", "lr", "grad_norm", "audio_seconds", "tokens", "padding_frames",
    "padding_tokens", "data_wait_s", "step_s", "mfu", "peak_memory_bytes", "rank_imbalance",
}  # fmt: skip
WER = {"wer", "cer", "insertions", "deletions", "substitutions", "words", "utterances", "rtfx"}


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_model(resolve(run)).model.state_dict()


def assert_same_weights(one, other):
    torch.testing.assert_close(weights(one), weights(other), rtol=0, atol=0)


def test_prepare_keeps_and_lists(effasr, workplace, manifest, tmp_path):
    bad = manifest({}, {"audio_filepath": "gone.wav", "id": "lost"}, {"text": " ", "id": "mute"})
    done = effasr("prepare", bad, tmp_path / "out")
    assert done.code == 0
    assert done.err == ""
    assert "kept 1 utterances" in done.out
    assert f"dropped 2 utterances, each listed in {tmp_path}/out/dropped.jsonl" in done.out
    dropped = {line["id"]: line["reason"] for line in read_lines(tmp_path / "out/dropped.jsonl")}
    assert dropped == {"lost": "missing_audio", "mute": "empty_text"}


def test_a_run_holds_what_is_promised(workplace):
    run = workplace.run
    lines = read_lines(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line.keys() >= METRICS for line in lines)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "best", "latest", "step_00000002", "step_00000004",
    ]  # fmt: skip
    assert list((run / "tensorboard").glob("events.*"))
    (validation,) = read_lines(run / "validation.jsonl")
    assert (validation["step"], validation["set"]) == (4, "dev")
    assert json.loads((run / "evaluation/dev/wer.json").read_text()).keys() >= WER


def test_config_yaml_repeats_the_run(effasr, workplace):
    assert effasr("train", workplace.run / "config.yaml", "name=again").code == 0
    assert_same_weights(workplace.run, workplace.run.with_name("again"))


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not(effasr, workplace, tmp_path):
    command = ("train", workplace.recipe, f"output={tmp_path}")
    stopped = effasr(*command, "training.stop_at=3")
    assert stopped.code == 0
    assert "stopped at step 3; the same command continues from there" in stopped.err
    resumed = effasr(*command)
    assert resumed.code == 0
    assert "continuing from step 3 of 4" in resumed.err
    assert_same_weights(workplace.run, tmp_path / "first")
    finished = effasr(*command)
    assert finished.code == 0
    assert "all 4 steps have been made" in finished.err


def test_overrides_may_have_the_dashes_of_other_trainers(effasr, workplace):
    plain = effasr("train", workplace.recipe, "optimizer.lr=1e-3", "seed=3", "--show")
    dashed = effasr("train", workplace.recipe, "--optimizer.lr=1e-3", "--seed=3", "--show")
    assert dashed.code == 0
    assert dashed.out == plain.out
    assert "lr: 0.001\n" in plain.out
    assert "seed: 3\n" in plain.out


def test_evaluate_writes_into_the_run(effasr, workplace, tmp_path):
    done = effasr("evaluate", "--run", workplace.run, "--manifest", workplace.folder / "dev")
    assert done.code == 0
    assert done.err == ""
    folder = workplace.run / "evaluation" / "dev"
    assert f"written to {folder}" in done.out
    result = json.loads((folder / "wer.json").read_text())
    assert result.keys() >= WER
    assert result["utterances"] == 4
    rows = read_lines(folder / "hypotheses.jsonl")
    assert len(rows) == 4
    assert all(
        row.keys() == {"id", "reference", "hypothesis", "language", "duration"} for row in rows
    )
    (validation,) = read_lines(workplace.run / "validation.jsonl")
    assert result["wer"] == validation["wer"]


def test_a_set_is_named_after_its_manifest(effasr, workplace, monkeypatch):
    monkeypatch.chdir(workplace.folder / "dev")
    assert effasr("evaluate", "--run", workplace.run, "--manifest", ".").code == 0
    monkeypatch.chdir(workplace.folder)
    done = effasr("evaluate", "--run", "runs/first", "--manifest", "dev/cuts.jsonl.gz")
    assert "written to runs/first/evaluation/cuts\n" in done.out
    written = {path.name for path in (workplace.run / "evaluation").iterdir()}
    assert written == {"dev", "cuts"}


def test_evaluate_saves_beside_a_model_but_not_in_a_checkpoint(effasr, workplace, model):
    dev = workplace.folder / "dev"
    assert effasr("evaluate", model, dev).code == 0
    assert json.loads((model / "evaluation" / "dev" / "wer.json").read_text())["set"] == "dev"
    other = shutil.copytree(dev, model / "other" / "dev")
    refused = effasr("evaluate", model, other)
    assert f"evaluation/dev has the results of another set of that name, {dev}" in refused.error
    assert effasr("evaluate", model, other, "--output", model / "evaluation" / "dev-2").code == 0
    checkpoint = resolve(workplace.run)
    before = sorted(checkpoint.rglob("*"))
    done = effasr("evaluate", "--run", checkpoint, "--manifest", dev)
    assert done.code == 0
    assert "--output FOLDER" in done.out
    assert sorted(checkpoint.rglob("*")) == before


def test_lines_without_a_language_are_in_that_of_the_model(effasr, workplace, model, manifest):
    """A model for German is not asked for English."""
    unmarked = manifest({"lang": None})
    text = (model / "model.yaml").read_text()
    text = text.replace("source: en", "source: de").replace("target: en", "target: de")
    (model / "model.yaml").write_text(text)
    failed = effasr("evaluate", "--run", model, "--manifest", unmarked)
    assert "must be one of en, but is 'de'" in failed.error
    assert effasr("evaluate", "--run", model, "--manifest", unmarked, "--language", "en").code == 0
