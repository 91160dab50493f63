import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from effasr.nn.attention import (
    CrossAttention,
    GatedBiasSelfAttention,
    RelativeSelfAttention,
    SelfAttention,
    try_backend,
)
from effasr.nn.positions import (
    PositionTables,
    decoder_sinusoids,
    relative_sinusoids,
    whisper_sinusoids,
)
from effasr_kernels import BackendUnavailable, PackedLayout

WIDTH, HEADS, HEAD = 12, 3, 8


def test_cross_attention_gives_the_penalty_only_on_request():
    torch.manual_seed(0)
    module = CrossAttention(WIDTH, HEADS, HEAD)
    layout, layout_encoded = PackedLayout.from_lengths([2, 3]), PackedLayout.from_lengths([7, 4])
    x, encoded = torch.randn(5, WIDTH), torch.randn(11, WIDTH)
    plain, none = module(x, layout, encoded, layout_encoded)
    guided, penalty = module(x, layout, encoded, layout_encoded, sigma=0.3)
    assert none is None
    assert penalty.shape == (5,)
    assert ((penalty > 0) & (penalty < 1)).all()
    torch.testing.assert_close(plain, guided)


def test_dropout_is_off_in_evaluation_and_follows_the_global_seed():
    module = SelfAttention(WIDTH, HEADS, HEAD, dropout=0.5)
    layout, x = PackedLayout.from_lengths([8]), torch.randn(8, WIDTH)
    torch.manual_seed(3)
    first = module(x, layout)
    assert not torch.equal(module(x, layout), first)
    torch.manual_seed(3)
    assert torch.equal(module(x, layout), first)
    module.eval()
    assert torch.equal(module(x, layout), module(x, layout))


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


@pytest.mark.parametrize("kind", [SelfAttention, RelativeSelfAttention, GatedBiasSelfAttention])
def test_the_backend_of_inference_is_that_of_every_kind(kind):
    layer, x = kind(16, 2, 8).eval(), torch.randn(5, 16)
    layout = PackedLayout.from_lengths([2, 3], x.device)
    embeddings = torch.randn(5, 16)
    if kind is GatedBiasSelfAttention:
        embeddings = layer.table(torch.randn(5, 2))
    expected = layer(x, layout, embeddings)
    layer.inference_backend = "reference"
    torch.testing.assert_close(layer(x, layout, embeddings), expected)
    try_backend(layer, None, x.device, x.dtype, "reference", trained=False)
    layer.inference_backend = "triton"  # which serves no CPU
    with pytest.raises(BackendUnavailable):
        layer(x, layout, embeddings)
    with pytest.raises(BackendUnavailable):
        try_backend(layer, None, x.device, x.dtype, "triton", trained=False)
