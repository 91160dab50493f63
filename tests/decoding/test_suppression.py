"""Suppressed tokens, some of them first alone, and n-grams that are not said twice."""

import copy
import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from effasr.decoding.attention_beam import attention_beam, repeats_ngram
from effasr.decoding.continuous_batching.engine import Engine, Utterance
from effasr.model.asr import ASRModel
from effasr.model.decoder import Decoder, DecoderConfig
from effasr_kernels import PackedLayout, PackedSequence, pack
from tests.decoding.cases import decode_all, without_caches
from tests.decoding.test_continuous_batching import EVERY_KIND, KINDS

PROMPTS = [[3], [3, 5, 6], [4, 4], [3, 7]]
LIMIT, LONG = 6, 12
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


def repeated(tokens, size: int) -> bool:
    ngrams = [tuple(tokens[n : n + size]) for n in range(len(tokens) - size + 1)]
    return len({*ngrams}) < len(ngrams)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_it_is_what_a_loop_over_the_hypotheses_finds(size) -> None:
    draw = np.random.default_rng(size)
    for steps in range(12):
        labels = draw.integers(0, 3, size=(3, 4, steps))
        labels[1, :, :2] = -1
        labels[2, :, :steps] = -1
        symbols = draw.integers(0, 3, size=(3, 4, 5))
        result = repeats_ngram(torch.tensor(labels), torch.tensor(symbols), size)
        assert result.shape == symbols.shape
        for n, k, c in np.ndindex(3, 4, 5):
            message = [token for token in labels[n, k].tolist() if token >= 0]
            ngrams = {tuple(message[i : i + size]) for i in range(len(message) - size + 1)}
            last = tuple([*message, int(symbols[n, k, c])][-size:])
            assert bool(result[n, k, c]) == (last in ngrams)


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("ctc_weight", [0.0, 0.5])
@pytest.mark.parametrize("size", [2, 3])
@torch.no_grad()
def test_no_transcript_has_an_ngram_twice(
    beam, ctc_weight, size, model, tokenizer, encoded
) -> None:
    arguments = model, encoded, PROMPTS, [LONG] * 4, tokenizer.eos_id
    options = {"beam": beam, "ctc_weight": ctc_weight}
    free = attention_beam(*arguments, **options)
    result = attention_beam(*arguments, **options, no_repeat_ngram=size)
    assert not any(repeated(item.tokens, size) for item in result)
    if beam == 1 and not ctc_weight:

        def barred(said: list[int], order: Sequence[int]) -> list[int]:
            return [t for t in order if t != tokenizer.eos_id and repeated([*said, t], size)]

        alone = [
            without_caches(model, pack([rows]), prompt, LONG, tokenizer.eos_id, barred)
            for rows, prompt in zip(encoded.unpack(), PROMPTS, strict=True)
        ]
        assert [item.tokens for item in result] == [item.tokens for item in alone]
        assert any(repeated(item.tokens, size) for item in free), "the test needs loops"
        for item, before in zip(result, free, strict=True):
            if not repeated(before.tokens, size):
                assert item.tokens == before.tokens


def test_the_option_reaches_greedy_decoding(model, tokenizer, examples) -> None:
    # A decoder that would rather go on than end.
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.decoder.output_bias[tokenizer.eos_id] -= 5
    free, result = (
        decode_all(examples, model, tokenizer, no_repeat_ngram=size) for size in (None, 2)
    )
    assert any(repeated(item.tokens, 2) for item in free), "the test needs loops"
    assert not any(repeated(item.tokens, 2) for item in result)
