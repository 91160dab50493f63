import numpy as np
import pytest

from effasr.data.index.corpus import Corpus
from effasr.data.tokenizer import load_tokenizer
from effasr.training.calibration.workload import Population, batch_of, cells, together
from tests.training.calibration.conftest import MODEL, lengths


@pytest.mark.parametrize("transducer", [False, True])
@pytest.mark.parametrize("budget", [60, 200])
def test_the_shape_is_that_of_training(make_config, budget, transducer):
    config = make_config(data={"frame_budget": budget}).data
    tokenizer = load_tokenizer(config.tokenizer)
    corpus = Corpus.load(config.train, tokenizer, config, transducer=transducer)
    assert (corpus.shape.node_budget is not None) == transducer
    assert Population.of(corpus.lengths, transducer=transducer).shape(budget) == corpus.shape


def test_a_trial_of_a_transducer_stays_within_its_nodes():
    work = Population.of(lengths(), transducer=True).workload(2000, batches=3)
    budget = work.shape.node_budget
    assert budget is not None
    for chosen in (*work.timed, work.extreme):
        assert sum(f * u for f, u in chosen) <= budget
    assert sum(f * u for f, u in work.extreme) > 0.8 * budget
    assert batch_of(work.extreme, work.shape, 30, 0).node_budget == budget


def test_a_trial_has_batches_as_planned_and_the_longest_together(population):
    work = population.workload(2000, batches=3)
    assert len(work.timed) == 3
    for chosen in work.timed:
        assert 0.95 * 2000 < sum(f for f, _ in chosen) <= 2000
        assert sum(u for _, u in chosen) <= work.shape.token_budget
    assert set(work.extreme[:8]) == {(200, int(population.lengths.tokens[0]))}
    assert sum(f for f, _ in work.extreme) > 0.95 * 2000
    planned = max(cells(chosen, MODEL) for chosen in population.planned(work.shape))
    assert cells(work.extreme, MODEL) > planned


def test_the_shortest_and_more_tokens_tell_coefficients_apart(population):
    usual = population.workload(2000, batches=1)
    short = population.workload(2000, batches=1, kind="shortest")
    assert short.shape == usual.shape
    assert cells(short.extreme, MODEL) < 0.3 * cells(usual.extreme, MODEL)
    assert short.timed == [short.extreme]
    more = population.workload(2000, batches=1, tokens=2.0)
    assert more.shape.token_budget == 2 * usual.shape.token_budget


def test_a_batch_has_these_lengths(population):
    work = population.workload(800, batches=1)
    batch = batch_of(work.timed[0], work.shape, 12, 0)
    count = len(work.timed[0])
    assert list(batch.frames.lengths[:count]) == [f for f, _ in work.timed[0]]
    assert list(batch.tokens.layout.lengths[:count]) == [u for _, u in work.timed[0]]
    assert batch.frames.rows == 800
    assert batch.audio_seconds == pytest.approx(0.08 * batch.frames.total)
    assert int(batch.tokens.values.max()) < 12


def test_a_small_corpus_fills_a_large_budget():
    few = Population.of(lengths(3, longest=40))
    work = few.workload(4000, batches=2)
    assert sum(f for f, _ in work.timed[0]) > 3800
    assert sum(f for f, _ in work.extreme) > 3700


def test_utterances_that_training_would_drop_are_left_out():
    all_of_them = lengths(3000)
    all_of_them.tokens[5] = 900
    shape = Population.of(all_of_them).shape(300)
    assert shape.longest_tokens < 900
    assert max(u for _, u in together(all_of_them, shape, "longest")) <= shape.token_budget


def test_a_very_large_corpus_is_sampled_with_its_extremes():
    many = lengths(450_000)
    many.frames[77_777], many.tokens[88_887] = 444, 555
    result = Population.of(many)
    assert len(result.lengths) < 200_001
    assert (result.longest, int(result.lengths.tokens.max())) == (444, 555)
    ratio = result.lengths.tokens.sum() / result.lengths.frames.sum()
    assert ratio == pytest.approx(many.tokens.sum() / many.frames.sum(), rel=0.01)
    assert np.isfinite(ratio)
