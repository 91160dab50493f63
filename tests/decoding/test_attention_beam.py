import math
from itertools import pairwise, product

import pytest
import torch

from effasr.decoding.attention_beam import attention_beam
from effasr.decoding.continuous_batching.engine import attention_greedy
from effasr.decoding.decoded import Decoded
from effasr.decoding.lm.ngram import TokenNgrams
from effasr.model.asr import ASRModel
from effasr.model.decoder import Decoder
from effasr.nn.cache.paged import PagedCache
from effasr_kernels import PackedSequence, pack
from tests.decoding.cases import batch_of, decode_all, decoder_log_probs, tiny_asr


def _rank(score: float, said, penalty: float) -> float:
    return score / ((5 + len(said) + 1) / 6) ** penalty


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
@pytest.mark.parametrize("penalty", [0.0, 0.6])
def test_a_beam_finds_better_transcripts_than_greedy_search(
    penalty, examples, model, tokenizer
) -> None:
    """A beam may lose what greedy search finds, but here it does not."""
    greedy = decode_all(examples, model, tokenizer, beam=1)
    matches = {
        beam: decode_all(examples, model, tokenizer, beam=beam, length_penalty=penalty)
        for beam in (2, 4, 8)
    }
    better = 0
    for n, example in enumerate(examples):
        encoded = model.encode(batch_of([example], tokenizer))

        def rank(result: Decoded, encoded=encoded, example=example) -> float:
            text, classes = result.tokens, (tokenizer.eos_id, tokenizer.vocab_size)
            scores = decoder_log_probs(model, encoded.values, example.prompt, [text], *classes)
            return _rank(scores[text], text, penalty)

        base = rank(greedy[n])
        for results in matches.values():
            assert rank(results[n]) >= base - 1e-6
        better += rank(matches[8][n]) > base + 1e-3
    assert better > 2, "the test needs utterances that a beam improves"


EOS = 2


@pytest.fixture(scope="module")
def tiny() -> ASRModel:
    return tiny_asr()


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


def _written(said) -> float:
    """Log-probability of a transcript and its end by the bigrams."""
    total = 0.0
    for before, token in pairwise((-1, *said, EOS)):
        existing = BIGRAMS.get((before, token))
        total += BIGRAMS[before,][1] + BIGRAMS[token,][0] if existing is None else existing[0]
    return total * math.log(10)


def _heard(model, frames: torch.Tensor, said) -> float:
    """Log-probability of a transcript by torch's CTC loss."""
    steps = model.ctc_logits(frames).double().log_softmax(-1)
    loss = torch.nn.functional.ctc_loss(
        steps[:, None],
        torch.tensor([said], dtype=torch.int64).reshape(1, -1),
        [len(steps)],
        [len(said)],
        blank=4,
        reduction="none",
    )
    return -float(loss)


PROMPTS = [[0], [1, 3], [3], [0, 0, 1], [2], [1]]
LIMITS = [4, 4, 3, 1, 4, 4]


@pytest.fixture(scope="module")
def speech() -> PackedSequence:
    draw = torch.Generator().manual_seed(0)
    return pack([3 * torch.randn(length, 16, generator=draw) for length in (6, 3, 7, 4, 5, 2)])


@pytest.fixture(scope="module")
def transcripts(tiny, speech) -> list[dict[tuple[int, ...], tuple[float, float]]]:
    """Log-probabilities of every transcript of each utterance, by the decoder and by CTC."""
    result = []
    with torch.no_grad():
        for frames, prompt, limit in zip(speech.unpack(), PROMPTS, LIMITS, strict=True):
            lengths = range(limit + 1)
            each_item = [
                message for length in lengths for message in product((0, 1, 3), repeat=length)
            ]
            spoken = decoder_log_probs(tiny, frames, prompt, each_item, EOS, 4)
            result.append(
                {message: (spoken[message], _heard(tiny, frames, message)) for message in each_item}
            )
    return result


@torch.no_grad()
@pytest.mark.parametrize("lm_weight", [0.0, 0.7])
@pytest.mark.parametrize("ctc_weight", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.5])
def test_a_wide_beam_finds_the_best_of_all_transcripts(
    tiny, bigrams, speech, transcripts, penalty, ctc_weight, lm_weight
) -> None:
    matches = attention_beam(
        tiny,
        speech,
        PROMPTS,
        LIMITS,
        EOS,
        beam=150,
        length_penalty=penalty,
        ctc_weight=ctc_weight,
        lm=bigrams if lm_weight else None,
        lm_weight=lm_weight,
    )
    for result, each_item, limit in zip(matches, transcripts, LIMITS, strict=True):
        ranks = {}
        for message, (spoken, received) in each_item.items():
            # A text longer than the frames is impossible to CTC, whose weight may be 0.
            score = (1 - ctc_weight) * spoken + (ctc_weight * received if ctc_weight else 0.0)
            ranks[message] = _rank(score + lm_weight * _written(message), message, penalty)
        assert ranks[result.tokens] == pytest.approx(max(ranks.values()), rel=1e-5)
        assert result.truncated == (len(result.tokens) == limit)
    assert len({len(result.tokens) for result in matches}) > 1, "the test needs various lengths"


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


@pytest.mark.parametrize("options", [{"beam": 4}, {"beam": 3, "ctc_weight": 0.3}])
def test_pages_change_nothing(options, examples, model, tokenizer, monkeypatch) -> None:
    expected = decode_all(examples, model, tokenizer, **options)
    new_state, kinds = Decoder.new_state, []

    def paged(*arguments, **others):
        state = new_state(*arguments, **{**others, "paged": True})
        kinds.append(type(state.self_cache))
        return state

    monkeypatch.setattr(Decoder, "new_state", paged)
    assert decode_all(examples, model, tokenizer, **options) == expected
    assert kinds == [PagedCache]


def test_joint_scores_with_a_beam_of_one(examples, model, tokenizer) -> None:
    joint = decode_all(examples, model, tokenizer, beam=1, ctc_weight=0.5)
    assert joint != decode_all(examples, model, tokenizer, beam=1)
