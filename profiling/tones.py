"""A corpus that a tiny model begins to learn within a minute: every word is a tone, in noise."""

import json
from pathlib import Path

import numpy as np
import soundfile

from effasr.data.tokenizer import train_tokenizer

RATE = 16_000
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven")


def write_corpus(
    folder: Path, *, train: int, dev: int = 2, longest: int = 4, vocabulary: int = 40
) -> None:
    """Write train.jsonl, dev.jsonl, their recordings and tokenizer; the same bytes every time."""
    random = np.random.default_rng(0)
    (folder / "audio").mkdir(parents=True, exist_ok=True)
    texts = []
    for split, count in (("train", train), ("dev", dev)):
        lines = []
        for number in range(count):
            words = random.integers(len(WORDS), size=int(random.integers(1, longest + 1)))
            audio = np.concatenate([_tone(int(word), random) for word in words])
            path = Path("audio") / f"{split}-{number:05d}.wav"
            soundfile.write(folder / path, audio, RATE)
            text = " ".join(WORDS[word] for word in words)
            row = {"audio_filepath": str(path), "duration": len(audio) / RATE, "text": text}
            lines.append(json.dumps({"id": path.stem, **row, "lang": "en"}) + "\n")
            texts.append(text)
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    train_tokenizer({"en": texts}, folder / "tokenizer", vocab_size=vocabulary)


def _tone(word: int, random: np.random.Generator) -> np.ndarray:
    seconds = np.arange(int(random.integers(3_200, 6_400))) / RATE
    noise = 0.01 * random.standard_normal(len(seconds))
    return (0.3 * np.sin(2 * np.pi * 300.0 * 1.25**word * seconds) + noise).astype(np.float32)
