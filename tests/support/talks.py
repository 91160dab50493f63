"""Manifests of conversations with speech of noise."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from tests.support.chat_folder import TEXTS

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


def model_mapping(language_model: str | Path) -> dict[str, Any]:
    """Return `model` of a recipe: a small encoder before the language model of a folder."""
    encoder = {"width": 32, "layers": 1, "heads": 2, "feed_forward": 48}
    return {
        "features": {"mel_bins": 16},
        "encoder": encoder | {"subsampling_channels": 8, "conv_norm": "layer_norm"},
        "decoder": None,
        "language_model": {"path": str(language_model), "stack": 2},
    }
