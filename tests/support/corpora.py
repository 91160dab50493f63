"""Recordings, manifests and corpora of tests."""

import json
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from effasr.data.config import DataConfig
from effasr.data.index.corpus import Corpus
from effasr.data.loader import Loader, StepBatch
from effasr.data.tokenizer import Tokenizer


def write_tone(
    path: Path, seconds: float, *, rate: int = 16_000, channels: int = 1, hertz: float = 440.0
) -> Path:
    """Write a sine of amplitude 0.5; the format follows the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    time = np.arange(round(seconds * rate)) / rate
    tone = (0.5 * np.sin(2 * np.pi * hertz * time)).astype(np.float32)
    soundfile.write(path, np.tile(tone[:, None], channels), rate)
    return path


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def load_corpus(path: Path, tokenizer: Tokenizer, **options: Any) -> Corpus:
    config = DataConfig(**({"train": str(path), "frame_budget": 60} | options))
    return Corpus.load(config.train, tokenizer, config)


def dropped(corpus: Corpus) -> list[tuple[str, str]]:
    return [(drop.id, str(drop.reason)) for drop in corpus.dropped]


def make_loader(
    path: Path, tokenizer: Tokenizer, *, rank: int = 0, world_size: int = 1, seed: int = 3,
    **options: Any,
) -> Loader:  # fmt: skip
    """A loader with about 4 micro-batches of 60 frames in a step."""
    defaults = {"train": str(path), "frame_budget": 60, "micro_batches": 4, "workers": 0}
    config = DataConfig(**(defaults | options))
    corpus = Corpus.load(config.train, tokenizer, config, ctc=False)
    return Loader(corpus, config, seed=seed, rank=rank, world_size=world_size)


def take_steps(loader: Loader, count: int, epoch: int = 0, step: int = 0) -> list[StepBatch]:
    with closing(loader.steps(epoch, step)) as steps:
        return list(islice(steps, count))
