import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from effasr.nn.positions import (
    PositionTables,
    decoder_sinusoids,
    relative_sinusoids,
    whisper_sinusoids,
)


def test_relative_table_is_that_of_transformers_upside_down():
    parakeet = pytest.importorskip("transformers.models.parakeet.modeling_parakeet")
    config = parakeet.ParakeetEncoderConfig(hidden_size=24)
    theirs = parakeet.ParakeetEncoderRelPositionalEncoding(config)(torch.zeros(1, 9, 24))
    ours = relative_sinusoids(9, 24, torch.device("cpu"))
    torch.testing.assert_close(ours.flip(0), theirs[0], atol=1e-6, rtol=1e-6)


def test_decoder_positions_are_those_of_transformers():
    canary = pytest.importorskip("transformers.models.canary.modeling_canary")
    positions = torch.tensor([0, 1, 5, 300])
    theirs = canary.CanaryPositionalEmbedding(512, 32)(positions)
    torch.testing.assert_close(decoder_sinusoids(positions, 32), theirs, atol=1e-6, rtol=1e-5)


def test_whisper_places_are_those_of_transformers():
    whisper = pytest.importorskip("transformers.models.whisper.modeling_whisper")
    theirs = whisper.sinusoids(1500, 24)
    assert torch.equal(whisper_sinusoids(torch.arange(1500), 24), theirs)


def test_a_table_is_computed_once_for_each_key():
    tables, calls, like = PositionTables(), [], torch.zeros(1)

    def make():
        calls.append(None)
        return relative_sinusoids(4, 6, torch.device("cpu"))

    first = tables.get(make, like, 4)
    assert tables.get(make, like, 4) is first
    assert len(calls) == 1
    assert tables.get(make, like, 5) is not first
    with FakeTensorMode() as mode:
        fake = tables.get(make, mode.from_tensor(like), 4)
    assert isinstance(fake, FakeTensor)
    assert tables.get(make, like, 4) is first


def test_a_table_made_in_inference_mode_serves_training():
    tables, x = PositionTables(), torch.ones(3, 6, requires_grad=True)
    with torch.inference_mode():
        tables.get(lambda: torch.ones(3, 6), torch.zeros(1))
    (x * tables.get(lambda: torch.zeros(3, 6), torch.zeros(1))).sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 6))
