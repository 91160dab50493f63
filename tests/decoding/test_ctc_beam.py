import math
from collections import defaultdict

import numpy as np
import pytest
import torch

from effasr.decoding.attention_beam import CTCPrefixScorer
from effasr.decoding.ctc_beam import ctc_beam
from effasr_kernels import PackedSequence, pack
from tests.decoding.cases import GIVEN, ctc_texts

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
    encoded = pack([frames])
    state = CTCPrefixScorer.begin(GIVEN, encoded, 1, 1)
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
