from collections import Counter

import numpy as np
import pytest

from effasr.data.sampling.plan import UtteranceLengths
from effasr.data.sampling.population import even_population, mean_epoch, population


@pytest.fixture(scope="module")
def corpus():
    """Speech of two sources, and text without frames; what a share of speech holds varies."""
    random = np.random.default_rng(0)
    frames = random.integers(8, 490, 900).astype(np.int32)
    frames[600:] = 0
    tokens = np.where(frames > 0, frames // 4 + 20, 0) + random.integers(1, 200, 900)
    return UtteranceLengths(frames, tokens.astype(np.int32)), np.repeat([0, 1, 2], 300)


QUOTAS = (30_000, 14_000, 52_000)


def test_every_epoch_has_the_mean_frames_and_tokens(corpus):
    lengths, sources = corpus
    frames, tokens = mean_epoch(lengths, sources, QUOTAS)
    assert tokens == sum(QUOTAS)
    worst = 0.0
    for epoch in (0, 1, 2, 50, 10**6):
        even = even_population(lengths, sources, QUOTAS, seed=3, epoch=epoch)
        assert even.dtype == np.int32
        assert lengths.frames[even].sum() == pytest.approx(frames, rel=5e-4)
        assert lengths.tokens[even].sum() == pytest.approx(tokens, rel=5e-4)
        usual = population(sources, lengths.tokens, QUOTAS, seed=3, epoch=epoch)
        worst = max(worst, abs(lengths.frames[usual].sum() / frames - 1))
    assert worst > 5e-3


def test_nothing_is_lost_or_drawn_twice_and_shares_do_not_drift(corpus):
    """All epochs together are those of `population`, but for what is near the last border."""
    lengths, sources = corpus
    even, usual = Counter(), Counter()
    for epoch in range(12):
        even.update(even_population(lengths, sources, QUOTAS, seed=4, epoch=epoch).tolist())
        usual.update(population(sources, lengths.tokens, QUOTAS, seed=4, epoch=epoch).tolist())
        drawn = np.zeros(3)
        for index, times in even.items():
            drawn[sources[index]] += times * lengths.tokens[index]
        assert drawn == pytest.approx(np.array(QUOTAS) * (epoch + 1), abs=2_500)
    assert sum((even - usual).values()) + sum((usual - even).values()) < 130


def test_sources_without_a_quota_are_not_drawn(corpus):
    lengths, sources = corpus
    even = even_population(lengths, sources, (0, 9_000, 0), seed=1, epoch=2)
    assert set(sources[even].tolist()) == {1}
    assert not even_population(lengths, sources, (0, 0, 0), seed=1, epoch=2).size
    with pytest.raises(ValueError, match="`epoch` must be at least 0"):
        even_population(lengths, sources, QUOTAS, seed=1, epoch=-1)
