from itertools import product

import pytest
import torch

from effasr.data.batch import StaticShape
from effasr.data.collate import Example, collate
from effasr.data.features.config import FeatureConfig
from effasr.data.prompt import Prompt
from effasr.decoding import attention_beam as searched
from effasr.decoding.attention_beam import attention_beam
from effasr.decoding.checks import check_config
from effasr.decoding.config import DecodingConfig
from effasr.decoding.decode import decode
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.decoder import Decoder, DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.transducer import TransducerConfig
from effasr.nn.cache.paged import PagedCache
from effasr_kernels import pack

EOS = 2
PROMPTS = [[0], [1, 3], [3], [0, 0, 1], [2], [1], [3]]
LIMITS = [4, 4, 3, 1, 4, 4, 2]
FRAMES = (6, 3, 7, 4, 5, 2, 0)
CACHES = pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])


@pytest.fixture(scope="module")
def tiny() -> ASRModel:
    """A vocabulary of four tokens, and attention that is sharp enough to cover frames."""
    config = ModelConfig(
        features=FeatureConfig(mel_bins=16),
        encoder=FastConformerConfig(
            width=16, layers=1, heads=2, feed_forward=16, subsampling_channels=4
        ),
        decoder=DecoderConfig(width=16, layers=2, heads=2, feed_forward=16, max_positions=16),
    )
    torch.manual_seed(3)
    model = ASRModel(config, 4).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2.0)
        model.decoder.output_bias[EOS] = 0.5
    return model


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
    found = []
    with torch.no_grad():
        for frames, prompt, limit in zip(speech.unpack(), PROMPTS, LIMITS, strict=True):
            lengths = range(limit + 1)
            every = [said for length in lengths for said in product((0, 1, 3), repeat=length)]
            found.append({said: _scored(tiny, frames, prompt, said) for said in every})
    return found


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
    kept = list(range(len(FRAMES)))
    draw = torch.Generator().manual_seed(1)
    for step in range(4):
        new = torch.randint(0, 4, (len(tokens),), generator=draw)
        tokens = [[*row, token] for row, token in zip(tokens, new.tolist(), strict=True)]
        tiny.decode_step(new, state)
        for row, read in enumerate(tokens):
            frames = speech.unpack()[kept[row // 2]]
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
            kept = [kept[index] for index in going]
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
                said = [label for label in search.labels[n, k].tolist() if label >= 0]
                prompt = PROMPTS[name]
                # The last label is what the last row of attention was for; it is not read yet.
                _, weights = _read(tiny, speech.unpack()[name], [*prompt, *said[:-1]])
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
    found = attention_beam(*arguments, **options, coverage_penalty=coverage_penalty)
    likeliest = attention_beam(*arguments, **options)
    gained = 0
    for result, plain, every in zip(found, likeliest, transcripts, strict=True):
        ranked = {
            said: (
                score / ((6 + len(said)) / 6) ** length_penalty + coverage_penalty * share,
                share,
            )
            for said, (score, share) in every.items()
        }
        best = max(rank for rank, _ in ranked.values())
        assert ranked[result.tokens][0] == pytest.approx(best, rel=1e-5)
        if coverage_penalty == 100.0:
            # Nothing else matters any more.
            assert ranked[result.tokens][1] == max(share for _, share in ranked.values())
        gained += ranked[result.tokens][1] > ranked[plain.tokens][1]
        assert ranked[result.tokens][1] >= ranked[plain.tokens][1]
    assert gained > 0, "the test needs transcripts that cover more but are less likely"


SECONDS = (0.3, 2.1, 0.7, 3.3, 0.08)


@pytest.fixture(scope="module")
def examples(tokenizer, noise) -> list[Example]:
    prompt = tokenizer.prompt(Prompt("en", "en"))
    return [
        Example(str(n), noise(seconds, seed=n), prompt, [], monotonic=False)
        for n, seconds in enumerate(SECONDS)
    ]


def _decode(examples, model, tokenizer, shape=None, **options):
    batch = collate(examples, shape, eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id)
    prompts = [example.prompt for example in examples]
    return decode(model, tokenizer, batch, prompts, DecodingConfig(tokens_per_frame=1.0, **options))


@pytest.mark.parametrize("options", [{}, {"ctc_weight": 0.3}], ids=["attention", "joint"])
def test_an_utterance_gives_the_same_tokens_in_any_company(
    options, examples, model, tokenizer
) -> None:
    options = {"beam": 3, "coverage_penalty": 30.0, **options}
    together = _decode(examples, model, tokenizer, **options)
    assert together != _decode(examples, model, tokenizer, **{**options, "coverage_penalty": None})
    assert [_decode([one], model, tokenizer, **options)[0] for one in examples] == together
    assert _decode(examples[::-1], model, tokenizer, **options) == together[::-1]
    shape = StaticShape(frame_budget=400, token_budget=80, max_sequences=8)
    assert _decode(examples, model, tokenizer, shape, **options) == together


def test_without_weight_nothing_is_computed(examples, model, tokenizer, monkeypatch) -> None:
    expected = _decode(examples, model, tokenizer, beam=3)

    def fail(*_):
        raise AssertionError

    monkeypatch.setattr("effasr.nn.attention.CrossAttention.weights", fail)
    assert _decode(examples, model, tokenizer, beam=3, coverage_penalty=0.0) == expected
    with pytest.raises(AssertionError):
        _decode(examples, model, tokenizer, beam=3, coverage_penalty=0.1)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_weights_that_cannot_be_are_refused(value) -> None:
    with pytest.raises(ValueError, match=f"`coverage_penalty` must be at least 0, but is {value}"):
        DecodingConfig(beam=2, coverage_penalty=value)


@pytest.mark.parametrize(
    ("method", "beam"), [("attention", 1), ("ctc", 1), ("ctc", 2), ("transducer", 2)]
)
def test_it_is_refused_where_it_would_change_nothing(method, beam, tiny) -> None:
    config = tiny.config
    model = ASRModel(
        ModelConfig(
            features=config.features,
            encoder=config.encoder,
            decoder=config.decoder,
            transducer=TransducerConfig(width=8, joint=8),
            ctc=True,
        ),
        4,
    )
    refused = f"`coverage_penalty` must be left out for the method {method} with a beam of {beam}"
    with pytest.raises(ValueError, match=refused):
        check_config(model, DecodingConfig(method=method, beam=beam, coverage_penalty=0.5))
