import pytest
import torch

from effasr.decoding import attention_beam as searched
from effasr.decoding.attention_beam import attention_beam
from effasr.decoding.continuous_batching.engine import attention_greedy
from effasr.decoding.decode import next_token_scores
from effasr.model.asr import ASRModel
from effasr.model.decoder import Decoder
from effasr.nn.cache.paged import PagedCache
from tests.decoding.cases import (
    EOS,
    FRAMES,
    LIMITS,
    PROMPTS,
    batch_of,
    covered_share,
    decode_all,
    decoder_steps,
)

OPTIONS = {"beam": 3, "tokens_per_frame": 1.0}


@torch.no_grad()
def test_a_beam_of_one_is_greedy_search(examples, model, tokenizer) -> None:
    encoded = model.encode(batch_of(examples, tokenizer))
    prompts = [example.prompt for example in examples]
    prompts[1] = [2]
    arguments = model, encoded, prompts, [9, 20, 25, 30, 30, 30, 30], tokenizer.eos_id
    greedy = attention_greedy(*arguments)
    assert {result.truncated for result in greedy} == {False, True}
    assert attention_beam(*arguments, beam=1) == greedy
    assert attention_beam(*arguments, beam=1, length_penalty=1.0) == greedy


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_tokens_are_drawn_with_their_probabilities(temperature, examples, model, tokenizer):
    count, eos = 1000, tokenizer.eos_id
    encoded = model.encode(batch_of(examples[:1] * count, tokenizer))
    arguments = model, encoded, [examples[0].prompt] * count, [1] * count, eos
    drawn = attention_beam(*arguments, beam=1, temperature=temperature, seed=3)
    assert drawn == attention_beam(*arguments, beam=1, temperature=temperature, seed=3)
    assert drawn != attention_beam(*arguments, beam=1, temperature=temperature, seed=4)
    everything = range(model.vocab_size)
    first = next_token_scores(model, batch_of(examples[:1], tokenizer), 0, everything)
    assert first.exp().sum() == pytest.approx(1.0)
    state = model.start_decoding(encoded, 9, [examples[0].prompt[:-1]] * count)
    last = torch.tensor([examples[0].prompt[-1]] * count)
    expected = (model.logits(model.decode_step(last, state))[0] / temperature).softmax(-1)
    tokens = [result.tokens[0] if result.tokens else eos for result in drawn]
    seen = torch.bincount(torch.tensor(tokens), minlength=len(expected)) / count
    # Four standard deviations.
    assert ((seen - expected).abs() <= 4 * (expected / count).sqrt() + 1e-3).all()


def test_utterances_leave_when_they_are_done(examples, model, tokenizer, monkeypatch) -> None:
    rows, step = [], ASRModel.decode_step
    monkeypatch.setattr(ASRModel, "decode_step", lambda *a: rows.append(a[2].num_rows) or step(*a))
    results = decode_all(examples, model, tokenizer, beam=4)
    # No step reads the prompts, all of one length, but for their last tokens.
    assert rows[0] == 4 * len(examples)
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] == 4
    ended = [len(result.tokens) for result in results if not result.truncated]
    # A search that could not stop early would go on to the limit of every utterance.
    assert ended
    alone = len(rows)
    rows.clear()
    shortest = min(range(len(results)), key=lambda n: len(results[n].tokens))
    decode_all([examples[shortest]], model, tokenizer, beam=4)
    assert len(rows) < alone


CACHES = pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])


@pytest.fixture
def caches(paged, monkeypatch) -> None:
    new_state = Decoder.new_state
    monkeypatch.setattr(
        Decoder, "new_state", lambda *a, **b: new_state(*a, **{**b, "paged": paged})
    )


@torch.no_grad()
@CACHES
def test_watched_attention_is_that_of_a_decoder_without_caches(paged, caches, tiny, speech) -> None:
    state = tiny.start_decoding(speech, 8)
    assert isinstance(state.cross_cache, PagedCache) == paged
    tokens = [[prompt[0]] for prompt in PROMPTS]
    tiny.decode_step(torch.tensor(tokens)[:, 0], state)
    assert state.weights is None
    state.widen(2)
    state.watch()
    tokens = [list(row) for row in tokens for _ in range(2)]
    selected = list(range(len(FRAMES)))
    draw = torch.Generator().manual_seed(1)
    for step in range(4):
        new = torch.randint(0, 4, (len(tokens),), generator=draw)
        tokens = [[*row, token] for row, token in zip(tokens, new.tolist(), strict=True)]
        tiny.decode_step(new, state)
        for row, read in enumerate(tokens):
            frames = speech.unpack()[selected[row // 2]]
            weights = state.weights[row]
            if len(frames):
                expected = decoder_steps(tiny, frames, read)[1][-1]
                torch.testing.assert_close(weights[: len(frames)], expected, rtol=0, atol=1e-5)
            assert not weights[len(frames) :].any()
        parents = torch.randint(0, 2, (len(tokens),), generator=draw)
        parents += torch.arange(len(tokens)) // 2 * 2
        state.reorder(parents)
        tokens = [tokens[parent] for parent in parents.tolist()]
        if step == 1:
            going = [0, 2, 4, 6]
            state.keep(going)
            selected = [selected[index] for index in going]
            tokens = [tokens[2 * index + k] for index in going for k in range(2)]


@torch.no_grad()
@CACHES
def test_each_hypothesis_covers_what_its_tokens_attend_to(
    paged, caches, tiny, speech, monkeypatch
) -> None:
    searches, recorded = [], searched._recorded
    monkeypatch.setattr(searched, "_recorded", lambda *a: searches.append(a[0]) or recorded(*a))
    attention_beam(tiny, speech, PROMPTS, LIMITS, EOS, beam=3, coverage_penalty=2.0)
    checked, shares = 0, set()
    for search in searches:
        for n, name in enumerate(search.names.tolist()):
            for k in range(3):
                if search.scores[n, k] == -torch.inf or search.counts[n] == 0:
                    continue
                message = [label for label in search.labels[n, k].tolist() if label >= 0]
                prompt = PROMPTS[name]
                # The last label is what the last row of attention was for; it is not read yet.
                _, weights = decoder_steps(tiny, speech.unpack()[name], [*prompt, *message[:-1]])
                share = covered_share(weights[len(prompt) - 1 :])
                assert float(search.coverage.shares()[n, k]) == pytest.approx(share)
                checked += 1
                shares.add(share)
    assert checked > 30
    assert len(shares) > 5, "the test needs hypotheses that cover more and less"
    assert len({len(search.names) for search in searches}) > 1, "the test needs some that leave"


def test_without_weight_nothing_is_computed(examples, model, tokenizer, monkeypatch) -> None:
    expected = decode_all(examples, model, tokenizer, **OPTIONS)

    def fail(*_):
        raise AssertionError

    monkeypatch.setattr("effasr.nn.attention.CrossAttention.weights", fail)
    again = decode_all(examples, model, tokenizer, **OPTIONS, coverage_penalty=0.0)
    assert again == expected
    with pytest.raises(AssertionError):
        decode_all(examples, model, tokenizer, **OPTIONS, coverage_penalty=0.1)
