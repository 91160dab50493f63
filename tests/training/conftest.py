import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example, collate
from effasr.data.config import DataConfig
from effasr.data.features.spec_augment import SpecAugmentConfig
from effasr.data.tokenizer import train_tokenizer
from effasr.distributed.process_group import DistributedContext
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.optim.schedules import ScheduleConfig
from effasr.training import build
from effasr.training.config import LoopConfig, TrainConfig
from effasr.training.loss import LossConfig
from effasr.training.resolve import resolve_config
from effasr.training.step import TrainState

VOCABULARY = 12


@pytest.fixture
def model_config() -> ModelConfig:
    """A model with every kind of randomness and of state that training must handle."""
    return ModelConfig(
        encoder=FastConformerConfig(
            width=16, layers=1, heads=2, feed_forward=16, subsampling_channels=4,
            residual_dropout=0.1, attention_dropout=0.1,
        ),
        decoder=DecoderConfig(width=16, layers=1, heads=2, feed_forward=16, residual_dropout=0.1),
        ctc=True,
    )  # fmt: skip


@pytest.fixture
def make_train_state(model_config) -> Callable[..., tuple[ASRModel, TrainState]]:
    def make(**settings) -> tuple[ASRModel, TrainState]:
        defaults = {"model": model_config, "training": LoopConfig(max_steps=20)}
        config = resolve_config(TrainConfig(**defaults | settings), None)
        context = DistributedContext(0, 1, torch.device("cpu"))
        model = build.build_model(config, VOCABULARY, None, context.device)
        return model, build.build_train_state(config, model, context)

    return make


def make_batch(number: int, *, broken: bool = False) -> Batch:
    generator = np.random.default_rng(number)
    examples = [
        Example(
            id=f"{number}-{n}",
            audio=generator.normal(size=int(generator.integers(8_000, 16_000))).astype(np.float32),
            prompt=[2, 3],
            text=generator.integers(4, VOCABULARY, size=3).tolist(),
            monotonic=n != 1,
        )
        for n in range(3)
    ]
    if broken:
        examples[2].audio[100] = np.nan
    return collate(examples, StaticShape(60, 30, 4), eos_id=1, pad_id=0)


@pytest.fixture(scope="session")
def batches() -> list[Batch]:
    return [make_batch(number) for number in range(6)]


@pytest.fixture(scope="session")
def broken_batch() -> Batch:
    return make_batch(9, broken=True)


WORDS = {"low": 300.0, "middle": 700.0, "high": 1500.0, "top": 3000.0}


@pytest.fixture(scope="session")
def tones(tmp_path_factory) -> Path:
    """A folder with ``train.jsonl``, ``test.jsonl`` and ``tokenizer``: every word is a tone."""
    folder = tmp_path_factory.mktemp("tones")
    generator = np.random.default_rng(0)
    for name, count in (("train", 40), ("test", 6)):
        lines = []
        for number in range(count):
            words = generator.choice(list(WORDS), size=int(generator.integers(1, 5)))
            audio = np.concatenate([_tone(WORDS[word], generator) for word in words])
            file = f"{name}-{number}.wav"
            soundfile.write(folder / file, audio, 16_000)
            duration = len(audio) / 16_000
            line = {"audio_filepath": file, "duration": duration, "text": " ".join(words)}
            lines.append(json.dumps(line) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines))
    lines = (folder / "train.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    train_tokenizer({"en": texts}, folder / "tokenizer", vocab_size=30)
    return folder


def _tone(frequency: float, generator: np.random.Generator) -> np.ndarray:
    seconds = np.arange(int(generator.integers(3_200, 6_400))) / 16_000
    noise = 0.01 * generator.normal(size=len(seconds))
    return (0.3 * np.sin(2 * np.pi * frequency * seconds) + noise).astype(np.float32)


@pytest.fixture
def make_config(tones, model_config, tmp_path) -> Callable[..., TrainConfig]:
    """A run of two micro-batches a step, with all that could make a resumed run differ."""

    def make(*, data: dict | None = None, training: dict | None = None, **settings) -> TrainConfig:
        data = {
            "train": str(tones / "train.jsonl"),
            "tokenizer": str(tones / "tokenizer"),
            "frame_budget": 60,
            "micro_batches": 2,
            "workers": 0,
            **(data or {}),
        }
        loop = {
            "max_steps": 12,
            "log_every": 1,
            "checkpoint_every": 4,
            "ema_decay": 0.9,
            "device": "cpu",
            "tensorboard": False,
            **(training or {}),
        }
        defaults = {
            "name": "run",
            "output": str(tmp_path),
            "seed": 3,
            "model": replace(
                model_config, spec_augment=SpecAugmentConfig(freq_masks=1, time_masks=1)
            ),
            "loss": LossConfig(
                ctc_weight=0.3,
                transducer_weight=0.0,
                ctc_weight_before=0.5,
                guided_weight=1.0,
                guided_after_ctc=8.0,
            ),
            "schedule": ScheduleConfig(name="cosine", warmup_steps=4),
        }
        return TrainConfig(
            **defaults | settings, data=DataConfig(**data), training=LoopConfig(**loop)
        )

    return make
