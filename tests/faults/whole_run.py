"""Scenario: ``effasr train`` goes on from a checkpoint, validates, and saves two more."""

import io
import json
import sys
from contextlib import redirect_stderr
from pathlib import Path

import numpy as np
import safetensors.torch
import soundfile
import torch

from effasr.checkpoint import resolve
from effasr.cli.main import main
from effasr.data.tokenizer import train_tokenizer
from effasr.training.run_dir.run_directory import read_lines

torch.set_num_threads(1)
STEPS = 6


def make_data(folder: Path, words: str = "low high"):
    draw, rows = np.random.default_rng(0), []
    folder.mkdir()
    for number in range(8):
        soundfile.write(folder / f"{number}.wav", draw.normal(size=6000) / 10, 16_000)
        text = " ".join(draw.choice(words.split(), 2))
        rows.append({"audio_filepath": f"{number}.wav", "duration": 0.375, "text": text})
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "train.jsonl").write_text(lines, encoding="utf-8")
    train_tokenizer({"en": [row["text"] for row in rows]}, folder / "tokenizer", vocab_size=20)


def _train(folder: Path, *more: str) -> str:
    data = folder.with_name("data")
    arguments = [
        str(folder.with_name("recipe.yaml")), f"output={folder}", f"data.train={data}/train.jsonl",
        f"data.validation={data}/train.jsonl", f"data.tokenizer={data}/tokenizer",
        *more,
    ]  # fmt: skip
    visible = io.StringIO()
    with redirect_stderr(visible):
        code = main(["train", *arguments])
    lines = [line for line in visible.getvalue().splitlines() if line.startswith("effasr train: ")]
    return lines[-1].removeprefix("effasr train: ") if code else ""


RECIPE = f"""
name: run
seed: 1
model:
  ctc: true
  decoder: null
  encoder: {{width: 16, layers: 1, heads: 2, feed_forward: 16, subsampling_channels: 4}}
loss: {{ctc_weight: 1.0}}
data: {{frame_budget: 60, workers: 0}}
training: {{max_steps: {STEPS}, log_every: 1, checkpoint_every: 2, validate_every: 2, keep: 1,
  device: cpu, tensorboard: false}}
"""


def prepare(folder: Path):
    make_data(folder.with_name("data"))
    folder.with_name("recipe.yaml").write_text(RECIPE)
    problem = _train(folder.with_name("whole"))
    assert problem == "", problem
    assert _train(folder, "training.stop_at=2") == ""
    assert resolve(folder / "run").name == "step_00000002"


def act(folder: Path) -> str:
    return _train(folder)


def check(folder: Path, fault: str, error: str):
    problem = _train(folder)
    assert problem == "", problem
    for name in ("latest", "best"):
        assert (folder / "run" / "checkpoints" / name).is_file()
    newest = (folder / "run" / "checkpoints" / "latest").read_text().strip()
    assert newest == f"step_{STEPS:08d}"
    files = [root / "run" / "checkpoints" / newest for root in (folder, folder.with_name("whole"))]
    item, other = (safetensors.torch.load_file(file / "model.safetensors") for file in files)
    assert all(torch.equal(item[name], other[name]) for name in other)
    lines = read_lines(folder / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert not (folder / "run" / "lock").exists()
    assert not list((folder / "run" / "checkpoints").glob(".*"))


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
