import pytest
import torch

from effasr.decoding.config import DecodingConfig
from effasr.decoding.ctc_greedy import ctc_greedy
from effasr_kernels import pack
from tests.decoding.cases import GIVEN, batch_of, decode_all, without_caches


def test_some_texts_end_and_some_are_stopped(examples, model, tokenizer) -> None:
    """Both ways out of the loop are needed for the other tests to mean anything."""
    results = decode_all(examples, model, tokenizer)
    assert {result.truncated for result in results} == {False, True}
    assert all(tokenizer.eos_id not in result.tokens for result in results)


@torch.no_grad()
def test_caches_change_nothing(examples, model, tokenizer) -> None:
    config = DecodingConfig()
    cached = decode_all(examples, model, tokenizer)
    for n, example in enumerate(examples):
        batch = batch_of([example], tokenizer)
        frames = batch.frames.lengths[0]
        limit = min(config.max_tokens(frames), 64 - len(example.prompt))
        encoded = model.encode(batch)
        expected = without_caches(model, encoded, example.prompt, limit, tokenizer.eos_id)
        assert cached[n] == expected
        read = [*example.prompt, *expected.tokens]
        whole = model.logits(model.decode(pack([torch.tensor(read)]), encoded)[0])
        state = model.start_decoding(encoded, 64)
        for token, logits in zip(read, whole, strict=True):
            step = model.logits(model.decode_step(torch.tensor([token]), state))[0]
            torch.testing.assert_close(step, logits, rtol=1e-4, atol=1e-4)


def test_a_text_has_at_most_as_many_tokens_as_its_frames_allow(examples, model, tokenizer) -> None:
    options = {"tokens_per_frame": 0.5, "extra_tokens": 2}
    batch = batch_of(examples, tokenizer)
    results = decode_all(examples, model, tokenizer, **options)
    for result, frames in zip(results, batch.frames.lengths, strict=True):
        assert len(result.tokens) <= frames // 2 + 2
        assert not result.truncated or len(result.tokens) == frames // 2 + 2


def test_a_text_never_outgrows_the_positions_of_the_decoder(examples, model, tokenizer) -> None:
    results = decode_all(examples, model, tokenizer, tokens_per_frame=100.0)
    room = model.config.decoder.max_positions - len(examples[0].prompt)
    assert max(len(result.tokens) for result in results) == room


@pytest.mark.parametrize("rows", [4096, 2])
def test_ctc_merges_repeats_then_drops_blanks(rows, monkeypatch) -> None:
    monkeypatch.setattr("effasr.decoding.ctc_greedy._ROWS", rows)
    blank = 5
    frames = [[5, 1, 1, 5, 1, 2, 2], [2, 2, 3], [], [5, 5], [4], [4]]
    likeliest = [torch.nn.functional.one_hot(torch.tensor(f).long(), 6).float() for f in frames]
    encoded = pack(likeliest, rows=19)
    expected = [[1, 1, 2], [2, 3], [], [], [4], [4]]
    assert ctc_greedy(GIVEN, encoded, blank) == expected
