import pytest
import torch

from effasr_kernels import pack

LENGTH = 6


@pytest.fixture
def tokens():
    """Four sequences of one length: (4, LENGTH)."""
    return torch.randint(8, 40, (4, LENGTH), generator=torch.Generator().manual_seed(2))


def whole(model, batch, tokens):
    """Hidden states of the whole sequences at once: (4, LENGTH, width)."""
    hidden, _ = model.decode(pack(list(tokens)), model.encode(batch))
    return hidden.view(4, LENGTH, -1)


@torch.no_grad()
def test_token_by_token_is_the_same_as_all_at_once(tiny_model, examples, make_batch, tokens):
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
def test_finished_sequences_can_leave(tiny_model, examples, make_batch, tokens):
    expected = whole(tiny_model, make_batch(examples), tokens)
    # The static batch has two more sequences, which are empty: they leave first.
    batch = make_batch(examples, static=True)
    state = tiny_model.start_decoding(tiny_model.encode(batch), LENGTH)
    state.keep(range(4))
    rows = [0, 1, 2, 3]
    for position, leaves in enumerate([[], [1], [], [0], [2], []]):
        hidden = tiny_model.decode_step(tokens[rows, position], state)
        torch.testing.assert_close(hidden, expected[rows, position], rtol=1e-5, atol=1e-5)
        selected = [index for index, row in enumerate(rows) if row not in leaves]
        rows = [rows[index] for index in selected]
        state.keep(selected)
    assert rows == [3]
