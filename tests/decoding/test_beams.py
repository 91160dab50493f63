"""Every beam search, so wide that it is exact, against all transcripts of tiny cases."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from effasr.decoding.attention_beam import CTCPrefixScorer, attention_beam
from effasr.decoding.ctc_beam import ctc_beam
from effasr.decoding.decoded import EncodedBatch, with_scores
from effasr.decoding.hypothesis import Hypothesis, NBest
from effasr.decoding.lm.boosting import BoostTree
from effasr.decoding.lm.ngram import TokenNgrams
from effasr.decoding.transducer_beam import tdt_beam, transducer_beam
from effasr.decoding.transducer_greedy import transducer_greedy
from effasr.model.transducer import TransducerConfig
from effasr_kernels import PackedSequence, pack
from tests.decoding.cases import (
    EOS,
    GIVEN,
    LIMITS,
    PROMPTS,
    all_texts,
    batch_of,
    covered_share,
    ctc_texts,
    decode_all,
    decoder_steps,
    gained,
    make_frames,
    make_head,
)

SIZE = 5
Ranks = Mapping[tuple[int, ...], float]


def assert_best_of(
    ranks: Ranks, listed: Sequence[Hypothesis], scores: Ranks | None = None, **tolerance
) -> None:
    """The list is the beginning of all transcripts in the order of their ranks."""
    expected = sorted((x for x in ranks.values() if x > -math.inf), reverse=True)[:SIZE]
    assert [item.rank for item in listed] == pytest.approx(expected, **tolerance)
    for item in listed:
        assert item.rank == pytest.approx(ranks[item.tokens], **tolerance)
        assert item.score == pytest.approx((scores or ranks)[item.tokens], **tolerance)
    assert len({item.tokens for item in listed}) == len(listed)


BIGRAMS = {
    (-1,): (-99.0, -0.2),
    (0,): (-0.5, -0.3),
    (1,): (-0.7, 0.0),
    (3,): (-0.4, -0.1),
    (EOS,): (-1.4, 0.0),
    (-1, 3): (-0.1, 0.0),
    (3, 0): (-0.2, 0.0),
    (0, EOS): (-0.05, 0.0),
    (1, 1): (-0.3, 0.0),
}


@pytest.fixture(scope="module")
def bigrams() -> TokenNgrams:
    levels = [{gram: BIGRAMS[gram] for gram in BIGRAMS if len(gram) == n} for n in (1, 2)]
    return TokenNgrams(levels, 4, EOS)


def lm_score(text: Sequence[int]) -> float:
    """Log-probability of a transcript and its end by the bigrams."""
    total = 0.0
    for before, token in pairwise((-1, *text, EOS)):
        existing = BIGRAMS.get((before, token))
        total += BIGRAMS[before,][1] + BIGRAMS[token,][0] if existing is None else existing[0]
    return total * math.log(10)


PHRASES = {(0, 1): 1.0, (0, 1, 3): 0.5, (1, 0): 0.7, (3,): 0.2, (1, 1): 0.4}


@pytest.mark.parametrize("phrases", [{}, PHRASES])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lm_weight", [0.0, 0.3, 1.5])
def test_ctc(lm_weight, seed, phrases, bigrams) -> None:
    draw = torch.Generator().manual_seed(seed)
    lengths = (4, 0, 5, 3, 1)
    encoded = pack([1.5 * torch.randn(n, 5, generator=draw) for n in lengths], rows=15)
    lm = (bigrams, lm_weight) if lm_weight else (None, 0.0)
    boost = BoostTree(phrases, 4) if phrases else None
    result = ctc_beam(GIVEN, encoded, 500, *lm, nbest=SIZE, boost=boost)
    changed = 0
    for listed, frames in zip(result, encoded.unpack(), strict=False):
        likelihoods = ctc_texts(frames)
        ranks = {
            text: score + lm_weight * lm_score(text) + gained(text, phrases)
            for text, score in likelihoods.items()
        }
        assert_best_of(ranks, listed, rel=1e-6)
        changed += listed[0].tokens != max(likelihoods, key=likelihoods.__getitem__)
        alone = ctc_beam(GIVEN, pack([frames]), 4, *lm, boost=boost)
        assert alone == ctc_beam(GIVEN, pack([frames, frames]), 4, *lm, boost=boost)[:1]
    assert changed or not (lm_weight or phrases), "the test needs a text that they change"


STATELESS = TransducerConfig(predictor="stateless", width=8, joint=7, activation="tanh")
TRANSDUCERS = {
    "lstm": TransducerConfig(predictor="lstm", width=8, layers=2, joint=7),
    "stateless": STATELESS,
    "context 3": TransducerConfig(predictor="stateless", width=8, context=3, joint=7),
    **{
        f"{predictor} {durations}": TransducerConfig(
            predictor=predictor, width=8, joint=7, durations=durations
        )
        for predictor in ("lstm", "stateless")
        for durations in ((0, 1), (0, 1, 2), (0, 1, 3))
    },
}


@pytest.mark.parametrize("kind", TRANSDUCERS)
@pytest.mark.representative(kind=["lstm", "stateless", "lstm (0, 1, 3)", "stateless (0, 1, 3)"])
@pytest.mark.parametrize("phrases", [{}, {(0, 1): 1.0, (1,): 0.3, (2, 2): 0.5}])
@torch.no_grad()
def test_transducers(kind, phrases) -> None:
    """The likelihood of a text is the sum over all paths, as the loss has it."""
    config, labels, better = TRANSDUCERS[kind], 3, 0
    search = transducer_beam if config.durations is None else tdt_beam
    texts = [text for n in range(3) for text in product(range(labels), repeat=n)]
    packed = pack([torch.tensor(text, dtype=torch.int64) for text in texts])
    for seed in range(5):
        head = make_head(config, labels, seed, blank=1.0)
        encoded = make_frames(3, 0, 1, 5, 2, seed=seed)
        boost = BoostTree(phrases, labels) if phrases else None
        result = search(head, encoded, 80, [2] * 5, SIZE, boost=boost)
        greedy = transducer_greedy(head, encoded, 100)
        assert result[1] == [Hypothesis((), 0.0, 0.0)]
        for listed, frames, plain in zip(result, encoded.unpack(), greedy, strict=True):
            if not len(frames):
                continue
            losses = head(pack([frames] * len(texts)), packed).tolist()
            pairs = zip(texts, losses, strict=True)
            ranks = {text: gained(text, phrases) - loss for text, loss in pairs}
            assert_best_of(ranks, listed, rel=1e-6)
            better += list(listed[0].tokens) != plain
    assert better > 2, "the test needs texts that greedy search does not find"


@pytest.fixture(scope="module")
def transcripts(tiny, speech) -> list[dict[tuple[int, ...], tuple[float, float, float]]]:
    """Of every transcript the log-probabilities by decoder and CTC, and the covered share."""
    result = []
    with torch.no_grad():
        for frames, prompt, limit in zip(speech.unpack(), PROMPTS, LIMITS, strict=True):
            parts = {}
            for text in all_texts(limit):
                steps, weights = decoder_steps(tiny, frames, [*prompt, *text])
                steps, weights = steps[len(prompt) - 1 :], weights[len(prompt) - 1 :]
                score = float(steps.gather(1, torch.tensor([*text, EOS])[:, None]).sum())
                parts[text] = score, ctc_loss_score(tiny, frames, text), covered_share(weights)
            result.append(parts)
    return result


def ctc_loss_score(model, frames: torch.Tensor, text: Sequence[int]) -> float:
    """Log-probability of a transcript by torch's CTC loss."""
    if not len(frames):
        return -math.inf if text else 0.0
    steps = model.ctc_logits(frames).double().log_softmax(-1)
    targets = torch.tensor([text], dtype=torch.int64).reshape(1, -1)
    sizes = [len(steps)], [len(text)]
    loss = torch.nn.functional.ctc_loss(steps[:, None], targets, *sizes, 4, reduction="none")
    return -float(loss)


@torch.no_grad()
@pytest.mark.parametrize("coverage", [0.0, 3.0, 100.0])
@pytest.mark.parametrize("lm_weight", [0.0, 0.7])
@pytest.mark.parametrize("ctc_weight", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.5])
@pytest.mark.parametrize("phrases", [{}, PHRASES])
def test_attention(
    phrases, penalty, ctc_weight, lm_weight, coverage, tiny, bigrams, speech, transcripts
) -> None:
    options = {"length_penalty": penalty, "ctc_weight": ctc_weight, "lm_weight": lm_weight}
    options |= {"lm": bigrams if lm_weight else None, "coverage_penalty": coverage}
    options["boost"] = BoostTree(phrases, 4) if phrases else None
    arguments = tiny, speech, PROMPTS, LIMITS, EOS
    result = attention_beam(*arguments, **options, beam=150, nbest=SIZE)
    narrow = attention_beam(*arguments, **options, beam=3, nbest=2)
    lost = 0.0
    for item, narrow_item, parts, limit in zip(result, narrow, transcripts, LIMITS, strict=True):
        scores, ranks = {}, {}
        for text, (of_decoder, of_ctc, share) in parts.items():
            # A text longer than the frames is impossible to CTC, whose weight may be 0.
            score = (1 - ctc_weight) * of_decoder + (ctc_weight * of_ctc if ctc_weight else 0.0)
            scores[text] = score + lm_weight * lm_score(text) + gained(text, phrases)
            ranks[text] = scores[text] / ((6 + len(text)) / 6) ** penalty + coverage * share
        assert_best_of(ranks, item.alternatives, scores, rel=1e-5)
        assert item.tokens == item.alternatives[0].tokens
        assert item.truncated == (len(item.tokens) == limit)
        for other in narrow_item.alternatives:
            assert other.rank == pytest.approx(ranks[other.tokens], rel=1e-5)
        lost += item.alternatives[0].rank - narrow_item.alternatives[0].rank
    assert len({len(item.tokens) for item in result}) > 1, "the test needs various lengths"
    assert lost > -1e-6
    if coverage:
        options["coverage_penalty"] = 0.0
        assert result != attention_beam(*arguments, **options, beam=150, nbest=SIZE)


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
    with torch.no_grad():
        encoded: PackedSequence = used.encode(batch_of(examples, tokenizer))
        prompts = [example.prompt for example in examples]
        scored = with_scores(EncodedBatch(used, method, encoded, prompts, tokenizer.eos_id), result)
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


LENGTHS = (4, 0, 5, 1, 5, 3)


def _frames(classes: int, lengths=LENGTHS, *, seed: int = 0, scale: float = 1.5) -> PackedSequence:
    draw = torch.Generator().manual_seed(seed)
    made = [scale * torch.randn(length, classes, generator=draw) for length in lengths]
    return pack(made, rows=sum(lengths) + 3)


def _prefix_beam(frames: torch.Tensor, beam: int) -> list[int]:
    """The textbook's search with a dictionary, over all tokens at each frame."""
    steps = frames.double().log_softmax(-1).numpy()
    blank = steps.shape[1] - 1
    beams: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, -np.inf)}
    for step in steps:
        grown = defaultdict(lambda: [-np.inf, -np.inf])
        for text, (of_blank, of_label) in beams.items():
            each_item = np.logaddexp(of_blank, of_label)
            grown[text][0] = np.logaddexp(grown[text][0], each_item + step[blank])
            for token in range(blank):
                if text and text[-1] == token:
                    grown[text][1] = np.logaddexp(grown[text][1], of_label + step[token])
                before = of_blank if text and text[-1] == token else each_item
                longer = grown[(*text, token)]
                longer[1] = np.logaddexp(longer[1], before + step[token])
        best = sorted(grown.items(), key=lambda item: -np.logaddexp(*item[1]))[:beam]
        beams = {text: (scores[0], scores[1]) for text, scores in best}
    return list(max(beams.items(), key=lambda item: np.logaddexp(*item[1]))[0])


@pytest.mark.parametrize("beam", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("classes", [2, 3, 9, 30])
def test_every_beam_is_that_of_a_plain_search_over_all_tokens(beam, classes) -> None:
    encoded = _frames(classes, (17, 40, 0, 3, 25), seed=classes, scale=2.0)
    result = [list(best.tokens) for (best,) in ctc_beam(GIVEN, encoded, beam)]
    assert result == [_prefix_beam(frames, beam) for frames in encoded.unpack()]


def test_prefix_scores_are_those_of_all_paths() -> None:
    """Each prefix scores as all transcripts that begin so; all are reached through parents."""
    lengths = (4, 5, 2, 0)
    encoded = _frames(4, lengths, seed=5)
    texts_of = [ctc_texts(frames) for frames in encoded.unpack()]
    each_item = [{text: math.exp(score) for text, score in texts.items()} for texts in texts_of]
    texts = [(0, 0, 1), (2, 1, 1), (1,), (0, 2, 0)]
    state = CTCPrefixScorer.begin(GIVEN, encoded, len(lengths), len(texts))
    symbols = torch.arange(3).expand(len(lengths), len(texts), 3)
    order = torch.arange(len(texts))
    for step in range(4):
        message = [text[:step] for text in texts]
        scores, ends = state.extended(symbols).exp(), state.complete().exp()
        for n, result in enumerate(each_item):
            for position, k in enumerate(order.tolist()):
                expected = result.get(message[k], 0.0)
                assert float(ends[n, position]) == pytest.approx(expected, rel=1e-6, abs=1e-12)
                for token in range(3):
                    begin = (*message[k], token)
                    expected = sum(p for t, p in result.items() if t[: len(begin)] == begin)
                    score = float(scores[n, position, token])
                    assert score == pytest.approx(expected, rel=1e-6, abs=1e-12)
        if step == 3:
            break
        # Hypotheses change places from step to step; those whose text has ended stay.
        parent = torch.tensor([2, 0, 3, 1]) if step else torch.arange(4)
        order = order[parent]
        tokens = [texts[k][step] if step < len(texts[k]) else -1 for k in order.tolist()]
        label = torch.tensor(tokens).expand(len(lengths), -1)
        state = state.advanced(parent.expand(len(lengths), -1), label)


def test_prefix_scores_of_long_and_sure_speech_are_exact() -> None:
    """Sums over many frames of very unlikely symbols must not lose the likely ones."""
    frames = torch.full((2000, 5), -60.0)
    frames[:, 4] = 0.0
    frames[1000:1003] = torch.tensor([-60.0, 0.0, -60.0, -60.0, -60.0])
    frames[1900] = torch.tensor([-60.0, -60.0, 0.0, -0.5, -60.0])
    state = CTCPrefixScorer.begin(GIVEN, pack([frames]), 1, 1)
    zero = torch.zeros(1, 1, dtype=torch.int64)
    for token in (1, 2):
        state = state.advanced(zero, zero + token)
    expected = torch.nn.functional.ctc_loss(
        frames[:, None].double().log_softmax(-1),
        torch.tensor([[1, 2]]),
        [2000],
        [2],
        blank=4,
        reduction="none",
    )
    torch.testing.assert_close(state.complete()[0], -expected, rtol=1e-6, atol=1e-7)
