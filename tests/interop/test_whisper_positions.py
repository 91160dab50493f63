"""Whispers whose encoder has learnt its places, as some versions of transformers let it."""

from __future__ import annotations

import pytest
import torch

from effasr.data.collate import collate
from effasr.interop.huggingface.checkpoint import export_model, import_model
from effasr.interop.huggingface.files import SpecialTokens
from effasr.model.asr import ASRModel
from effasr.model.learning_cost import unreached_layers
from effasr.nn.positions import whisper_sinusoids
from tests.interop.whisper import EOS, SECONDS, make_tokenizer, make_whisper, spoken, transformers

TABLE = "encoder.embed_positions.weight"


@pytest.fixture
def theirs(tmp_path):
    (tmp_path / "one").mkdir()
    make_whisper(tmp_path / "one")
    model = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path / "one").eval()
    table = model.model.encoder.embed_positions.weight
    with torch.no_grad():
        table += 0.1 * torch.randn(table.shape, generator=torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path / "one")
    table.requires_grad_()
    return model


def test_they_are_read_trained_and_written(theirs, tmp_path, caplog):
    config, vocab_size, state = import_model(tmp_path / "one")
    assert "were learnt" in caplog.text
    assert config.encoder.positions == "learned"
    model = ASRModel.from_state_dict(config, vocab_size, state).eval()
    prompt = [make_tokenizer().token_to_id("<|startoftranscript|>")]
    (example,) = spoken([16_005], prompt)
    framing = config.features.framing
    batch = collate([example], None, eos_id=EOS, pad_id=EOS, framing=framing)
    encoded = model.encode(batch).values
    extractor = transformers.WhisperFeatureExtractor(chunk_length=SECONDS)
    features = extractor(example.audio, sampling_rate=16_000, return_tensors="pt").input_features
    expected = theirs.model.encoder(features).last_hidden_state[0]
    torch.testing.assert_close(encoded, expected, rtol=1e-4, atol=1e-4)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (encoded * weights).sum().backward()
    (expected * weights).sum().backward()
    table = model.encoder.embed_positions.weight
    gradient = theirs.model.encoder.embed_positions.weight.grad
    torch.testing.assert_close(table.grad, gradient, rtol=1e-4, atol=1e-4)

    tokens = SpecialTokens(pad_id=EOS, bos_id=EOS, eos_id=EOS, decoder_start_id=EOS + 1)
    export_model(model, tmp_path / "out", tokens)
    assert torch.equal(import_model(tmp_path / "out")[2][TABLE], table)


def test_they_begin_with_the_sinusoids_and_count_as_trained(theirs, tmp_path):
    config, vocab_size, _ = import_model(tmp_path / "one")
    model = ASRModel(config, vocab_size)
    table = model.encoder.embed_positions.weight
    assert torch.equal(table, whisper_sinusoids(torch.arange(len(table)), table.shape[1]))
    for name, parameter in model.encoder.named_parameters():
        parameter.requires_grad_("embed_positions" in name)
    assert unreached_layers(model) == 0
    table.requires_grad_(False)
    assert unreached_layers(model) == config.encoder.layers
