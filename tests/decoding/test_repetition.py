"""No n-gram twice, in greedy search and in a beam."""

import copy
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from effasr.decoding.attention_beam import attention_beam, repeats_ngram
from effasr_kernels import PackedLayout, PackedSequence, pack
from tests.decoding.cases import decode_all, without_caches

PROMPTS = [[3], [3, 5, 6], [4, 4], [3, 7]]
FRAMES = (9, 30, 4, 17)
LIMIT = 12


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


@pytest.fixture
def encoded() -> PackedSequence:
    values = torch.randn(sum(FRAMES), 32, generator=torch.Generator().manual_seed(0))
    return PackedSequence(values, PackedLayout.from_lengths(FRAMES))


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("ctc_weight", [0.0, 0.5])
@pytest.mark.parametrize("size", [2, 3])
@torch.no_grad()
def test_no_transcript_has_an_ngram_twice(
    beam, ctc_weight, size, model, tokenizer, encoded
) -> None:
    arguments = model, encoded, PROMPTS, [LIMIT] * 4, tokenizer.eos_id
    options = {"beam": beam, "ctc_weight": ctc_weight}
    free = attention_beam(*arguments, **options)
    result = attention_beam(*arguments, **options, no_repeat_ngram=size)
    assert not any(repeated(item.tokens, size) for item in result)
    if beam == 1 and not ctc_weight:

        def barred(said: list[int], order: Sequence[int]) -> list[int]:
            return [t for t in order if t != tokenizer.eos_id and repeated([*said, t], size)]

        alone = [
            without_caches(model, pack([rows]), prompt, LIMIT, tokenizer.eos_id, barred)
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
