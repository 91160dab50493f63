import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from effasr import checkpoint
from effasr.data.features.config import FeatureConfig
from effasr.data.tokenizer import train_tokenizer
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.transducer import TransducerConfig

RATE = 16_000


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    numbers = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    texts = [" ".join(numbers[i:] + numbers[:i]) for i in range(9)]
    other_items = {"de": ["eins zwei drei vier fünf"] * 5, "ja": ["いちにさんしご"] * 5}
    folder = tmp_path_factory.mktemp("tokenizer")
    return train_tokenizer({"en": texts, **other_items}, folder, vocab_size=40)


SMALL: dict[str, Any] = {
    "width": 32, "layers": 1, "heads": 2, "feed_forward": 32, "subsampling_channels": 4,
    "subsampling_norm": True,
}  # fmt: skip
TRANSDUCER_GAINS = {
    "transducer.encoder_projection.weight": 2.0,
    "transducer.predictor_projection.weight": 4.0,
    "transducer.output.weight": 4.0,
}
"""What makes texts of a transducer depend on the audio and on earlier labels."""


def make_model(
    vocab_size: int,
    *,
    seed: int = 0,
    features: Mapping[str, Any] | None = None,
    encoder: Mapping[str, Any] | None = None,
    gains: Mapping[str, float] | None = None,
    **parts: Any,
) -> ASRModel:
    """A small model of random weights, some of them multiplied; ``parts`` are outputs."""
    config = ModelConfig(
        features=FeatureConfig(**{"mel_bins": 16, **(features or {})}),
        encoder=FastConformerConfig(**{**SMALL, **(encoder or {})}),
        **{"decoder": None, **parts},
    )
    torch.manual_seed(seed)
    model = ASRModel(config, vocab_size).eval()
    with torch.no_grad():
        for name, gain in (gains or {}).items():
            model.get_parameter(name).mul_(gain)
    return model


@pytest.fixture(scope="session")
def model(tokenizer):
    """Random weights which give texts of various lengths: some end, some are stopped."""
    decoder = DecoderConfig(
        width=32, layers=2, heads=2, feed_forward=32, max_positions=64, tie_embeddings=False
    )
    model = make_model(tokenizer.vocab_size, decoder=decoder, ctc=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                # Weights of our own, so that a change of the initialisation changes no text.
                draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                fan_in = parameter[0].numel()
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * fan_in**-0.5)
                parameter.mul_(next((g for part, g in _GAINS.items() if part in name), 1.0))
            elif "norm" not in name:
                parameter.zero_()
        model.decoder.output_bias[tokenizer.eos_id] = 6.5
    return model


@pytest.fixture(scope="session")
def saved(model, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "model"
    checkpoint.save_model(folder, model, tokenizer)
    return folder


def write_set(folder: Path, sounds: Sequence[np.ndarray], texts: Sequence[str]) -> Path:
    """Write u0.wav and so on beside a manifest with their texts, and return the manifest."""
    rows = []
    for number, (samples, text) in enumerate(zip(sounds, texts, strict=True)):
        path = folder / f"u{number}.wav"
        soundfile.write(path, samples, RATE)
        rows.append({"audio_filepath": str(path), "text": text, "id": f"u{number}"})
    manifest = folder / "set.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return manifest


_GAINS = {"encoder_attn": 4.0, "embed_tokens": 4.0, "untied": 4.0, "ctc_head": 4.0}
"""What makes the texts depend on the audio and on what was said before."""


@pytest.fixture(scope="session")
def noise():
    """``noise(seconds, seed)``: its loudness and colour vary, so that encoder frames differ."""

    def make(seconds: float, seed: int = 0) -> np.ndarray:
        draw = np.random.default_rng(seed)
        samples = draw.standard_normal(int(seconds * RATE))
        tone = np.sin(2 * np.pi * draw.uniform(100, 3000) * np.arange(len(samples)) / RATE)
        envelope = np.repeat(draw.random(len(samples) // 4000 + 1), 4000)[: len(samples)]
        return (0.2 * (samples * envelope + tone * draw.random())).astype(np.float32)

    return make


@pytest.fixture(scope="session")
def tdt_model(tokenizer):
    """A transducer with durations, of random weights that give texts of various lengths."""
    head = TransducerConfig(width=24, joint=16, activation="tanh", durations=(0, 1, 2, 3))
    return make_model(tokenizer.vocab_size, seed=1, transducer=head, gains=TRANSDUCER_GAINS)
