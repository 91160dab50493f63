"""The search, on machines whose memory and speed are known."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
import torch

from effasr import config as configuration
from effasr.data.batch import StaticShape
from effasr.data.index.corpus import Corpus
from effasr.data.sampling.bucket_table import BucketTable
from effasr.data.sampling.plan import UtteranceLengths
from effasr.data.tokenizer import load_tokenizer
from effasr.training.calibration import store, trial
from effasr.training.calibration.calibrate import (
    LinearModel,
    Search,
    Trial,
    bucket_sizes,
    describe,
    frames_per_full_wave,
    read_population,
)
from effasr.training.calibration.settings import CalibrationConfig
from effasr.training.calibration.workload import Lengths, Population, batch_of
from effasr.training.corpus import load_corpus, text_costs
from effasr.training.fault_tolerance.oom_recovery import OutOfMemory
from effasr.training.resolve import find_tokenizer, resolve_config
from tests.training.calibration.conftest import lengths

MEMORY = LinearModel(2e9, 46e4)
SPEED = LinearModel(0.02, 1e-5)


def search(population, measure, target: float, note=lambda text: None, **settings) -> Search:
    return Search(population, CalibrationConfig(**settings), int(target), 1, measure, note)


_PLANNED: dict[tuple[int, StaticShape], tuple[UtteranceLengths, list[Lengths]]] = {}


@pytest.fixture(autouse=True)
def planned_once(monkeypatch: pytest.MonkeyPatch):
    """Searches on the same corpus ask for the same plans, most of what a search takes."""
    plan = Population.planned

    def planned(self: Population, shape: StaticShape) -> list[Lengths]:
        key = id(self.lengths), shape
        if key not in _PLANNED:
            # With the lengths, so that their id stays theirs.
            _PLANNED[key] = self.lengths, plan(self, shape)
        return _PLANNED[key][1]

    monkeypatch.setattr(Population, "planned", planned)


@pytest.fixture
def endless(population):
    total = 10_000 * population.total_frames
    return dataclasses.replace(population, total_frames=total)


@pytest.mark.parametrize("target", [4e9, 16e9])
def test_the_largest_that_fits(endless, machine, target):
    measure = machine(MEMORY, SPEED, target)
    result = search(endless, measure, target, objective="memory", margin=0.05).run()
    assert result.limited_by == "memory"
    assert 0.93 * target < result.replay.measured.peak_bytes <= 0.951 * target
    assert abs(result.replay.error) < 0.01
    assert len(result.trials) <= 7
    assert result.frame_budget % 16 == 0


def test_the_smallest_that_is_nearly_the_fastest(endless, machine):
    """Speed: F / (0.02 + 1e-5 F): 98 % of the best is far below what fits."""
    measure = machine(MEMORY, SPEED, 80e9)
    result = search(endless, measure, 80e9, tolerance=0.02).run()
    assert result.limited_by == "throughput"
    largest = result.largest
    best = largest / SPEED.predict(largest)
    assert 150_000 < largest < 190_000
    chosen = result.frame_budget / SPEED.predict(result.frame_budget)
    assert 0.975 * best < chosen < 0.99 * best
    assert result.frame_budget < 0.6 * largest
    # Half the tolerance needs a larger one.
    strict = search(endless, measure, 80e9, tolerance=0.01).run()
    assert strict.frame_budget > 1.3 * result.frame_budget


@pytest.mark.parametrize(
    ("width", "multiprocessors", "expected"),
    [(1024, 132, 4224), (512, 132, 8448), (2048, 132, 4224), (256, 108, 13_824), (16, 7, 896)],
)
def test_the_frames_of_whole_waves(width, multiprocessors, expected):
    wave = frames_per_full_wave(width, multiprocessors)
    assert wave == expected
    columns = -(-width // 256)
    # Tiles of 128 x 256, and no smaller number of row tiles fills all multiprocessors.
    assert wave // 128 * columns % multiprocessors == 0
    assert all(rows * columns % multiprocessors for rows in range(1, wave // 128))


def test_whole_waves_are_preferred_among_fast_budgets(endless, machine):
    """Width 16 is one column of tiles: on 132 multiprocessors a wave is 16,896 frames."""
    measure = machine(MEMORY, SPEED, 80e9)
    usual = search(endless, measure, 80e9, tolerance=0.02).run()
    assert usual.frame_budget % 16_896
    on_gpu = search(endless, measure, 80e9, tolerance=0.02)
    on_gpu.wave = 16_896
    result = on_gpu.run()
    # The next multiple that is as fast, and its own trial rather than that of a similar budget.
    assert result.frame_budget % 16_896 == 0
    assert 0 < result.frame_budget - 0.95 * usual.frame_budget < 16_896 + 0.1 * usual.frame_budget
    assert result.replay.frames == result.frame_budget
    assert result.replay.measured.peak_bytes <= 80e9


def test_where_no_whole_wave_fits_the_budget_is_as_without(endless, machine):
    measure = machine(MEMORY, SPEED, 4e9)
    usual = search(endless, measure, 4e9).run()
    on_gpu = search(endless, measure, 4e9)
    on_gpu.wave = 16_896
    assert usual.largest < 16_896
    assert on_gpu.run().frame_budget == usual.frame_budget


def test_a_small_corpus_decides_before_both(population, machine):
    few = Population.of(lengths(600))
    result = search(few, machine(MEMORY, SPEED, 80e9), 80e9, tolerance=0.001).run()
    assert result.limited_by == "corpus"
    tenth = few.total_frames // 10
    assert tenth - 16 < result.frame_budget <= tenth


def test_trials_that_do_not_fit_are_results(endless, machine):
    """Already the second of the first trials is too large."""
    measure = machine(MEMORY, SPEED, 2.35e9)
    notes: list[str] = []
    result = search(endless, measure, 2.35e9, notes.append, objective="memory").run()
    assert not result.trials[1].measured.fits
    assert "does not fit" in describe(result.trials[1])
    assert 0.9 * 2.35e9 < result.replay.measured.peak_bytes <= 2.35e9
    assert notes == [describe(trial) for trial in result.trials]


def test_a_machine_that_is_worse_than_predicted_gets_less(endless, machine):
    """Memory grows faster than linearly: the replay at the first choice does not fit."""
    plain = machine(MEMORY, SPEED, 1e15)

    def worse(work):
        measured = plain(work)
        extra = 1.0 + (work.shape.frame_budget / 30_000) ** 2
        peak = round(measured.peak_bytes * extra)
        if peak > 16e9:
            return dataclasses.replace(measured, fits=False, peak_bytes=0)
        return dataclasses.replace(measured, peak_bytes=peak)

    result = search(endless, worse, 16e9, objective="memory").run()
    assert any(t.is_replay and not t.measured.fits for t in result.trials)
    assert result.replay.measured.fits
    assert result.replay.measured.peak_bytes <= 16e9


def test_restless_timings_come_to_an_end(endless, machine):
    measure = machine(MEMORY, LinearModel(0.0, 1e-5), 16e9, noise=1.0)
    result = search(endless, measure, 16e9).run()
    assert len(result.trials) <= 12
    assert result.replay.measured.peak_bytes <= 16e9


def test_where_not_even_one_utterance_fits(endless, machine):
    with pytest.raises(OutOfMemory, match=r"of 200 frames, as many as the longest .* has, and"):
        search(endless, machine(MEMORY, SPEED, 1e9), 1e9).run()


def test_the_bucket_table_is_within_the_budgets_and_full(population):
    shape = population.shape(4000)
    bins = BucketTable.derive(population.lengths, shape, 6)
    table = bucket_sizes(bins, shape)
    assert table.bins == bins.bins
    for (frames, tokens), size in zip(table.bins, table.batch_sizes, strict=True):
        assert frames * size <= 4000
        assert tokens * size <= shape.token_budget
        assert frames * (size + 1) > 4000 or tokens * (size + 1) > shape.token_budget
    assert table.batch_sizes[0] > 3 * table.batch_sizes[-1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CalibrationConfig(target_share=0.0), "`target_share` must be above 0"),
        (lambda: CalibrationConfig(target_bytes=0), "`target_bytes` must be at least 1"),
        (lambda: CalibrationConfig(margin=1.0), r"`margin` must lie in \[0, 1\)"),
        (lambda: frames_per_full_wave(0, 132), "`width` must be at least 1, but is 0"),
        (lambda: frames_per_full_wave(512, 0), "`multiprocessors` must be at least 1, but is 0"),
        (lambda: LinearModel.fit([], []), "`frames` must hold at least one trial"),
    ],
)
def test_error_messages(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_neither_part_is_negative():
    assert LinearModel.fit([1000, 2000], [1.0, 4.0]).fixed == 0
    falling = LinearModel.fit([1000, 2000], [1.0, 0.9])
    assert falling.per_frame == 0
    assert 0.9 < falling.fixed < 1.0
    assert LinearModel.fit([1000, 1000], [1.0, 1.0]).predict(500) == pytest.approx(0.5)


@pytest.mark.parametrize("transducer", [False, True])
@pytest.mark.parametrize("budget", [60, 200])
def test_the_shape_is_that_of_training(make_config, budget, transducer):
    config = make_config(data={"frame_budget": budget}).data
    tokenizer = load_tokenizer(config.tokenizer)
    corpus = Corpus.load(config.train, tokenizer, config, transducer=transducer)
    assert (corpus.shape.node_budget is not None) == transducer
    population = Population.of(corpus.lengths, max_sequences="auto", transducer=transducer)
    assert population.shape(budget) == corpus.shape


@pytest.mark.parametrize("budget", [None, 60, "auto"])
def test_text_batches_are_tried_as_training_has_them(make_with_text, budget, monkeypatch):
    """In this process, whose memory is not limited; all shares of both are calibrated."""
    config = resolve_config(make_with_text(data={"text_token_budget": budget}), None)
    config = replace(config, data=replace(config.data, max_sequences="auto"))
    tokenizer = find_tokenizer(config, None)
    corpus = load_corpus(config, tokenizer, None)
    population = read_population(config, tokenizer)
    work = population.workload(config.data.frame_budget, batches=1)
    assert work.text.shape == corpus.text.shape
    made_for = store.describe(config, tokenizer.vocab_size, population, torch.device("cpu"), 1)
    assert made_for["lengths"]["text"][0] == budget
    costs = text_costs(config, tokenizer)
    speech, text = (
        cost.of(part.lengths.frames, part.lengths.tokens).mean() / amount.mean() * size
        for cost, part, amount, size in zip(
            costs,
            (corpus, corpus.text),
            (corpus.lengths.frames, corpus.text.lengths.tokens),
            (corpus.shape.frame_budget, corpus.text.shape.token_budget),
            strict=True,
        )
    )
    assert (abs(speech / text - 1) < 0.02) == (budget == "auto")
    steps, timed = [], trial._timed_step
    monkeypatch.setattr(trial, "_limit", lambda device, limit: None)
    monkeypatch.setattr(
        trial, "_timed_step", lambda *given: steps.append(given[1][0]) or timed(*given)
    )
    mapping = configuration.to_mapping(config)
    measured = trial.run(trial.Request(mapping, tokenizer.vocab_size, "cpu", 1 << 32, 1, work))
    assert measured.text_seconds > 0
    assert "micro-batch of text takes" in describe(Trial(40, 40, False, measured))
    assert [batch.source is None for batch in steps] == [True] * (len(steps) - 2) + [False] * 2
    pairs = list(zip(steps[-1].frame_lengths, steps[-1].token_lengths, strict=True))
    assert pairs == work.text.extreme
    # Batches of a run and of its trials have one shape.
    expected = corpus.text.batch(np.arange(2)).tensors()
    tried = replace(steps[-1], expert=None).tensors()
    assert [x.shape for x in tried] == [x.shape for x in expected]


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
    scores = [sum(f * f for f, _ in chosen) for chosen in population.planned(work.shape)]
    assert sum(f * f for f, _ in work.extreme) > max(scores)


def test_utterances_that_training_would_drop_are_left_out():
    all_of_them = lengths(3000)
    all_of_them.tokens[5] = 900
    work = Population.of(all_of_them).workload(300, batches=1)
    assert work.shape.longest_tokens < 900
    assert max(u for _, u in work.extreme) <= work.shape.token_budget


def test_a_very_large_corpus_is_sampled_with_its_extremes():
    many = lengths(450_000)
    many.frames[77_777], many.tokens[88_887] = 444, 555
    result = Population.of(many)
    assert len(result.lengths) < 200_001
    assert (result.longest, int(result.lengths.tokens.max())) == (444, 555)
    ratio = result.lengths.tokens.sum() / result.lengths.frames.sum()
    assert ratio == pytest.approx(many.tokens.sum() / many.frames.sum(), rel=0.01)
    assert np.isfinite(ratio)
