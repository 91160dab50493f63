"""Sizes that foreign files name are bounded before memory is taken for them."""

import json

import numpy as np
import pytest
import soundfile
import torch

from effasr.checkpoint import CheckpointError, load_model
from effasr.checks import LIMITS
from effasr.data.features.config import FeatureConfig
from effasr.data.manifest.lines import parse_object
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.transducer import TransducerConfig
from effasr.nn.experts import ExpertsConfig
from effasr.transcription.inputs.audio_stream import open_stream
from effasr.untrusted.documents import parse_json

HUGE = 2_000_000_000


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("part", "field", "options"),
    [
        *(("features", name, {}) for name in ("sample_rate", "hop", "n_fft", "mel_bins")),
        ("features", "minimum_s", {"kind": "whisper", "preemphasis": 0.0, "normalize": False}),
        *(("encoder", name, {}) for name in ("layers", "max_frames", "feed_forward")),
        *(("decoder", name, {}) for name in ("layers", "max_positions", "feed_forward")),
        *(("transducer", name, {}) for name in ("layers", "context", "joint")),
        ("decoder.experts", "count", {}),
    ],
)
def test_every_size_of_a_model_has_a_limit(part, field, options):
    kinds = {
        "features": FeatureConfig,
        "encoder": FastConformerConfig,
        "decoder": DecoderConfig,
        "transducer": TransducerConfig,
        "decoder.experts": ExpertsConfig,
    }
    options = options | ({"window": 512} if options else {})
    config = kinds[part](**{field: HUGE}, **options)
    name, _, inner = part.partition(".")
    if inner:
        config = DecoderConfig(**{inner: config})
    with pytest.raises(ValueError, match=rf"`{part}\.{field}` must be at most \d+, but is {HUGE}"):
        ModelConfig(**{name: config})


def test_a_model_directory_with_a_huge_size_is_refused(tmp_path):
    text = f"model: {{decoder: {{max_positions: {HUGE}}}}}\nvocab_size: 8\n"
    (tmp_path / "model.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=r"`decoder\.max_positions` must be at most"):
        load_model(tmp_path)


def test_many_positions_have_no_table():
    small = DecoderConfig(width=8, layers=1, heads=1, feed_forward=8, max_positions=64)
    large = DecoderConfig(
        width=8, layers=1, heads=1, feed_forward=8, max_positions=LIMITS["max_positions"]
    )
    encoder = FastConformerConfig(width=8, layers=1, heads=1, feed_forward=8)
    tokens, positions = torch.arange(5), torch.tensor([0, 1, 2, 62, 63])
    outputs = []
    for config in (small, large):
        torch.manual_seed(0)
        decoder = ASRModel(ModelConfig(encoder=encoder, decoder=config), 8).decoder
        assert decoder is not None
        outputs.append(decoder.embed(tokens, positions))
        rows = [len(table) for table in decoder._tables._tables.values()]
        assert sum(rows) <= 64
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("value", ["{}", "[]", '""', '{"a":0}', "0"])
def test_values_of_json_are_counted_before_they_are_made(value):
    text = '{"a": [' + ",".join([value] * 4_000_000) + "]}"
    for parse in (parse_json, parse_object):
        with pytest.raises(ValueError, match=r"^x must have at most 4000000 values"):
            parse(text, "x")
    several = json.loads(f"[{value}, {value}]")
    assert parse_object(json.dumps({"a": several}), "x") == {"a": several}


def test_blocks_of_many_channels_are_small(tmp_path):
    """At 1 MHz, ten seconds of 255 channels are 10 GB."""
    samples = np.zeros((20_000, 255), np.int16)
    samples[:, 0] = np.arange(20_000)
    soundfile.write(tmp_path / "a.wav", samples, 1_000_000)
    blocks = list(open_stream(tmp_path / "a.wav", 1_000_000).blocks)
    assert max(map(len, blocks)) * 255 <= 1 << 20
    expected = (np.arange(20_000) / 2**15 / 255).astype(np.float32)
    np.testing.assert_allclose(np.concatenate(blocks), expected, atol=1e-6)
