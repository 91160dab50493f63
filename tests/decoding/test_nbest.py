"""Lists of the best hypotheses: every search against all transcripts of tiny cases."""

import math
from itertools import product

import pytest
import torch

from effasr.decoding.attention_beam import attention_beam
from effasr.decoding.ctc_beam import ctc_beam
from effasr.decoding.decoded import with_scores
from effasr.decoding.hypothesis import Hypothesis, NBest
from effasr.decoding.tdt_beam import tdt_beam
from effasr.decoding.transducer_beam import transducer_beam
from effasr.model.transducer import TransducerConfig
from effasr_kernels import pack
from tests.decoding.cases import (
    GIVEN,
    batch_of,
    ctc_texts,
    decode_all,
    decoder_log_probs,
    make_frames,
    make_head,
)

SIZE = 5


def assert_best_of(
    every: dict[tuple[int, ...], float], found: list[Hypothesis], **tolerance
) -> None:
    """The list is the beginning of all transcripts in the order of their log-probabilities."""
    expected = sorted(every.values(), reverse=True)[:SIZE]
    assert [item.score for item in found] == pytest.approx(expected, **tolerance)
    for item in found:
        assert item.score == pytest.approx(every[item.tokens], **tolerance)
    assert len({item.tokens for item in found}) == len(found)
    assert [item.rank for item in found] == sorted((item.rank for item in found), reverse=True)


def test_ctc_finds_the_likeliest_of_all_transcripts() -> None:
    draw = torch.Generator().manual_seed(0)
    lengths = (4, 5, 3)
    encoded = pack([1.5 * torch.randn(length, 4, generator=draw) for length in lengths], rows=15)
    result = ctc_beam(GIVEN, encoded, 400, nbest=SIZE)
    for item, frames in zip(result, encoded.unpack(), strict=False):
        assert_best_of(ctc_texts(frames), item, rel=1e-6)


@pytest.mark.parametrize("durations", [None, (0, 1), (0, 1, 2)])
@torch.no_grad()
def test_transducers_find_the_likeliest_of_all_transcripts(durations) -> None:
    labels = 3
    texts = [text for n in range(3) for text in product(range(labels), repeat=n)]
    config = TransducerConfig(
        predictor="stateless", width=8, joint=7, activation="tanh", durations=durations
    )
    search = transducer_beam if durations is None else tdt_beam
    for seed in range(3):
        head = make_head(config, labels, seed, blank=1.0)
        encoded = make_frames(3, 0, 2, 4, seed=seed)
        result = search(head, encoded, 80, [2] * 4, SIZE)
        assert result[1] == [Hypothesis((), 0.0, 0.0)]
        for item, frames in zip(result, encoded.unpack(), strict=True):
            if not len(frames):
                continue
            packed = pack([torch.tensor(text, dtype=torch.int64) for text in texts])
            losses = head(pack([frames] * len(texts)), packed).tolist()
            assert_best_of({t: -x for t, x in zip(texts, losses, strict=True)}, item, rel=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("penalty", [0.0, 0.6])
@pytest.mark.representative(penalty=0.6)
def test_attention_finds_the_best_ranks_and_their_scores(
    penalty, examples, model, tokenizer
) -> None:
    """Whatever is left out of the list ranks below its last hypothesis."""
    encoded = model.encode(batch_of(examples, tokenizer))
    prompts, limits = [item.prompt for item in examples], [2] * len(examples)
    eos, classes = tokenizer.eos_id, tokenizer.vocab_size
    other_items = [token for token in range(classes) if token != eos]
    matches = attention_beam(
        model, encoded, prompts, limits, eos, classes,
        beam=classes**2, length_penalty=penalty, nbest=SIZE,
    )  # fmt: skip
    texts = [t for n in range(3) for t in product(other_items, repeat=n)]
    for result, rows, prompt in zip(matches, encoded.unpack(), prompts, strict=False):
        scores = decoder_log_probs(model, rows, prompt, texts, eos, classes)
        ranks = {t: s / ((6 + len(t)) / 6) ** penalty for t, s in scores.items()}
        expected = sorted(ranks.values(), reverse=True)[:SIZE]
        assert [item.rank for item in result.alternatives] == pytest.approx(expected, abs=1e-4)
        for item in result.alternatives:
            assert item.score == pytest.approx(scores[item.tokens], abs=1e-4)
        assert result.tokens == result.alternatives[0].tokens


@pytest.mark.parametrize("options", [
    {"method": "attention"}, {"method": "attention", "ctc_weight": 0.3}, {"method": "ctc"},
])  # fmt: skip
def test_the_list_begins_with_the_transcript(options, examples, model, tokenizer) -> None:
    plain = decode_all(examples, model, tokenizer, beam=4, **options)
    listed = decode_all(examples, model, tokenizer, beam=4, nbest=3, **options)
    for item, other in zip(plain, listed, strict=True):
        assert (item.tokens, item.truncated) == (other.tokens, other.truncated)
        assert not item.alternatives
        assert 1 <= len(other.alternatives) <= 3
        assert other.alternatives[0].tokens == item.tokens
        assert other.score is None
    assert any(len(item.alternatives) == 3 for item in listed)


@pytest.mark.parametrize("method", ["attention", "ctc", "transducer"])
def test_greedy_search_has_the_score_of_the_model(
    method, examples, model, tdt_model, tokenizer
) -> None:
    used = tdt_model if method == "transducer" else model
    result = decode_all(examples, used, tokenizer, method=method, nbest=1)
    batch = batch_of(examples, tokenizer)
    with torch.no_grad():
        encoded = used.encode(batch)
        prompts = [example.prompt for example in examples]
        scored = with_scores(used, method, encoded, prompts, result, tokenizer.eos_id)
    for item, other in zip(result, scored, strict=True):
        (alternative,) = item.alternatives
        assert other.score is not None
        assert alternative.tokens == item.tokens
        assert alternative.score == alternative.rank == other.score.log_prob


def test_a_list_of_equal_ranks_keeps_the_order_of_arrival() -> None:
    result = NBest(2, 2)
    for rank, token in ((-2.0, 1), (-1.0, 2), (-2.0, 3), (-math.inf, 4), (-1.0, 5)):
        result.add(1, Hypothesis((token,), rank, rank))
    assert [item.tokens for item in result.lists[1]] == [(2,), (5,)]
    assert result.lists[0] == []
