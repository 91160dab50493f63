"""Trials of a speech language model: conversations with two budgets, and `frame_budget: auto`."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from effasr import config as configuration
from effasr.data.conversation.corpus import ConversationCorpus, split_into_clips
from effasr.distributed.process_group import DistributedContext
from effasr.training.calibration import calibrate as module
from effasr.training.calibration import trial, workload
from effasr.training.calibration.calibrate import (
    LinearModel,
    read_population,
    resolve_auto_frame_budget,
)
from effasr.training.calibration.trial import Request
from effasr.training.calibration.workload import Clips, batch_of
from effasr.training.config import TrainConfig
from effasr.training.corpus import load_corpus
from effasr.training.resolve import find_tokenizer, resolve_config
from effasr.training.trainer import run
from tests.support.known_machine import known_machine
from tests.support.talks import talks_config, write_folders

pytest.importorskip("transformers")

ALONE = DistributedContext(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_folders(tmp_path_factory.mktemp("talks"), speech=20, texts=15)


@pytest.fixture
def make(folders, tmp_path):
    def configure(budget: int | str = "auto", share: float = 0.5, **data) -> TrainConfig:
        sources = {
            "speech": {"manifests": folders["speech"], "weight": 1 - share},
            "text": {"manifests": folders["text"], "weight": share},
        }
        data = {"mix": {"sources": sources}, "frame_budget": budget, "micro_batches": 1} | data
        return resolve_config(talks_config(folders, tmp_path, data=data), None)

    return configure


def population_of(config):
    return read_population(config, find_tokenizer(config, None))


@pytest.mark.parametrize("given", [{}, {"token_budget": 250}, {"max_sequences": 9}])
@pytest.mark.parametrize("budget", [60, 200])
def test_the_shape_is_that_of_training(make, budget, given):
    config = make(budget, **given)
    corpus = load_corpus(config, find_tokenizer(config, None), None)
    assert isinstance(corpus, ConversationCorpus)
    population = population_of(make("auto", **given))
    assert population.shape(budget) == corpus.shape
    result = population.workload(budget, batches=2)
    assert result.shape == corpus.shape
    assert result.clips == Clips(corpus.longest_clip, corpus.max_clips, corpus.stack)


@pytest.mark.parametrize("share", [0.2, 0.7])
def test_planned_batches_have_the_shares_of_the_mixture(make, share):
    population = population_of(make(share=share))
    shape = population.shape(400)
    planned = [pair for lengths in population.planned(shape) for pair in lengths]
    written = sum(rows for frames, rows in planned if not frames)
    assert written / sum(rows for _, rows in planned) == pytest.approx(share, abs=0.06)
    # Both budgets are filled together.
    for used, budget in zip(np.sum(planned, axis=0), (400, shape.token_budget), strict=True):
        assert used / (budget * len(population.planned(shape))) > 0.9


@given(st.integers(0, 3000), st.integers(1, 400), st.integers(1, 8))
def test_speech_is_divided_into_few_clips(frames, longest, stack):
    clips = split_into_clips(frames, longest, stack)
    assert sum(clips) == frames
    assert all(1 <= clip <= max(longest, stack) for clip in clips)
    assert sum(-(-clip // stack) for clip in clips) == -(-frames // stack)
    assert len(clips) <= 2 * -(-frames // longest)


def test_batches_of_a_trial_have_one_shape_and_these_lengths(make):
    work = population_of(make()).workload(300, batches=2)
    assert work.clips is not None
    written = [(0, rows) for frames, rows in work.timed[0] if not frames]
    assert written
    batches = [
        batch_of(lengths, work.shape, 300, 0, work.clips)
        for lengths in (*work.timed, work.extreme, written)
    ]
    assert len({tuple(tuple(x.shape) for x in batch.tensors()) for batch in batches}) == 1
    for lengths, batch in zip((*work.timed, work.extreme, written), batches, strict=True):
        assert list(zip(batch.frame_lengths, batch.token_lengths, strict=True)) == lengths
    assert batches[-1].audio_seconds == 0
    # Every row of a written conversation predicts a token.
    assert batches[-1].num_targets == sum(batches[-1].token_lengths)


def test_a_trial_trains_on_conversations(make, monkeypatch):
    """In this process, whose memory is not limited; the weights of the folder are not read."""
    config = make()
    work = population_of(config).workload(120, batches=1)
    mapping = configuration.to_mapping(module._without_weights(config))
    mapping["model"]["language_model"]["path"] = "nowhere"
    request = Request(mapping, 259, "cpu", 1 << 32, 1, work)
    steps = []
    timed = trial._timed_step
    monkeypatch.setattr(trial, "_limit", lambda device, limit: None)
    monkeypatch.setattr(
        trial, "_timed_step", lambda *given: steps.append(given[1][0]) or timed(*given)
    )
    measured = trial.run(pickle.loads(pickle.dumps(request)))
    assert measured.fits
    assert measured.peak_bytes > 1e8
    assert measured.audio_seconds == pytest.approx(0.08 * sum(f for f, _ in work.timed[0]))
    assert len(steps) == 3


@pytest.fixture
def trials(monkeypatch):
    # Plans for a small corpus in small budgets are most of what a search takes.
    monkeypatch.setattr(workload, "_STEPS", 2)
    return known_machine(monkeypatch, LinearModel(1e8, 3e5))


def test_training_finds_both_budgets(make, trials, tmp_path, cache):
    config = make()
    assert run(config) == 0
    written = configuration.load(TrainConfig, tmp_path / "talks" / "config.yaml").data
    assert isinstance(written.frame_budget, int)
    population = population_of(config)
    assert written.token_budget == population.shape(written.frame_budget).token_budget
    assert population.longest <= written.frame_budget
    assert [path.suffixes for path in cache.iterdir()] == [[".json"]]
    count = len(trials)
    # Another run finds them; other shares need other rows for the same frames.
    tokenizer = find_tokenizer(config, None)
    assert (
        resolve_auto_frame_budget(config, tokenizer, ALONE).data.token_budget
        == written.token_budget
    )
    assert len(trials) == count
    resolve_auto_frame_budget(make(share=0.9), tokenizer, ALONE)
    assert len(trials) > count


def test_a_lack_of_memory_lowers_both_budgets(make, trials):
    config = make()
    tokenizer = find_tokenizer(config, None)
    # A corpus whose size sets no limit.
    population = replace(population_of(config), total_frames=10**8)
    result = []
    for target in (260_000_000, 180_000_000):
        selected = module.calibrate(
            replace(config, calibration=replace(config.calibration, objective="memory")),
            tokenizer.vocab_size,
            population,
            ALONE.device,
            target,
        )
        assert selected.limited_by == "memory"
        # Not all of the first trials fit, so that they do not tell every coefficient.
        assert abs(selected.prediction_error) < 0.03
        assert 0.85 * target < selected.measured_bytes <= target
        result.append((selected.frame_budget, selected.token_budget))
    (more_frames, more_rows), (frames, rows) = result
    assert more_frames > frames
    assert more_rows > rows


def test_conversations_without_speech_are_refused(make, folders):
    config = make()
    config = replace(config, data=replace(config.data, mix=None, train=folders["text"]))
    config = replace(config, data=replace(config.data, token_budget=200))
    with pytest.raises(ValueError, match=r"frame_budget.*without speech.*token_budget"):
        population_of(config)
