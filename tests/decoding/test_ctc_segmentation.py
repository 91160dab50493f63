"""Alignment of long CTC scores: the likeliest path, wrong texts, and its memory."""

import itertools
import tracemalloc

import numpy as np
import pytest

from effasr.decoding import ctc_segmentation
from effasr.decoding.ctc_segmentation import Costs, align


def highest_score(scores, tokens, words, costs):
    """Try all choices of words, and all paths of each."""
    best, parts = -np.inf, [tokens[a:b] for a, b in itertools.pairwise([*words, len(tokens)])]
    for is_chosen in itertools.product([False, True], repeat=len(parts)):
        # A state is its class, None between words; ``visited`` are where words were skipped.
        states, visited, skipped, price = [None], set(), 0, 0.0
        for chosen, part in zip(is_chosen, parts, strict=True):
            if not chosen:
                skipped += len(part)
                continue
            if skipped and len(states) > 1:
                visited.add(len(states) - 1)
            price, skipped = price + costs.of_skip(np.array(skipped)), 0
            states += [x for token in part for x in (token, 0)]
            states[-1] = None
        price += costs.of_skip(np.array(skipped))
        emitted = [
            np.maximum(scores[:, 0], -costs.frame) if x is None else scores[:, x] for x in states
        ]
        for path in itertools.product(range(len(states)), repeat=len(scores)):
            steps = list(itertools.pairwise(path))
            jumps = [(states[a], states[b]) for a, b in steps if b == a + 2]
            if (
                path[0] > 1
                or path[-1] < len(states) - 2
                or any(not 0 <= b - a <= 2 for a, b in steps)
            ):
                continue
            if visited - set(path) or any(not a or not b or a == b for a, b in jumps):
                continue
            best = max(best, sum(emitted[x][t] for t, x in enumerate(path)) - price)
    return best


@pytest.mark.parametrize("seed", range(8))
def test_the_path_is_the_likeliest_of_all(seed, monkeypatch) -> None:
    random = np.random.default_rng(seed)
    frames, count, classes = random.integers(1, 5), random.integers(1, 4), 4
    monkeypatch.setattr(ctc_segmentation, "_BLOCK", int(random.choice([2, 3, 512])))
    scores = 3 * random.standard_normal((frames, classes))
    scores -= scores.max(axis=1, keepdims=True)
    tokens = random.integers(1, classes, count).tolist()
    words = sorted({0, *random.integers(0, count, 2).tolist()})
    costs = Costs(frame=0.7, token=float(random.choice([1.0, 3.0])), skip=2.5, skipped=0.1)
    result = align(scores, tokens, words, costs)
    assert -result.cost == pytest.approx(highest_score(scores, tokens, words, costs), abs=1e-5)
    # The traced path costs as much as the search says.
    runs = itertools.groupby(result.spans, lambda span: span is None)
    skipped = sum(costs.of_skip(np.array(len(list(run)))) for is_none, run in runs if is_none)
    assert result.costs.sum() + skipped == pytest.approx(result.cost, abs=1e-4)


def long_case(words: int, seed: int = 0):
    """Words of three tokens, each in a frame after two blanks; other text and other audio."""
    random = np.random.default_rng(seed)
    spoken = random.integers(1, 60, (words, 3))
    frames = np.zeros((words, 9), dtype=np.int64)
    frames[:, 2::3] = spoken
    scores = np.full((words * 9, 60), -9.0, dtype=np.float16)
    scores[np.arange(words * 9), frames.ravel()] = 0.0
    text = [list(word) for word in spoken]
    # A passage without text, one without audio, and each tenth word wrong.
    del text[words // 3 : words // 3 + 100]
    wrong = [list(word) for word in random.integers(1, 60, (300, 3))]
    text[words // 2 : words // 2] = wrong
    for number in range(0, len(text), 10):
        text[number] = random.integers(1, 60, 3).tolist()
    return scores, text


def test_hours_are_aligned_in_bounded_memory() -> None:
    scores, text = long_case(600)
    tokens = [token for word in text for token in word]
    tracemalloc.start()
    result = align(scores, tokens, range(0, len(tokens), 3), band=1_536)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # All back pointers would take a byte for each frame and token: 13 MB.
    assert peak < 8e6
    places = {3 * n: (n + 100 * (n >= 200)) for n in range(300)}
    places |= {3 * n: n - 200 for n in range(600, len(text))}
    right = [
        result.spans[first] == (9 * at + 2, 9 * at + 3)
        for first, at in places.items()
        if first % 30
    ]
    assert np.mean(right) > 0.93
    skipped = [span is None for span in result.spans[3 * 300 : 3 * 600]]
    assert np.mean(skipped) > 0.93
