"""What the tests of transformers' Canary and Parakeet models share."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from effasr.interop.huggingface.checkpoint import import_model
from effasr.interop.tables import export_weights

# Tests that import this are skipped where it is missing.
transformers = pytest.importorskip("transformers")

BINS, VOCABULARY = 16, 40
ENCODER = {
    "model_type": "parakeet_encoder",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_mel_bins": BINS,
    "subsampling_conv_channels": 8,
    "scale_input": True,
    **dict.fromkeys(
        ("dropout", "dropout_positions", "layerdrop", "activation_dropout", "attention_dropout"),
        0.0,
    ),
}


def saved(model, directory, **options):
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(directory, **options)
    transformers.ParakeetFeatureExtractor(feature_size=BINS).save_pretrained(directory)
    return directory


def features_of(*examples):
    extractor = transformers.ParakeetFeatureExtractor(feature_size=BINS)
    audio = [example.audio for example in examples]
    return {**extractor(audio, sampling_rate=16_000, return_tensors="pt")}


def assert_same(actual, expected, what, least=1e-2):
    """Equal up to 1e-4 of the largest value, or of ``least``."""
    assert actual.shape == expected.shape, what
    scale = expected.abs().max().clamp(min=least)
    error = (actual - expected).abs().max() / scale
    assert error < 1e-4, f"{what}: relative error {error:.2g}"


def assert_same_gradients(ours, theirs, renames, *, least=None):
    """Every gradient, up to 1e-4 of its largest value, or of ``least`` times the largest of all."""
    gradients = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    converted = export_weights(gradients, renames)
    expected: Mapping[str, Any] = {name: p.grad for name, p in theirs.named_parameters()}
    assert converted.keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert_same(converted[name], gradient, name, 1e-2 if least is None else least * largest)


def assert_export_inverts_import(model, directory, export):
    export(model, directory)
    config, vocabulary, state = import_model(directory)
    assert (config, vocabulary) == (model.config, model.vocab_size)
    assert state.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(state[name], value), name
    extractor = transformers.AutoFeatureExtractor.from_pretrained(directory)
    assert extractor.to_dict() == transformers.ParakeetFeatureExtractor(feature_size=BINS).to_dict()


def copy_with(directory, target, change):
    """A copy of a model directory with another config.json."""
    for file in directory.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((directory / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **change}))
    return target
