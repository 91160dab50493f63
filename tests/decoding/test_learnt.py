"""Training and decoding must mean the same by prompts, targets, ends and blanks."""

import numpy as np
import pytest
import torch

from effasr.data.collate import Example, collate
from effasr.data.prompt import Prompt
from effasr.decoding.config import DecodingConfig
from effasr.model.asr import ASRModel
from effasr.model.decoder import DecoderConfig
from effasr.transcription.transcribe import Waveform, transcribe
from tests.support.recognition import make_model

RATE = 16_000
TEXTS = ("one two three", "four", "five six", "seven eight nine one two")


@pytest.fixture(scope="module")
def waveforms() -> list[Waveform]:
    """Every text is a melody of its own, 0.2 s a note."""
    made = []
    for n, text in enumerate(TEXTS):
        time = np.arange(int(0.2 * RATE)) / RATE
        pitches = [300.0 * (n + 1) + 97.0 * len(word) for word in text.split() for _ in "ab"]
        notes = [np.sin(2 * np.pi * pitch * time) for pitch in pitches]
        made.append(Waveform(text, 0.3 * np.concatenate(notes).astype(np.float32), RATE))
    return made


@pytest.fixture(scope="module")
def learnt(tokenizer, waveforms) -> ASRModel:
    decoder = DecoderConfig(width=32, layers=1, heads=2, feed_forward=64, max_positions=64)
    encoder = {"feed_forward": 64, "subsampling_channels": 8, "conv_norm": "layer_norm"}
    features = {"normalize": False}
    model = make_model(
        tokenizer.vocab_size, features=features, encoder=encoder, decoder=decoder, ctc=True
    ).train()
    prompt = tokenizer.prompt(Prompt())
    examples = [
        Example(w.id, w.samples, prompt, tokenizer.encode(w.id, "en"), monotonic=True)
        for w in waveforms
    ]
    batch = collate(examples, eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(120):
        losses = model(batch)
        loss = losses.cross_entropy / batch.num_targets + losses.ctc / 20.0
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


@pytest.mark.parametrize("method", ["attention", "ctc"])
def test_what_was_learnt_is_said(method, learnt, tokenizer, waveforms) -> None:
    config = DecodingConfig(method=method)
    results = list(transcribe(learnt, tokenizer, waveforms, config=config))
    assert [result.text for result in results] == list(TEXTS)
    assert not any(result.truncated for result in results)
