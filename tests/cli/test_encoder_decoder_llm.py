"""A T5 behind a speech encoder learns, resumes, transcribes and translates by commands."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from effasr.training.run_dir.run_directory import read_lines
from effasr.training.trainer import run as train
from tests.cli.conftest import write_rows
from tests.support.talks import model_mapping, talks_config, write_folders

transformers = pytest.importorskip("transformers")
pytest.importorskip("sacrebleu")

STEPS = 60


def test_it_learns_to_translate_and_obeys_commands(effasr, tmp_path):
    torch.manual_seed(0)
    folders = write_folders(tmp_path, "t5", texts=1)
    source, text = (turn["content"] for turn in read_lines(Path(folders["text"]))[0]["messages"])
    pair = {"source_text": source, "text": text, "source_lang": "en", "target_lang": "de"}
    written = {"manifests": folders["text"], "weight": 0.8}
    config = talks_config(
        folders,
        tmp_path,
        model=model_mapping(folders["llm"], speech_input="decoder"),
        data={
            "mix": {"sources": {"speech": folders["speech"], "text": written}},
            "validation": [str(write_rows(tmp_path / "pairs.jsonl", [pair]))],
            "micro_batches": 1,
        },
        optimizer={"lr": 1e-2},
        training={"max_steps": STEPS, "validate_every": STEPS, "checkpoint_every": STEPS},
    )
    with pytest.raises(ValueError, match="compile` must be false for an encoder-decoder"):
        train(replace(config, training=replace(config.training, compile=True)))
    assert train(replace(config, training=replace(config.training, stop_at=STEPS // 2))) == 0
    assert train(config) == 0
    run = tmp_path / config.name
    lines = [row for row in read_lines(run / "metrics.jsonl") if "loss" in row]
    assert lines[-1]["loss"] < lines[0]["loss"] / 2
    (validated,) = read_lines(run / "validation.jsonl")
    assert validated["chrf"] > 90
    common, clip = (str(run), "--device", "cpu"), str(tmp_path / "data/s1.wav")
    assert effasr("chat", *common, source).out == f"{text}\n"
    assert effasr("transcribe", *common, clip, "--beam", "2").code == 0
    dev = write_rows(tmp_path / "dev.jsonl", [{"audio_filepath": clip, "text": "hello"}])
    assert "WER" in effasr("evaluate", *common, str(dev)).out
    assert (
        f" {validated['chrf']:.2f} |" in effasr("evaluate", *common, config.data.validation[0]).out
    )
    assert effasr("export", str(run), str(run / "exported")).code == 0
    transformers.AutoModelForSeq2SeqLM.from_pretrained(run / "exported")
