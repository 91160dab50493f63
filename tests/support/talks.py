"""Manifests of conversations with speech of noise."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from effasr.config import from_mapping
from effasr.training.config import TrainConfig
from tests.support.chat_folder import TEXTS, write_chat_model

WORDS = " ".join(TEXTS).split()


def write_talks(folder: Path, *, speech: int = 12, texts: int = 8, seed: int = 0) -> list[Path]:
    """A manifest of spoken conversations, the first with two clips, and one of written ones."""
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)

    def words() -> str:
        return " ".join(random.choice(WORDS, random.integers(1, 6)))

    def clip(name: str) -> dict:
        samples = int(random.integers(4_000, 30_000))
        soundfile.write(folder / name, random.normal(0, 0.1, samples), 16_000)
        return {"type": "audio", "audio": name}

    spoken = []
    for number in range(speech):
        parts = [clip(f"s{number}.wav"), {"type": "text", "text": "what is said here"}]
        if number == 0:
            parts.append(clip("s0b.wav"))
        turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": words()}]
        spoken.append({"id": f"s{number}", "messages": turns})
    written = []
    for number in range(texts):
        turns = [
            {"role": role, "content": words()}
            for _ in range(1 + number % 2)
            for role in ("user", "assistant")
        ]
        written.append({"id": f"t{number}", "messages": turns})
    paths = []
    for name, rows in (("speech", spoken), ("text", written)):
        if rows:
            paths.append(folder / f"{name}.jsonl")
            paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def model_mapping(language_model: str | Path, **fields) -> dict[str, Any]:
    """Return `model` of a recipe: a small encoder before the language model of a folder."""
    encoder = {"width": 32, "layers": 1, "heads": 2, "feed_forward": 48}
    return {
        "features": {"mel_bins": 16},
        "encoder": encoder | {"subsampling_channels": 8, "conv_norm": "layer_norm"},
        "decoder": None,
        "language_model": {"path": str(language_model), "stack": 2, **fields},
    }


def write_folders(folder: Path, kind: str = "llama", **sizes) -> dict[str, str]:
    """Paths of manifests of spoken and written conversations, and of a language model."""
    speech, text = write_talks(folder / "data", **sizes)
    llm = write_chat_model(folder / "llm", kind)
    return {"speech": str(speech), "text": str(text), "llm": str(llm)}


def talks_config(folders: dict[str, str], output: Path, **sections) -> TrainConfig:
    """A run of two steps on both manifests; sections are merged with those here."""
    mapping = {
        "name": "talks",
        "output": str(output),
        "model": model_mapping(folders["llm"]),
        "data": {
            "mix": {"sources": {"speech": folders["speech"], "text": folders["text"]}},
            "frame_budget": 60,
            "micro_batches": 2,
            "workers": 0,
            "cache": None,
        },
        "loss": {"label_smoothing": 0.0},
        "optimizer": {"lr": 3e-3},
        "schedule": {"warmup_steps": 1},
        "training": {
            "max_steps": 2, "log_every": 1, "checkpoint_every": 2, "device": "cpu", "threads": 1,
            "tensorboard": False,
        },
    }  # fmt: skip
    for section, values in sections.items():
        is_merged = isinstance(values, dict)
        mapping[section] = mapping.get(section, {}) | values if is_merged else values
    return from_mapping(TrainConfig, mapping)
