"""The study of latencies scores each context of a model on the streams of a manifest."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import streaming_demo
import torch

from effasr.checkpoint import save_model
from effasr.data.features.config import FeatureConfig
from effasr.data.tokenizer import Tokenizer
from effasr.evaluation.normalizer import get_normalizer
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.encoder import FastConformerConfig
from effasr.transcription.online import OnlineRecognizer, context_for
from effasr_kernels import Context
from tests.support.recognition import tokenizer
from tests.support.small_model import shake

__all__ = ["tokenizer"]
RATE = 16_000


@pytest.fixture
def model(tokenizer: Tokenizer) -> ASRModel:
    encoder = FastConformerConfig(
        width=32, layers=1, heads=2, feed_forward=32, subsampling_channels=4,
        subsampling_norm=True, context=(Context(9, 0, 3), Context(14, 0, 7), Context(None, None)),
        causal_convolution=True,
    )  # fmt: skip
    features = FeatureConfig(mel_bins=16, normalize=False)
    torch.manual_seed(3)
    config = ModelConfig(features=features, encoder=encoder, decoder=None, ctc=True)
    made = ASRModel(config, tokenizer.vocab_size).eval()
    shake(made)
    return made


def test_each_latency_is_scored(model: ASRModel, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The references are what the model recognises at 0.56 s, with a word more."""
    recognizer = OnlineRecognizer(model, tokenizer, context=context_for(model, 0.56))
    draw, lines, words = np.random.default_rng(0), [], 0
    for number, seconds in enumerate((2.0, 3.1, 1.2)):
        path = tmp_path / f"{number}.wav"
        soundfile.write(path, 0.1 * draw.standard_normal(int(seconds * RATE)), RATE)
        stream = recognizer.open()
        stream.feed(soundfile.read(path, dtype="float32")[0])
        stream.finish()
        recognizer.decode()
        text = " ".join([*(segment.text for segment in stream.take()), "more"])
        words += len(get_normalizer("basic")(text).split())
        row = {"audio_filepath": str(path), "duration": seconds, "text": text}
        lines.append(json.dumps(row))
    (tmp_path / "set.jsonl").write_text("\n".join(lines) + "\n")
    save_model(tmp_path / "model", model, tokenizer)
    out, arguments = tmp_path / "rows.csv", ["--manifest", str(tmp_path / "set.jsonl")]
    arguments += ["--latencies", "full", "0.56", "0.24", "--streams", "2", "--output", str(out)]
    assert streaming_demo.main([str(tmp_path / "model"), *arguments]) == 0
    with out.open(newline="") as file:
        full, long, short = csv.DictReader(file)
    assert float(long["wer"]) == pytest.approx(3 / words, abs=1e-5)
    assert words > 3
    assert [row["context"] for row in (full, long, short)] == ["full", "14/0/7", "9/0/3"]
    delays = [float(row["algorithmic_p99_s"]) for row in (full, long, short)]
    assert 1.2 < delays[0] < 3.1
    assert 0.4 < delays[1] < 0.56
    assert 0.1 < delays[2] < 0.24
    assert {row["audio_s"] for row in (full, long, short)} == {"6.3"}


def test_a_latency_is_a_number_or_full(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        streaming_demo.main(["run", "--latencies", "-1"])
    assert "must be seconds above 0 or full, but is '-1'" in capsys.readouterr().err
