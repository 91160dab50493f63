import pytest
import torch

from effasr.data.collate import Example, collate
from effasr.data.prompt import Prompt
from effasr.decoding.config import DecodingConfig
from effasr.model.asr import ASRModel
from effasr.nn.feed_forward import FeedForward
from effasr.transcription.cpu_weights import OneDNNWeights, rounds_to_bfloat16
from effasr.transcription.recognizer import Recognizer, Request
from tests.support.tolerance import assert_no_worse

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN"
)

bfloat16 = pytest.mark.skipif(not rounds_to_bfloat16(), reason="this processor has no AVX512")


def _encode(model: ASRModel, examples: list[Example], dtype: torch.dtype = torch.float32):
    with torch.no_grad():
        return model.encode(collate(examples, eos_id=1, pad_id=0)).values.to(dtype)


@pytest.fixture(scope="module")
def examples(noise) -> list[Example]:
    seconds = (0.3, 2.1, 0.08, 3.3)
    return [Example(str(n), noise(s, seed=n), [2], [], False) for n, s in enumerate(seconds)]


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [
        ("silu", torch.float32),
        ("relu", torch.float32),
        pytest.param("silu", torch.bfloat16, marks=bfloat16),
        pytest.param("gelu", torch.bfloat16, marks=bfloat16),
    ],
)
def test_a_feed_forward_network_is_as_exact_as_torchs_own(model, activation, dtype) -> None:
    torch.manual_seed(0)
    network = FeedForward(48, 96, activation=activation).eval()
    packed = OneDNNWeights(_with(model, network), dtype)
    x = torch.randn(70, 48)
    with torch.no_grad():
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            usual = network(x)
        with packed.active():
            assert "forward" in network.__dict__
            result = network(x)
        assert result.dtype == x.dtype
        exact = network.double()(x.double())
    assert_no_worse(result.to(dtype), gold=exact, baseline=usual)


def test_the_model_is_as_before(model, examples) -> None:
    before, names = _encode(model, examples), list(model.state_dict())
    packed = OneDNNWeights(model)
    with packed.active():
        assert list(model.state_dict()) == names
    with pytest.raises(RuntimeError, match="stop"), packed.active():
        raise RuntimeError("stop")
    assert torch.equal(_encode(model, examples), before)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_autocast_and_other_dtypes_are_left_alone(model, examples) -> None:
    def encode() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return _encode(model, examples)

    usual = encode()
    with torch.autocast("cpu", torch.bfloat16), OneDNNWeights(model).active():
        assert torch.equal(encode(), usual)
    network = FeedForward(48, 96, activation="relu").double().eval()
    with OneDNNWeights(_with(model, network)).active():
        assert "forward" not in network.__dict__


def test_weights_that_changed_are_packed_again(model, tokenizer, noise) -> None:
    """A validation in the middle of a training sees the weights of its step."""
    recognizer = Recognizer(model, tokenizer)
    request = Request("a", lambda: noise(2.0), Prompt("en", "en"))
    [first] = recognizer.results([request])
    packed = recognizer._cpu_weights
    [again] = recognizer.results([request])
    assert recognizer._cpu_weights is packed, "weights that did not change are packed once"
    assert again.text == first.text
    linear = model.encoder.layers[0].feed_forward1.linear1
    selected = linear.weight.detach().clone()
    with torch.no_grad():
        linear.weight.normal_(generator=torch.Generator().manual_seed(1))
    [second] = recognizer.results([request])
    with torch.no_grad():
        linear.weight.copy_(selected)
    [third] = recognizer.results([request])
    assert recognizer._cpu_weights is not packed
    assert first.text != second.text
    assert first.text == third.text


def _with(model: ASRModel, network: FeedForward) -> ASRModel:
    """A model whose encoder is this network: what is packed is found by the parts it has."""
    other = ASRModel.__new__(ASRModel)
    torch.nn.Module.__init__(other)
    other.encoder, other.ctc_head, other.decoder = network, None, None
    return other


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=bfloat16)])
def test_transcripts_are_the_same_in_any_company(model, tokenizer, noise, precision) -> None:
    """Down to utterances of a single frame, for which MKL sums in another order."""
    seconds = (0.08, 0.1, 0.17, 0.25, 0.33, 0.41, 0.49, 2.1, 0.7, 1.3)
    requests = [
        Request(str(n), lambda s=s, n=n: noise(s, seed=n), Prompt("en", "en"))
        for n, s in enumerate(seconds)
    ]
    recognizer = Recognizer(model, tokenizer, DecodingConfig(precision=precision))
    together = {item.id: item.text for item in recognizer.results(requests)}
    assert len(set(together.values())) > 4, "the test needs different texts"
    for request in requests:
        [alone] = recognizer.results([request])
        assert alone.text == together[request.id], request.id
