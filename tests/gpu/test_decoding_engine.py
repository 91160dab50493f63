"""Continuous batching on a GPU: the recorded step against the same steps launched one by one."""

import pytest
import torch

from effasr.decoding.continuous_batching.engine import Engine, Utterance
from effasr.decoding.decoded import Decoded
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr_kernels import pack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
WIDTH, VOCABULARY, END = 64, 48, 3
MIXED = [
    (frames, tuple(range(4, 5 + n % 4)), limit)
    for n, (frames, limit) in enumerate(
        [(40, 20), (3, 1), (17, 9), (0, 5), (90, 70), (8, 2), (33, 14), (71, 25), (5, 7)]
    )
]


@pytest.fixture(scope="module")
def model() -> ASRModel:
    torch.manual_seed(0)
    config = ModelConfig(
        encoder=FastConformerConfig(width=WIDTH, layers=1, heads=4, feed_forward=64),
        decoder=DecoderConfig(
            width=WIDTH, layers=2, heads=2, feed_forward=64, max_positions=128, tie_embeddings=False
        ),
    )
    model = ASRModel(config, VOCABULARY).eval()
    with torch.no_grad():
        for name, parameter in model.decoder.named_parameters():
            parameter.mul_(4.0 if "encoder_attn" in name or "embed" in name else 1.0)
    return model.cuda()


def _speech(number: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(number)
    return torch.randn(MIXED[number][0], WIDTH, generator=draw).cuda()


def _decoded(model: ASRModel, names, **options) -> dict[int, Decoded]:
    engine = Engine(model, END, max_frames=100, **options)
    encoded = pack([_speech(name) for name in names])
    engine.submit(encoded, [Utterance(name, *MIXED[name][1:]) for name in names])
    return dict(engine.results())


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_recorded_step_says_the_same(half: bool, ahead: int, model: ASRModel) -> None:
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        recorded = _decoded(model, range(9), slots=4, ahead=ahead)
        launched = _decoded(model, range(9), slots=4, ahead=0, graph=False)
    assert recorded == launched
    assert len({result.tokens for result in recorded.values()}) > 4, "the test needs other texts"


def test_an_engine_can_be_used_again(model: ASRModel) -> None:
    engine = Engine(model, END, slots=3, max_frames=100)
    results = []
    for _ in range(2):
        encoded = pack([_speech(name) for name in range(9)])
        engine.submit(encoded, [Utterance(name, *MIXED[name][1:]) for name in range(9)])
        results.append(dict(engine.results()))
    assert results[0] == results[1]


def test_tokens_do_not_depend_on_the_company(model: ASRModel) -> None:
    together = _decoded(model, range(9), slots=4)
    for name in range(9):
        assert _decoded(model, [name], slots=4) == {name: together[name]}
    assert _decoded(model, [6, 2, 4], slots=4) == {n: together[n] for n in (6, 2, 4)}
