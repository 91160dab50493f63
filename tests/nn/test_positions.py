import pytest
import torch

from effasr.nn.positions import (
    decoder_sinusoids,
    relative_sinusoids,
    sinusoids,
    whisper_sinusoids,
)


def test_relative_table_is_that_of_transformers_upside_down() -> None:
    parakeet = pytest.importorskip("transformers.models.parakeet.modeling_parakeet")
    config = parakeet.ParakeetEncoderConfig(hidden_size=24)
    theirs = parakeet.ParakeetEncoderRelPositionalEncoding(config)(torch.zeros(1, 9, 24))
    ours = relative_sinusoids(9, 24, torch.device("cpu"))
    torch.testing.assert_close(ours.flip(0), theirs[0], atol=1e-6, rtol=1e-6)


def test_decoder_positions_are_those_of_transformers() -> None:
    canary = pytest.importorskip("transformers.models.canary.modeling_canary")
    positions = torch.tensor([0, 1, 5, 300])
    theirs = canary.CanaryPositionalEmbedding(512, 32)(positions)
    torch.testing.assert_close(decoder_sinusoids(positions, 32), theirs, atol=1e-6, rtol=1e-5)


def test_whisper_places_are_those_of_transformers() -> None:
    whisper = pytest.importorskip("transformers.models.whisper.modeling_whisper")
    theirs = whisper.sinusoids(1500, 24)
    assert torch.equal(whisper_sinusoids(torch.arange(1500), 24), theirs)


def test_the_middle_row_is_distance_zero() -> None:
    table = relative_sinusoids(4, 6, torch.device("cpu"))
    assert table.shape == (7, 6)
    assert torch.equal(table[3], torch.tensor([0.0, 1.0] * 3))
    assert torch.equal(table[5], sinusoids(torch.tensor([2]), 6)[0])
