"""A language that a tiny model begins to learn within a minute: every word is a tone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import soundfile

from effasr.data.config import DataConfig
from effasr.data.tokenizer import train_tokenizer
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.optim.adamw import OptimizerConfig
from effasr.optim.schedules import ScheduleConfig
from effasr.training.config import LoopConfig, TrainConfig
from effasr.training.loss import LossConfig

_WORDS = {
    name: 300.0 * 1.35**n
    for n, name in enumerate(["one", "two", "three", "four", "five", "six", "seven", "eight"])
}
_RATE = 16_000
FRAME_BUDGET = 48
"""Frame budget of a micro-batch: about 4 s of audio."""


def write_corpus(folder: Path, utterances: int = 480, held_out: int = 48) -> None:
    """Write ``train.jsonl``, ``held_out.jsonl``, their recordings and ``tokenizer``."""
    random = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    texts = []
    for name, count in (("train", utterances), ("held_out", held_out)):
        lines = []
        for number in range(count):
            words = random.choice(list(_WORDS), size=int(random.integers(1, 4))).tolist()
            audio = np.concatenate([_tone(_WORDS[word], random) for word in words])
            file = f"{name}-{number}.wav"
            soundfile.write(folder / file, audio, _RATE)
            line = {"audio_filepath": file, "duration": len(audio) / _RATE, "text": " ".join(words)}
            lines.append(json.dumps(line) + "\n")
            texts.append(" ".join(words))
        (folder / f"{name}.jsonl").write_text("".join(lines))
    train_tokenizer({"en": texts}, folder / "tokenizer", vocab_size=40)


def _tone(frequency: float, random: np.random.Generator) -> np.ndarray:
    seconds = np.arange(int(random.integers(3_200, 6_400))) / _RATE
    noise = 0.01 * random.standard_normal(len(seconds))
    return (0.3 * np.sin(2 * np.pi * frequency * seconds) + noise).astype(np.float32)


def config(folder: Path, output: Path, name: str, seed: int, ranks: int) -> TrainConfig:
    """Return a run that has no end of its own, with one micro-batch a rank and step."""
    return TrainConfig(
        name=name,
        output=str(output),
        seed=seed,
        model=ModelConfig(
            encoder=FastConformerConfig(
                width=32, layers=2, heads=2, feed_forward=64, subsampling_channels=8,
                conv_norm="layer_norm", subsampling_norm=True,
            ),
            decoder=DecoderConfig(width=32, layers=1, heads=2, feed_forward=64),
            ctc=True,
        ),
        data=DataConfig(
            train=str(folder / "train.jsonl"),
            tokenizer=str(folder / "tokenizer"),
            frame_budget=FRAME_BUDGET,
            micro_batches=ranks,
            workers=0,
        ),
        loss=LossConfig(label_smoothing=0.0, ctc_weight=0.3),
        optimizer=OptimizerConfig(lr=3e-3),
        schedule=ScheduleConfig(warmup_steps=10),
        training=LoopConfig(
            max_steps=1_000_000, log_every=5, checkpoint_every=1_000_000, device="cpu", threads=1,
            tensorboard=False, timeout_s=120.0,
        ),
    )  # fmt: skip


def held_out_data(data: DataConfig) -> DataConfig:
    """Return a micro-batch of all held-out utterances."""
    path = Path(data.tokenizer).with_name("held_out.jsonl")
    return replace(data, train=str(path), frame_budget=1200, micro_batches=1, epoch_end="exact")
