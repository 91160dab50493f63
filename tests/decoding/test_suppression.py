"""Suppressed tokens: never written, and some never first, however it is decoded."""

import dataclasses

import pytest
import torch

from effasr.decoding.attention_beam import attention_beam
from effasr.decoding.continuous_batching.engine import Engine, Utterance
from effasr.decoding.suppression import FORBIDDEN, Suppression
from effasr.model.asr import ASRModel
from effasr.model.decoder import Decoder, DecoderConfig
from effasr_kernels import PackedLayout, PackedSequence, pack
from tests.decoding.cases import without_caches
from tests.decoding.test_continuous_batching import EVERY_KIND, KINDS

PROMPTS = [[3], [3, 5, 6], [4, 4], [3, 7]]
LIMIT = 6
FRAMES = (9, 30, 4, 17)


@pytest.fixture
def encoded() -> PackedSequence:
    values = torch.randn(sum(FRAMES), 32, generator=torch.Generator().manual_seed(0))
    return PackedSequence(values, PackedLayout.from_lengths(FRAMES))


def suppressing(model: ASRModel, always: tuple[int, ...], begin: tuple[int, ...]) -> ASRModel:
    assert model.config.decoder is not None
    decoder = dataclasses.replace(model.config.decoder, suppress=always, begin_suppress=begin)
    config = dataclasses.replace(model.config, decoder=decoder)
    return ASRModel.from_state_dict(config, model.vocab_size, model.state_dict()).eval()


def greedy(model: ASRModel, encoded: PackedSequence, eos: int) -> list[list[int]]:
    """Each alone, without caches, with whole logits and a mask over them."""
    config = model.config.decoder
    assert config is not None

    def barred(said: list[int], _: object) -> tuple[int, ...]:
        return (*config.suppress, *(config.begin_suppress if not said else ()))

    return [
        list(without_caches(model, pack([rows]), prompt, LIMIT, eos, barred).tokens)
        for rows, prompt in zip(encoded.unpack(), PROMPTS, strict=True)
    ]


@torch.no_grad()
def decoded(model: ASRModel, encoded: PackedSequence, eos: int, kind: str) -> list[list[int]]:
    # Two at a time, so that some begin while others go on.
    engine = Engine(model, eos, slots=2, max_frames=50, **KINDS[kind])
    engine.submit(encoded, [Utterance(n, prompt, LIMIT) for n, prompt in enumerate(PROMPTS)])
    results = dict(engine.results())
    return [list(results[number].tokens) for number in range(len(PROMPTS))]


@EVERY_KIND
def test_greedy_search_takes_the_best_that_is_allowed(kind, model, tokenizer, encoded) -> None:
    eos = tokenizer.eos_id
    free = greedy(model, encoded, eos)
    # What would be said: first the first tokens, then what is likeliest after those.
    firsts = {message[0] for message in free if message}
    later = [token for message in free for token in message[1:]]
    often = max(later, key=later.count)
    for always, begin in (((often,), ()), ((), (*firsts, eos)), ((often, 9), (*firsts, eos))):
        barred = suppressing(model, always, begin)
        expected = greedy(barred, encoded, eos)
        assert decoded(barred, encoded, eos, kind) == expected
        assert expected != free
        assert not {*always} & {token for message in expected for token in message}
        assert not {*begin} & {message[0] for message in expected if message}
        # The end is barred at the beginning alone.
        assert eos not in begin or all(expected)


@pytest.mark.parametrize("options", [{}, {"ctc_weight": 0.5}, {"ctc_weight": 1.0}])
@torch.no_grad()
def test_a_beam_keeps_to_what_is_allowed(options, model, tokenizer, encoded) -> None:
    eos, limits = tokenizer.eos_id, [LIMIT] * len(PROMPTS)
    free = attention_beam(model, encoded, PROMPTS, limits, eos, beam=3, **options)
    firsts = {item.tokens[0] for item in free if item.tokens}
    always = free[1].tokens[-1]
    barred = suppressing(model, (always,), (*firsts, eos))
    result = attention_beam(barred, encoded, PROMPTS, limits, eos, beam=3, **options)
    for item in result:
        assert item.tokens
        assert item.tokens[0] not in firsts
        assert always not in item.tokens
    assert result != free
    if not options:
        narrow = attention_beam(barred, encoded, PROMPTS, limits, eos, beam=1)
        assert [list(item.tokens) for item in narrow] == greedy(barred, encoded, eos)


def test_logits_and_what_there_is_to_suppress() -> None:
    decoder = Decoder(DecoderConfig(width=8, layers=1, heads=2, feed_forward=8), 12)
    assert Suppression.from_decoder(decoder) is None
    config = dataclasses.replace(decoder.config, suppress=(3, 11), begin_suppress=(3, 5))
    decoder = Decoder(config, 12)
    # Of the classes that are tokens only; what is never written needs no second rule.
    result = Suppression.from_decoder(decoder, classes=10)
    assert result is not None
    assert (result.always.tolist(), result.begin.tolist()) == ([3], [5])
    logits = result.applied(torch.zeros(2, 10), torch.tensor([True, False]))
    assert (logits == FORBIDDEN).nonzero().tolist() == [[0, 3], [0, 5], [1, 3]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"suppress": (-1,)}, "`suppress` must be token ids, at least 0, but is -1"),
        ({"begin_suppress": (12,)}, "`begin_suppress` must be in the vocabulary of 12, but is 12"),
        ({"begin_suppress": tuple(range(16))}, "`begin_suppress` must be at most 15 tokens"),
    ],
)
def test_tokens_are_checked(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        Decoder(DecoderConfig(width=8, layers=1, heads=2, feed_forward=8, **options), 12)
