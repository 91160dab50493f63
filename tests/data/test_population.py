from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effasr.data.mixture import MixConfig
from effasr.data.mixture_summary import Mixture
from effasr.data.sampling.plan import UtteranceLengths
from effasr.data.sampling.population import even_population, mean_epoch, population


def corpus(counts: tuple[int, ...], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sources, out of order, and samples of so many utterances each."""
    generator = np.random.default_rng(seed)
    sources = np.repeat(np.arange(len(counts), dtype=np.uint16), counts)
    generator.shuffle(sources)
    return sources, generator.integers(8_000, 400_000, len(sources)).astype(np.int32)


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    multiples=st.lists(st.floats(0.01, 5), min_size=4, max_size=4),
    epochs=st.integers(1, 9),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_source_is_drawn_evenly_and_meets_its_quota(counts, multiples, epochs, seed) -> None:
    sources, amounts = corpus(tuple(counts))
    totals = [int(amounts[sources == s].sum()) for s in range(len(counts))]
    quotas = [max(1, int(m * t)) for m, t in zip(multiples, totals, strict=False)]
    # At least as long as an utterance, or an epoch might have to repeat one.
    quotas[0] = max(quotas[0], int(amounts[sources == 0].max()))
    drawn: Counter[int] = Counter()
    for epoch in range(epochs):
        chosen = population(sources, amounts, quotas, seed=seed, epoch=epoch)
        assert chosen.dtype == np.int32
        drawn.update(chosen.tolist())
        for source, quota in enumerate(quotas):
            members = np.flatnonzero(sources == source)
            times = [drawn[index] for index in members.tolist()]
            assert max(times) - min(times) <= 1
            seconds = sum(drawn[index] * int(amounts[index]) for index in members.tolist())
            # All that begins before the end of the stretch.
            assert 0 <= seconds - quota * (epoch + 1) < amounts[members].max()


def test_passes_and_sources_are_shuffled_differently() -> None:
    sources, amounts = corpus((100, 100))
    amounts[:] = 10
    orders = []
    for epoch in range(2):
        chosen = population(sources, amounts, (1000, 1000), seed=1, epoch=epoch)
        for source in range(2):
            members = np.flatnonzero(sources == source)
            local = chosen[sources[chosen] == source]
            assert (np.sort(local) == members).all()
            orders.append(np.searchsorted(members, local).tolist())
    assert len({tuple(order) for order in orders}) == 4


def test_an_epoch_may_have_any_number_of_hours() -> None:
    sources, amounts = corpus((400, 100))
    config = MixConfig(sources={"a": "a", "b": "b"}, temperature=0.5, epoch_hours=0.5)
    mixture = Mixture.of(config, sources, amounts)
    draw = mixture.populations(sources, amounts, seed=1)
    assert draw is not None
    summary = mixture.summary(mixture.count(sources, amounts, np.concatenate([draw(0), draw(1)])))
    assert sum(row.drawn_amount for row in summary.rows) == pytest.approx(1.0, abs=0.02)
    assert all(row.realised == pytest.approx(row.asked, abs=0.02) for row in summary.rows)


def test_an_epoch_shorter_than_an_utterance_is_not_empty() -> None:
    sources, amounts = np.array([0, 0, 1]), np.array([30, 25, 28])
    epochs = [population(sources, amounts, (9, 9), seed=1, epoch=n).tolist() for n in range(20)]
    assert all(epochs)
    # Nothing is lost, and those that begin nowhere else are drawn again.
    assert set().union(*epochs) == {0, 1, 2}
    assert {len(drawn) for drawn in epochs} == {1, 2}


def test_the_table_shows_what_was_asked_and_what_was_drawn() -> None:
    sources = np.array([0, 0, 1], dtype=np.uint16)
    amounts = np.array([16_000 * 1800, 16_000 * 1800, 16_000 * 3600], dtype=np.int32)
    config = MixConfig(sources={"read": "a", "wild": "b"}, temperature=0.0)
    mixture = Mixture.of(config, sources, amounts)
    summary = mixture.summary(mixture.count(sources, amounts, np.array([0, 1, 2, 2])))
    assert list(summary.table()) == [
        "source      hours  utterances    asked    drawn  times",
        "read         1.00           2   50.0 %   33.3 %   1.00",
        "wild         1.00           1   50.0 %   66.7 %   2.00",
    ]
    assert summary.mapping()[1] == {
        "source": "wild", "unit": "hours", "utterances": 1, "amount": 1.0, "asked": 0.5,
        "drawn_utterances": 2, "drawn_amount": 2.0, "realised": pytest.approx(2 / 3),
    }  # fmt: skip


def test_what_cannot_be_drawn_is_refused() -> None:
    sources, amounts = corpus((3,))
    with pytest.raises(ValueError, match=r"`quotas\[1\]` must be 0 for a source without utter"):
        population(sources, amounts, (1, 1), seed=0, epoch=0)
    amounts[1] = 0
    with pytest.raises(ValueError, match=r"`amounts\[1\]` must be at least 1, but is 0"):
        population(sources, amounts, (1,), seed=0, epoch=0)


@pytest.fixture(scope="module")
def uneven():
    """Speech of two sources, and text without frames; what a share of speech holds varies."""
    random = np.random.default_rng(0)
    frames = random.integers(8, 490, 900).astype(np.int32)
    frames[600:] = 0
    tokens = np.where(frames > 0, frames // 4 + 20, 0) + random.integers(1, 200, 900)
    return UtteranceLengths(frames, tokens.astype(np.int32)), np.repeat([0, 1, 2], 300)


QUOTAS = (30_000, 14_000, 52_000)


def test_every_epoch_has_the_mean_frames_and_tokens(uneven):
    lengths, sources = uneven
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


def test_nothing_is_lost_or_drawn_twice_and_shares_do_not_drift(uneven):
    """All epochs together are those of `population`, but for what is near the last border."""
    lengths, sources = uneven
    even, usual = Counter(), Counter()
    for epoch in range(12):
        even.update(even_population(lengths, sources, QUOTAS, seed=4, epoch=epoch).tolist())
        usual.update(population(sources, lengths.tokens, QUOTAS, seed=4, epoch=epoch).tolist())
        drawn = np.zeros(3)
        for index, times in even.items():
            drawn[sources[index]] += times * lengths.tokens[index]
        assert drawn == pytest.approx(np.array(QUOTAS) * (epoch + 1), abs=2_500)
    assert sum((even - usual).values()) + sum((usual - even).values()) < 130


def test_sources_without_a_quota_are_not_drawn(uneven):
    lengths, sources = uneven
    even = even_population(lengths, sources, (0, 9_000, 0), seed=1, epoch=2)
    assert set(sources[even].tolist()) == {1}
    assert not even_population(lengths, sources, (0, 0, 0), seed=1, epoch=2).size
