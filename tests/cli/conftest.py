"""A corpus whose words are tones, and a model trained on it for a few steps through the CLI."""

import io
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile

from effasr.checkpoint import load_model, resolve
from effasr.cli.main import main
from effasr.training.run_dir.run_directory import read_lines

WORDS = {"low": 300.0, "middle": 700.0, "high": 1500.0, "top": 3000.0}

RECIPE = """\
name: first
output: {folder}/runs
model:
  ctc: true
  features: {{mel_bins: 16}}
  encoder: {{width: 16, layers: 1, heads: 2, feed_forward: 16, subsampling_channels: 4}}
  decoder: {{width: 16, layers: 1, heads: 2, feed_forward: 16, max_positions: 64}}
data:
  train: {folder}/train
  validation: {folder}/dev
  tokenizer: {folder}/tokenizer
  frame_budget: 60
  micro_batches: 2
  workers: 0
training: {{max_steps: 4, log_every: 1, checkpoint_every: 2, validate_every: 4, device: cpu}}
"""


class Terminal(io.StringIO):
    def isatty(self):
        return True


@dataclass(frozen=True)
class Workplace:
    """Everything that the commands made: see `workplace`."""

    folder: Path

    @property
    def recipe(self) -> str:
        return str(self.folder / "first.yaml")

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "first"

    @property
    def wav(self) -> str:
        return str(self.folder / "dev-0.wav")


@pytest.fixture(scope="session")
def workplace(tmp_path_factory):
    """prepare, tokenizer and train have been run: train/, dev/, tokenizer/, runs/first/.

    Tests read it, and write elsewhere: runs take another ``name`` or ``output``.
    """
    folder = tmp_path_factory.mktemp("workplace")
    for name, count in (("train", 24), ("dev", 4)):
        write_manifest(folder, name, count)
        assert main(["prepare", f"{folder}/{name}.jsonl", f"{folder}/{name}"]) == 0
    command = ["tokenizer", f"{folder}/train", f"{folder}/tokenizer", "--vocab-size", "30"]
    assert main(command) == 0
    (folder / "first.yaml").write_text(RECIPE.format(folder=folder))
    assert main(["train", f"{folder}/first.yaml"]) == 0
    return Workplace(folder)


def write_manifest(folder: Path, name: str, count: int) -> None:
    generator = np.random.default_rng(count)
    lines = []
    for number in range(count):
        words = generator.choice(list(WORDS), size=int(generator.integers(1, 4)))
        audio = np.concatenate([tone(WORDS[word], generator) for word in words])
        file = f"{name}-{number}.wav"
        soundfile.write(folder / file, audio, 16_000)
        lines.append({"audio_filepath": file, "text": " ".join(words), "lang": "en", "pnc": False})
    write_rows(folder / f"{name}.jsonl", lines)


def tone(frequency: float, generator: np.random.Generator) -> np.ndarray:
    seconds = np.arange(int(generator.integers(3_200, 6_400))) / 16_000
    return (0.3 * np.sin(2 * np.pi * frequency * seconds)).astype(np.float32)


@pytest.fixture
def model(workplace, tmp_path):
    """A model directory that belongs to no run."""
    folder = tmp_path / "model"
    shutil.copytree(resolve(workplace.run), folder)
    shutil.rmtree(folder / "training")
    for name in ("training.pt", "manifest.json"):
        (folder / name).unlink()
    return folder


@pytest.fixture
def manifest(corpus_rows, tmp_path):
    """Writes a manifest; each line is a good one of the corpus with some fields changed."""

    def write(*changes: dict | str) -> Path:
        good = corpus_rows[0]
        rows = [row if isinstance(row, str) else json.dumps(good | row) for row in changes]
        path = tmp_path / f"manifest-{len(list(tmp_path.glob('manifest-*')))}.jsonl"
        path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def train(effasr, workplace, tmp_path):
    def run(*overrides: str):
        return effasr("train", workplace.recipe, f"output={tmp_path}/runs", *overrides)

    return run


@pytest.fixture
def tune(effasr, workplace, tmp_path):
    """Fine-tune an imported model for a step; then transcribe and evaluate with it."""

    def run(model: Path, recipe: str, language: str, *overrides: str) -> Path:
        tuned = effasr(
            "train", recipe, f"output={tmp_path}/runs", f"init_from={model}",
            "training.validate_first=false",
            f"data.train={workplace.folder}/train", f"data.validation={workplace.folder}/dev",
            "data.frame_budget=60", "data.workers=0", "training.max_steps=1",
            "training.device=cpu", *overrides,
        )  # fmt: skip
        assert tuned.code == 0, tuned.err
        result = tmp_path / "runs" / recipe
        assert load_model(resolve(result)).model.config == load_model(model).model.config
        message = effasr("transcribe", "--run", result, "--language", language, workplace.wav)
        scored = effasr("evaluate", "--run", result, "--manifest", workplace.folder / "dev")
        assert message.code == scored.code == 0
        return result

    return run


@pytest.fixture
def piped(monkeypatch):
    return lambda data: monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))


@pytest.fixture
def corpus_rows(workplace):
    """The lines of train.jsonl, with absolute paths of audio."""
    folder = workplace.folder
    rows = read_lines(folder / "train.jsonl")
    return [row | {"audio_filepath": str(folder / row["audio_filepath"])} for row in rows]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def recordings(tmp_path):
    (tmp_path / "garbage.wav").write_bytes(b"\x00\x01garbage" * 100)
    (tmp_path / "garbage.flac").write_bytes(b"fLaC" + b"\x93" * 500)
    (tmp_path / "empty.wav").write_bytes(b"")
    soundfile.write(tmp_path / "no-samples.wav", np.zeros(0, np.float32), 16_000)
    audio = np.sin(np.arange(16_000)).astype(np.float32)
    soundfile.write(tmp_path / "whole.flac", audio, 16_000)
    content = (tmp_path / "whole.flac").read_bytes()
    (tmp_path / "cut-short.flac").write_bytes(content[: len(content) // 2])
    return tmp_path
