"""No n-gram twice, in greedy search and in a beam."""

import copy

import numpy as np
import pytest
import torch

from effasr.data.collate import Example, collate
from effasr.data.prompt import Prompt
from effasr.decoding.attention_beam import attention_beam, repeats_ngram
from effasr.decoding.checks import check_config
from effasr.decoding.config import DecodingConfig
from effasr.decoding.decode import decode
from effasr_kernels import PackedLayout, PackedSequence

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
        assert any(repeated(one.tokens, size) for one in free), "the test needs loops"
        for one, before in zip(found, free, strict=True):
            if not repeated(before.tokens, size):
                assert one.tokens == before.tokens


@torch.no_grad()
def test_greedy_search_takes_the_best_token_that_repeats_nothing(model, tokenizer, encoded) -> None:
    """Against whole logits without caches."""
    eos = tokenizer.eos_id
    found = attention_beam(model, encoded, PROMPTS, [LIMIT] * 4, eos, beam=1, no_repeat_ngram=2)
    for one, prompt, frames in zip(found, PROMPTS, encoded.unpack(), strict=True):
        speech = PackedSequence(frames, PackedLayout.from_lengths([len(frames)]))
        said: list[int] = []
        while len(said) < LIMIT:
            read = torch.tensor(prompt + said)
            tokens = PackedSequence(read, PackedLayout.from_lengths([len(read)]))
            order = model.logits(model.decode(tokens, speech)[0])[-1].argsort(descending=True)
            best = next(t for t in order.tolist() if t == eos or not repeated([*said, t], 2))
            if best == eos:
                break
            said.append(best)
        assert list(one.tokens) == said


def test_the_option_reaches_greedy_decoding(model, tokenizer, noise) -> None:
    # A decoder that would rather go on than end.
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.decoder.output_bias[tokenizer.eos_id] -= 5
    prompt = tokenizer.prompt(Prompt("en", "en"))
    examples = [Example(str(n), noise(2.0, seed=n), prompt, [], monotonic=False) for n in range(3)]
    batch = collate(examples, eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id)
    free, found = (
        decode(model, tokenizer, batch, [prompt] * 3, DecodingConfig(no_repeat_ngram=size))
        for size in (None, 2)
    )
    assert any(repeated(one.tokens, 2) for one in free), "the test needs loops"
    assert not any(repeated(one.tokens, 2) for one in found)


def test_values_and_methods_that_cannot_be_are_refused(model) -> None:
    with pytest.raises(ValueError, match="`no_repeat_ngram` must be at least 2, but is 1"):
        DecodingConfig(no_repeat_ngram=1)
    with pytest.raises(ValueError, match="`no_repeat_ngram` must be left out for the method ctc"):
        check_config(model, DecodingConfig(method="ctc", no_repeat_ngram=3))
