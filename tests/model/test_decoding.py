from collections.abc import Callable, Sequence

import pytest
import torch

from effasr.data.batch import Batch, Example
from effasr.model.asr import ASRModel
from effasr_kernels import pack

Make = Callable[..., Batch]
LENGTH = 6


@pytest.fixture
def tokens() -> torch.Tensor:
    """Four sequences of one length: (4, LENGTH)."""
    return torch.randint(8, 40, (4, LENGTH), generator=torch.Generator().manual_seed(2))


def whole(model: ASRModel, batch: Batch, tokens: torch.Tensor) -> torch.Tensor:
    """Hidden states of the whole sequences at once: (4, LENGTH, width)."""
    hidden, _ = model.decode(pack(list(tokens)), model.encode(batch))
    return hidden.view(4, LENGTH, -1)


@torch.no_grad()
def test_token_by_token_is_the_same_as_all_at_once(
    tiny_model: ASRModel, examples: Sequence[Example], make_batch: Make, tokens: torch.Tensor
) -> None:
    batch = make_batch(examples)
    expected = whole(tiny_model, batch, tokens)
    state = tiny_model.start_decoding(tiny_model.encode(batch), LENGTH)
    for position in range(LENGTH):
        hidden = tiny_model.decode_step(tokens[:, position], state)
        torch.testing.assert_close(hidden, expected[:, position], rtol=1e-5, atol=1e-5)
        assert torch.equal(
            tiny_model.logits(hidden).argmax(-1),
            tiny_model.logits(expected[:, position]).argmax(-1),
        )
    assert state.length == LENGTH


@torch.no_grad()
def test_finished_sequences_can_leave(
    tiny_model: ASRModel, examples: Sequence[Example], make_batch: Make, tokens: torch.Tensor
) -> None:
    expected = whole(tiny_model, make_batch(examples), tokens)
    # The static batch has two more sequences, which are empty: they leave first.
    batch = make_batch(examples, static=True)
    state = tiny_model.start_decoding(tiny_model.encode(batch), LENGTH)
    state.keep(range(4))
    rows = [0, 1, 2, 3]
    for position, leaves in enumerate([[], [1], [], [0], [2], []]):
        hidden = tiny_model.decode_step(tokens[rows, position], state)
        torch.testing.assert_close(hidden, expected[rows, position], rtol=1e-5, atol=1e-5)
        kept = [index for index, row in enumerate(rows) if row not in leaves]
        rows = [rows[index] for index in kept]
        state.keep(kept)
    assert rows == [3]


@torch.no_grad()
def test_half_precision_decodes_too(
    tiny_model: ASRModel, examples: Sequence[Example], make_batch: Make, tokens: torch.Tensor
) -> None:
    batch = make_batch(examples)
    expected = whole(tiny_model, batch, tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = tiny_model.start_decoding(tiny_model.encode(batch), LENGTH)
        for position in range(LENGTH):
            hidden = tiny_model.decode_step(tokens[:, position], state)
    torch.testing.assert_close(hidden.float(), expected[:, -1], rtol=0.1, atol=0.2)


@torch.no_grad()
def test_there_is_no_decoding_past_the_room(
    tiny_model: ASRModel, examples: Sequence[Example], make_batch: Make, tokens: torch.Tensor
) -> None:
    encoded = tiny_model.encode(make_batch(examples))
    state = tiny_model.start_decoding(encoded, 1)
    tiny_model.decode_step(tokens[:, 0], state)
    with pytest.raises(ValueError, match="at most 1 tokens can be decoded"):
        tiny_model.decode_step(tokens[:, 1], state)
    for wrong in (0, 65):
        with pytest.raises(ValueError, match=rf"1 to max_positions = 64, but is {wrong}"):
            tiny_model.start_decoding(encoded, wrong)


@torch.no_grad()
def test_there_is_one_token_for_each_sequence(
    tiny_model: ASRModel, examples: Sequence[Example], make_batch: Make, tokens: torch.Tensor
) -> None:
    state = tiny_model.start_decoding(tiny_model.encode(make_batch(examples)), LENGTH)
    with pytest.raises(ValueError, match=r"`tokens` must be \(4,\), but is \(3,\)"):
        tiny_model.decode_step(tokens[:3, 0], state)
