"""Beams of streams against those of whole utterances, and what is final in them."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from effasr.decoding.confidence.tokens import likeliest_frames
from effasr.decoding.ctc_beam import CTCBeamStreams, Fusion, ctc_beam
from effasr.decoding.hypothesis import Hypothesis
from effasr.decoding.lm.boosting import BoostTree
from effasr.decoding.lm.ngram import TokenNgrams
from effasr.decoding.streams import BeamStreams, keep_consistent
from effasr.decoding.transducer_beam import (
    TDTBeamStreams,
    TransducerBeamStreams,
    tdt_beam,
    transducer_beam,
)
from effasr.model.transducer import Transducer, TransducerConfig
from effasr_kernels import PackedSequence, pack
from tests.decoding.cases import GIVEN, make_frames, make_head

KINDS = "ctc", "ctc_lm", "ctc_boost", "stateless", "lstm", "tdt", "stateless_boost", "tdt_boost"
BEAM, NBEST, LIMIT, LABELS = 4, 3, 40, 5
LENGTHS = 23, 1, 12, 30, 9, 2


def small_lm() -> TokenNgrams:
    """Bigrams that forbid nothing; the end is token 0."""
    draw = np.random.default_rng(0)
    item = {(n,): (float(p), -0.2) for n, p in enumerate(-draw.uniform(0.3, 1.5, LABELS))}
    pairs = [(a, b) for a in (-1, 1, 2, 3) for b in range(LABELS)]
    two = {pair: (float(-draw.uniform(0.1, 2)), 0.0) for pair in pairs}
    return TokenNgrams([item, two], LABELS, eos_id=0)


def boost_of(kind: str) -> BoostTree | None:
    phrases = {(1, 2): 1.0, (2, 3, 1): 1.5, (4,): 0.3, (0, 0): 0.5}
    return BoostTree(phrases, LABELS) if kind.endswith("_boost") else None


def head_of(kind: str, seed: int = 0, scale: float = 1.0) -> Transducer:
    config = TransducerConfig(
        predictor="lstm" if kind == "lstm" else "stateless", width=8, joint=7, activation="tanh",
        durations=(0, 1, 2, 4) if kind.startswith("tdt") else None,
    )  # fmt: skip
    return make_head(config, LABELS, seed, scale=scale, blank=1.5)


def streams_of(kind: str, slots: int, head: Transducer | None, beam: int = BEAM) -> BeamStreams:
    if head is None:
        lm = small_lm() if kind == "ctc_lm" else None
        return CTCBeamStreams(GIVEN, slots, beam, NBEST, Fusion.of(lm, 0.5, boost_of(kind)))
    made = TDTBeamStreams if kind.startswith("tdt") else TransducerBeamStreams
    return made(head, slots, beam, NBEST, lambda frames: LIMIT, boost_of(kind))


def case(kind: str, seed: int = 0) -> tuple[Transducer | None, PackedSequence]:
    if not kind.startswith("ctc"):
        return head_of(kind, seed), make_frames(*LENGTHS, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    return None, pack([2 * torch.randn(n, LABELS + 1, generator=draw) for n in LENGTHS])


@torch.no_grad()
def whole(
    kind: str,
    head: Transducer | None,
    encoded: PackedSequence,
    beam: int = BEAM,
    *,
    with_frames: bool = True,
) -> list[list[Hypothesis]]:
    if head is None:
        lm = (small_lm(), 0.5) if kind == "ctc_lm" else (None, 0.0)
        boost = boost_of(kind)
        return ctc_beam(GIVEN, encoded, beam, *lm, NBEST, boost=boost, with_frames=with_frames)
    search = tdt_beam if kind.startswith("tdt") else transducer_beam
    limits = [LIMIT] * encoded.layout.num_sequences
    boost = boost_of(kind)
    return search(head, encoded, beam, limits, NBEST, boost=boost, with_frames=with_frames)


def fed(
    search: BeamStreams, rows: Sequence[Tensor], chunk: int, seed: int | None = None
) -> Iterator[list[int]]:
    """Feed sequences to the slots, in parts of a chunk or of random sizes; yields the parts."""
    draw = np.random.default_rng(seed)
    at = [0] * len(rows)
    while any(begin < len(local) for begin, local in zip(at, rows, strict=True)):
        counts = [
            min(len(local) - begin, chunk if seed is None else int(draw.integers(0, chunk + 1)))
            for begin, local in zip(at, rows, strict=True)
        ]
        if not any(counts):
            continue
        encoded = torch.full((len(rows), chunk, rows[0].shape[1]), torch.nan, dtype=rows[0].dtype)
        for slot, count in enumerate(counts):
            encoded[slot, :count] = rows[slot][at[slot] : at[slot] + count]
            at[slot] += count
        search.step(encoded, counts)
        yield at


@pytest.mark.parametrize(("chunk", "seed"), [(1, None), (7, None), (5, 1), (40, 2)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.representative(chunk=[1, 5])
def test_a_stream_has_the_hypotheses_of_the_whole_utterance(kind, chunk, seed) -> None:
    head, encoded = case(kind)
    expected, rows = whole(kind, head, encoded), encoded.unpack()
    search = streams_of(kind, 3, head)
    # Slots are used a second time.
    for first in (0, 3):
        for slot in range(3):
            search.start(slot)
        for _ in fed(search, rows[first : first + 3], chunk, seed):
            pass
        for slot, best in enumerate(expected[first : first + 3]):
            result = search.finish(slot)
            assert result.read == LENGTHS[first + slot]
            listed = search.commit(slot, len(result.tokens), result.read)
            assert all(rest[0].score == 0 for rest in (search._complete[slot],) if rest)
            scores = [item.score for item in best]
            assert [item.score for item in listed] == pytest.approx(scores)
            # Hypotheses of nearly the same score may change places, by how products are rounded.
            clear = [n for n, score in enumerate(scores[:-1]) if score - scores[n + 1] > 1e-3]
            for end in (n + 1 for n in clear):
                assert {item.tokens for item in listed[:end]} == {
                    item.tokens for item in best[:end]
                }
            assert result.tokens == best[0].tokens if best else not result.tokens
            assert result.frames == (best[0].frames if best else ())
    assert max(len(best[0].tokens) for best in expected if best) > 4
    assert all(len(best) == NBEST for best in expected[2:5])


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_are_final_stay(kind) -> None:
    """The rest are the hypotheses that begin so, and their scores continue from the likeliest."""
    head, encoded = case(kind, seed=1)
    rows = encoded.unpack()[3:4]
    search = streams_of(kind, 1, head, beam=60)
    search.start(0)
    final: tuple[int, ...] = ()
    last = 28 if kind.startswith("tdt") else 6
    for at in fed(search, [rows[0][:last]], 7 if kind.startswith("tdt") else 3):
        if at[0] == last:
            open_ = search.transcript(0)
            assert len(open_.tokens) > 1
            final = open_.tokens[:-1]
            before = search._hypotheses(0)
            search.commit(0, len(final), 0)
    after = search._hypotheses(0)
    agree = [item for item in before if item.tokens[: len(final)] == final]
    assert 1 < len(agree) < len(before)
    assert [item.tokens for item in after] == [item.tokens[len(final) :] for item in agree]
    if kind != "ctc_lm":
        result = [item.score - after[0].score for item in after]
        assert result == pytest.approx([item.score - agree[0].score for item in agree], abs=1e-5)
    assert search.transcript(0).tokens == open_.tokens[len(final) :]


def test_a_hypothesis_that_says_more_before_the_open_frames_disagrees() -> None:
    labels = torch.tensor([[[1, 2, -1], [1, 3, 4], [1, 2, 5], [2, 1, -1]]])
    frames = torch.tensor([[[0, 4, 0], [0, 1, 5], [0, 3, 6], [0, 4, 0]]])
    agrees, labels, frames, counts = keep_consistent(
        labels, frames, torch.tensor([[2, 3, 3, 2]]), [1], 3
    )
    assert agrees.tolist() == [[True, False, True, False]]
    assert counts.tolist() == [[1, 0, 2, 0]]
    assert labels.tolist() == [[[2, -1], [-1, -1], [2, 5], [-1, -1]]]
    assert frames[0, 2].tolist() == [3, 6]


def test_a_symbol_that_lasts_across_segments_is_one_token() -> None:
    """Frames of token 1 only: what follows its segment is the same token, as without segments."""
    logits = torch.full((1, 2, 3), -9.0)
    logits[..., 1] = 9.0
    search = CTCBeamStreams(GIVEN, 1, BEAM, 1)
    search.start(0)
    assert search.step(logits, [2])[0].tokens == (1,)
    search.commit(0, 1, 2)
    assert search.step(logits, [2])[0].tokens == ()
    logits[0, 0] = torch.tensor([-9.0, -9.0, 9.0])
    again = search.step(logits, [2])[0]
    assert (again.tokens, again.frames, again.read) == ((1,), (5,), 6)


def test_ctc_says_a_token_at_its_likeliest_frame() -> None:
    """The beam has known the transcript from frame 1 on, where the token was unlikely."""
    probabilities = torch.tensor([[0.01, 0.99], [0.03, 0.97], [0.01, 0.99], [0.98, 0.02]])
    search = CTCBeamStreams(GIVEN, 1, 2, 1)
    search.start(0)
    assert search.step(probabilities[None, :3].log(), [3])[0].tokens == ()
    assert [item.frames for item in search._hypotheses(0)] == [(), (1,)]
    then = search.step(probabilities[None, 3:].log(), [1])[0]
    assert (then.tokens, then.frames) == ((0,), (3,))


@pytest.mark.parametrize("kind", ["stateless", "tdt"])
@torch.no_grad()
def test_transducers_say_labels_at_their_likeliest_frames(kind) -> None:
    compared = equal = 0
    for seed in range(2):
        head = head_of(kind, seed)
        # One path has nearly all of the probability, so that sums over paths do not decide.
        head.output.weight.mul_(20)
        encoded = make_frames(14, 20, seed=seed)
        for rows, (best, *_) in zip(encoded.unpack(), whole(kind, head, encoded), strict=True):
            labels = torch.tensor(best.tokens)
            packed = pack([labels])
            predicted = head.predictor_projection(head.predictor(packed.values, packed.layout))
            logits = head.logits(head.encoder_projection(rows)[:, None], predicted[None])
            symbols = logits[..., : LABELS + 1].log_softmax(-1)
            message = labels[None, :, None].expand(len(rows), -1, 1)
            lasting = logits[..., LABELS + 1 :].log_softmax(-1).numpy()
            expected = likeliest_frames(
                symbols[..., -1].numpy(),
                symbols[:, :-1].gather(2, message)[..., 0].numpy(),
                lasting if kind == "tdt" else None,
                head.config.durations or (),
            )
            assert list(best.frames) == sorted(best.frames)
            assert expected is not None
            assert len(best.frames) == len(labels)
            compared += len(labels)
            equal += sum(a == b for a, b in zip(best.frames, expected, strict=True))
    assert compared > 15
    # The beam adds the paths to a hypothesis before it decides which is likelier.
    assert equal > 0.8 * compared


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_stream_holds_what_is_open(kind) -> None:
    """All that is older than ten frames becomes final."""
    head, _ = case(kind)
    search = streams_of(kind, 1, head)
    search.start(0)
    rows = make_frames(300).values if head else 2 * torch.randn(300, LABELS + 1)
    sizes, told, count = [], 0, 0
    for at in fed(search, [rows], 6):
        open_ = search.transcript(0)
        assert open_.frames == tuple(sorted(open_.frames))
        since = max(0, at[0] - 10)
        count = sum(frame < since for frame in open_.frames)
        search.commit(0, count, since)
        told += count
        assert search.transcript(0).tokens == open_.tokens[count:]
        sizes.append(_numbers_held(search))
    assert told > 20
    assert max(sizes[25:]) <= 1.5 * max(sizes[5:25])
    assert math.isfinite(search._hypotheses(0)[0].score)


def _numbers_held(search: BeamStreams) -> int:
    """Elements of the tensors of a search."""
    if isinstance(search, CTCBeamStreams):
        return search._prefixes.labels.numel()
    assert isinstance(search, TransducerBeamStreams | TDTBeamStreams)
    beams = search._ahead if isinstance(search, TDTBeamStreams) else (search._beams,)
    return sum(item.labels.numel() for item in beams) + search._frames._rows[0].numel()
