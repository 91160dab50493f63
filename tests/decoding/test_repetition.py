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
        found = repeats_ngram(torch.tensor(labels), torch.tensor(symbols), size)
        assert found.shape == symbols.shape
        for n, k, c in np.ndindex(3, 4, 5):
            said = [token for token in labels[n, k].tolist() if token >= 0]
            ngrams = {tuple(said[i : i + size]) for i in range(len(said) - size + 1)}
            last = tuple([*said, int(symbols[n, k, c])][-size:])
            assert bool(found[n, k, c]) == (last in ngrams)


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
    found = attention_beam(*arguments, **options, no_repeat_ngram=size)
    assert not any(repeated(one.tokens, size) for one in found)
    if beam == 1 and not ctc_weight:

        def barred(said: list[int], order: Sequence[int]) -> list[int]:
            return [t for t in order if t != tokenizer.eos_id and repeated([*said, t], size)]

        alone = [
            without_caches(model, pack([rows]), prompt, LIMIT, tokenizer.eos_id, barred)
            for rows, prompt in zip(encoded.unpack(), PROMPTS, strict=True)
        ]
        assert [one.tokens for one in found] == [one.tokens for one in alone]
        assert any(repeated(one.tokens, size) for one in free), "the test needs loops"
        for one, before in zip(found, free, strict=True):
            if not repeated(before.tokens, size):
                assert one.tokens == before.tokens


def test_the_option_reaches_greedy_decoding(model, tokenizer, examples) -> None:
    # A decoder that would rather go on than end.
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.decoder.output_bias[tokenizer.eos_id] -= 5
    free, found = (
        decode_all(examples, model, tokenizer, no_repeat_ngram=size) for size in (None, 2)
    )
    assert any(repeated(one.tokens, 2) for one in free), "the test needs loops"
    assert not any(repeated(one.tokens, 2) for one in found)
