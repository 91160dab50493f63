from itertools import product

import pytest
import torch

from effasr.decoding import attention_beam as searched
from effasr.decoding.attention_beam import attention_beam
from effasr.model.asr import ASRModel
from effasr.model.decoder import Decoder
from effasr.nn.cache.paged import PagedCache
from effasr_kernels import pack
from tests.decoding.cases import decode_all, tiny_asr

EOS = 2
OPTIONS = {"beam": 3, "tokens_per_frame": 1.0}
PROMPTS = [[0], [1, 3], [3], [0, 0, 1], [2], [1], [3]]
LIMITS = [4, 4, 3, 1, 4, 4, 2]
FRAMES = (6, 3, 7, 4, 5, 2, 0)
CACHES = pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])


@pytest.fixture(scope="module")
def tiny() -> ASRModel:
    return tiny_asr(layers=2)


@pytest.fixture(scope="module")
def speech():
    draw = torch.Generator().manual_seed(0)
    return pack([3 * torch.randn(length, 16, generator=draw) for length in FRAMES])


@pytest.fixture
def caches(paged, monkeypatch) -> None:
    new_state = Decoder.new_state
    monkeypatch.setattr(
        Decoder, "new_state", lambda *a, **b: new_state(*a, **{**b, "paged": paged})
    )


def _read(model, frames, tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities after each token, and its attention: the softmax, written out."""
    seen = []
    attention = model.decoder.layers[-1].encoder_attn
    handle = attention.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    hidden, _ = model.decode(pack([torch.tensor(tokens)]), pack([frames]))
    handle.remove()
    x, _, encoded, _ = seen[0]
    weights = torch.zeros(len(tokens), len(frames), dtype=torch.float64)
    q = attention.q_proj(x).double().view(len(x), attention.heads, attention.head_dim)
    k = attention.keys_values(encoded)[0].double()
    for token, head in product(range(len(tokens)), range(attention.heads)):
        scores = (k[: len(frames), head] @ q[token, head]) / attention.head_dim**0.5
        weights[token] += (scores.exp() / scores.exp().sum()) / attention.heads
    return model.logits(hidden).double().log_softmax(-1), weights


def _share(weights: torch.Tensor) -> float:
    """Of the frames that these tokens cover."""
    return sum(float(frame) > 0.5 for frame in weights.sum(0)) / max(1, weights.shape[1])


@pytest.fixture(scope="module")
def transcripts(tiny, speech) -> list[dict[tuple[int, ...], tuple[float, float]]]:
    """Log-probability and covered share of every transcript of each utterance."""
    result = []
    with torch.no_grad():
        for frames, prompt, limit in zip(speech.unpack(), PROMPTS, LIMITS, strict=True):
            lengths = range(limit + 1)
            each_item = [
                message for length in lengths for message in product((0, 1, 3), repeat=length)
            ]
            result.append(
                {message: _scored(tiny, frames, prompt, message) for message in each_item}
            )
    return result


def _scored(model, frames, prompt, said) -> tuple[float, float]:
    steps, weights = _read(model, frames, [*prompt, *said])
    steps, weights = steps[len(prompt) - 1 :], weights[len(prompt) - 1 :]
    score = float(steps.gather(1, torch.tensor([*said, EOS])[:, None]).sum())
    return score, _share(weights)


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
                expected = _read(tiny, frames, read)[1][-1]
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
                _, weights = _read(tiny, speech.unpack()[name], [*prompt, *message[:-1]])
                share = _share(weights[len(prompt) - 1 :])
                assert float(search.coverage.shares()[n, k]) == pytest.approx(share)
                checked += 1
                shares.add(share)
    assert checked > 30
    assert len(shares) > 5, "the test needs hypotheses that cover more and less"
    assert len({len(search.names) for search in searches}) > 1, "the test needs some that leave"


@torch.no_grad()
@CACHES
@pytest.mark.parametrize("length_penalty", [0.0, 0.8])
@pytest.mark.parametrize("coverage_penalty", [3.0, 100.0])
def test_a_wide_beam_finds_the_best_of_all_transcripts(
    paged, caches, coverage_penalty, length_penalty, tiny, speech, transcripts
) -> None:
    options = {"beam": 150, "length_penalty": length_penalty}
    arguments = tiny, speech, PROMPTS, LIMITS, EOS
    matches = attention_beam(*arguments, **options, coverage_penalty=coverage_penalty)
    likeliest = attention_beam(*arguments, **options)
    gained = 0
    for result, plain, each_item in zip(matches, likeliest, transcripts, strict=True):
        ranked = {
            message: (
                score / ((6 + len(message)) / 6) ** length_penalty + coverage_penalty * share,
                share,
            )
            for message, (score, share) in each_item.items()
        }
        best = max(rank for rank, _ in ranked.values())
        assert ranked[result.tokens][0] == pytest.approx(best, rel=1e-5)
        if coverage_penalty == 100.0:
            # Nothing else matters any more.
            assert ranked[result.tokens][1] == max(share for _, share in ranked.values())
        gained += ranked[result.tokens][1] > ranked[plain.tokens][1]
        assert ranked[result.tokens][1] >= ranked[plain.tokens][1]
    assert gained > 0, "the test needs transcripts that cover more but are less likely"


def test_without_weight_nothing_is_computed(examples, model, tokenizer, monkeypatch) -> None:
    expected = decode_all(examples, model, tokenizer, **OPTIONS)

    def fail(*_):
        raise AssertionError

    monkeypatch.setattr("effasr.nn.attention.CrossAttention.weights", fail)
    again = decode_all(examples, model, tokenizer, **OPTIONS, coverage_penalty=0.0)
    assert again == expected
    with pytest.raises(AssertionError):
        decode_all(examples, model, tokenizer, **OPTIONS, coverage_penalty=0.1)
