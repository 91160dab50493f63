"""Steps of `PanelDecoder` beside those of the decoder itself."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from effasr.model.decoder import Decoder, DecoderConfig
from effasr.nn.cache.decoder_state import DecoderState
from effasr.nn.lora import LoRAConfig, adapt, merged
from effasr.transcription.cpu_weights import OneDNNWeights, PanelDecoder, has_panel_kernels
from effasr_kernels import PackedSequence, pack
from effasr_kernels.runtime import native

pytestmark = pytest.mark.skipif(
    native.unsupported_reason() is not None, reason=str(native.unsupported_reason())
)
VOCABULARY, FRAMES = 50, (7, 40, 1, 19)
CONFIGS: dict[str, dict[str, Any]] = {
    "canary": {},
    "whisper": {
        "positions": "learned", "activation": "gelu", "embedding_norm": False, "key_bias": False,
    },
    "others": {"head_dim": 12, "tie_embeddings": False, "output_bias": True, "bias": False},
}  # fmt: skip
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}


@pytest.fixture(params=CONFIGS)
def decoder(request) -> Decoder:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "width": 24,
        "layers": 2,
        "heads": 2,
        "feed_forward": 40,
        "max_positions": 24,
    }
    made = Decoder(DecoderConfig(**{**options, **CONFIGS[request.param]}), VOCABULARY)
    for parameter in made.parameters():
        # Also those that start as zeros or ones.
        torch.nn.init.normal_(parameter.data, mean=float(parameter.dim() == 1), std=0.3)
    return made.eval()


@pytest.fixture
def encoded() -> PackedSequence:
    generator = torch.Generator().manual_seed(1)
    return pack([torch.randn(frames, 24, generator=generator) for frames in FRAMES])


def _check(
    decoder: Decoder, packed: PanelDecoder, usual: DecoderState, found: DecoderState, steps: int
) -> None:
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (usual.num_rows,))
        active = usual.going.bool()
        expected, hidden = decoder.step(tokens, usual), packed.step(tokens, found)
        torch.testing.assert_close(hidden[active], expected[active], **CLOSE)
        assert torch.equal(found.positions, usual.positions)
        assert found.length == usual.length
        for classes in (None, 33):
            best = decoder.likeliest(expected[active], classes)
            assert torch.equal(packed.likeliest(hidden[active], classes), best)


@torch.no_grad()
def test_sequences_that_come_and_go(decoder, encoded) -> None:
    packed = PanelDecoder(decoder)
    states = [decoder.new_state(6, 24, max(FRAMES)) for _ in range(2)]

    def admit(rows: Sequence[int], read: Sequence[Sequence[int]]) -> None:
        for state in states:
            decoder.admit(state, rows, encoded, read, [24] * 4)

    admit([4, 0, 3, 1], [(5,), (6, 7), (), (8, 9, 10)])
    _check(decoder, packed, *states, steps=3)
    for state in states:
        state.release([0, 4])
    _check(decoder, packed, *states, steps=2)
    for state in states:
        state.keep([1, 3])
        state.extend(5)
    admit([2, 3, 4, 0], [(1, 2)] * 4)
    _check(decoder, packed, *states, steps=14)


@torch.no_grad()
def test_hypotheses(decoder, encoded) -> None:
    packed = PanelDecoder(decoder)
    states = [decoder.start(encoded, 20, [(3, 4)] * 4) for _ in range(2)]
    _check(decoder, packed, *states, steps=1)
    for state in states:
        state.widen(3)
    _check(decoder, packed, *states, steps=2)
    for state in states:
        state.reorder(torch.tensor([1, 1, 0, 3, 5, 4, 8, 7, 6, 9, 9, 9]))
        state.keep([1, 3])
    _check(decoder, packed, *states, steps=15)
    for state in states:
        with pytest.raises(ValueError, match="at most 20 tokens"):
            packed.step(torch.zeros(6, dtype=torch.int64), state)


@torch.no_grad()
def test_watched_and_paged_steps_are_the_decoders_own(decoder, encoded) -> None:
    packed, tokens = PanelDecoder(decoder), torch.tensor([1, 2, 3, 4])
    usual, result = (decoder.start(encoded, 20) for _ in range(2))
    for state in (usual, result):
        state.watch()
    assert torch.equal(packed.step(tokens, result), decoder.step(tokens, usual))
    assert result.weights is not None
    assert usual.weights is not None
    assert torch.equal(result.weights, usual.weights)
    paged = [decoder.new_state(4, 20, max(FRAMES), paged=True) for _ in range(2)]
    for state in paged:
        decoder.admit(state, range(4), encoded, [()] * 4, [20] * 4)
    assert torch.equal(packed.step(tokens, paged[0]), decoder.step(tokens, paged[1]))


def test_what_cannot_be_packed(decoder, monkeypatch) -> None:
    assert has_panel_kernels(decoder)
    assert not has_panel_kernels(Decoder(decoder.config, VOCABULARY).double())
    adapt(decoder, LoRAConfig(rank=2, targets=("layers.*.mlp.linear1",)))
    assert not has_panel_kernels(decoder)
    with merged(decoder):
        assert has_panel_kernels(decoder)
    monkeypatch.setattr(native, "unsupported_reason", lambda: "none was built")
    with merged(decoder):
        assert not has_panel_kernels(decoder)


def test_weights_are_packed_for_as_long_as_they_are_active(model) -> None:
    packed = OneDNNWeights(model)
    with packed.active():
        assert {"step", "likeliest"} <= set(model.decoder.__dict__)
    assert not {"step", "likeliest"} & set(model.decoder.__dict__)
