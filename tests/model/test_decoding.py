import pytest
import torch

from effasr.nn.cache.paged import PagedCache
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
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_tokens_that_are_read_at_once_leave_what_steps_leave(
    paged, half, tiny_model, examples, make_batch, tokens
):
    encoded = tiny_model.projected(tiny_model.encode(make_batch(examples)))
    decoder, frames = tiny_model.decoder, max(encoded.layout.lengths)
    close = {"rtol": 0.05, "atol": 0.1} if half else {"rtol": 1e-5, "atol": 1e-5}
    read, rows, count = (2, 5, 0, 1), [4, 0, 3, 1], torch.zeros(5, dtype=torch.int64)
    for row, length in zip(rows, read, strict=True):
        count[row] = length
    following = torch.zeros(5, LENGTH, dtype=torch.int64)
    following[rows] = tokens
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        at_once, by_step = (decoder.new_state(5, LENGTH, frames, paged=paged) for _ in range(2))
        provided = [row[:length].tolist() for row, length in zip(tokens, read, strict=True)]
        decoder.admit(at_once, rows, encoded, provided, [LENGTH] * 4)
        decoder.admit(by_step, rows, encoded, [()] * 4, [LENGTH] * 4)
        assert torch.equal(at_once.positions, count)
        last = {}
        for position in range(max(read) + 1):
            hidden = decoder.step(following[:, position], by_step)
            last |= {row: hidden[row] for row in rows if count[row] == position}
        assert not at_once.self_cache.keys(0)[2].any(), "a row that nobody has"
        for row, length in zip(rows, read, strict=True):
            for layer in range(decoder.config.layers):
                for existing, result in zip(
                    _held(by_step, layer), _held(at_once, layer), strict=True
                ):
                    assert existing.dtype == result.dtype
                    if length:
                        part = (row, slice(None), slice(length))
                        torch.testing.assert_close(result[part], existing[part], **close)
        hidden = decoder.step(following[torch.arange(5), count], at_once)
    torch.testing.assert_close(hidden[rows], torch.stack([last[row] for row in rows]), **close)


def _held(state, layer):
    """Keys and values of the tokens: (N, H, places, D) each."""
    cache = state.self_cache
    if isinstance(cache, PagedCache):
        pages = cache.pages[layer, :, cache.table.long()]
        return list(pages.flatten(2, 3).transpose(2, 3))
    return list(cache._held[layer])


@torch.no_grad()
def test_sequences_that_start_together_read_equally_much(tiny_model, examples, make_batch, tokens):
    expected = whole(tiny_model, make_batch(examples), tokens)
    # Of the static batch's six sequences the two that are empty are left out.
    encoded = tiny_model.encode(make_batch(examples, static=True))
    for read in (1, LENGTH - 1):
        state = tiny_model.start_decoding(encoded, LENGTH, tokens[:, :read].tolist())
        assert (state.num_sequences, state.length) == (4, read)
        for position in range(read, LENGTH):
            hidden = tiny_model.decode_step(tokens[:, position], state)
            torch.testing.assert_close(hidden, expected[:, position], rtol=1e-5, atol=1e-5)


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
