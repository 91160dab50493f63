"""Recipes on more ranks than they have micro-batches."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from effasr import config as configuration
from effasr.data.batch import StaticShape
from effasr.data.sampling.packing import plan_epoch, suggest_token_budget
from effasr.data.sampling.plan import UtteranceLengths
from effasr.optim.schedules import peak_learning_rate
from effasr.training.checkpointing.resume import Saved, check_resumable
from effasr.training.config import TrainConfig
from effasr.training.resolve import as_before, divide, requested
from effasr.training.run_dir.run_directory import read_lines
from tests.support.run_ranks import run_module


def corpus(longest: int) -> SimpleNamespace:
    generator = np.random.default_rng(0)
    frames = generator.integers(longest // 3, longest + 1, 4000).astype(np.int32)
    lengths = UtteranceLengths(frames, frames // 3 + 4)
    return SimpleNamespace(lengths=lengths, text=None, shape=StaticShape(10**6, 10**6, 10**4))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("recipe", sorted(configuration.recipes()))
def test_every_recipe_runs_on_any_number_of_ranks_with_the_same_batch(recipe, ranks):
    config = configuration.load(TrainConfig, recipe, [])
    if config.data.frame_budget == "auto":
        config = replace(config, data=replace(config.data, frame_budget=8000))
    before, data = corpus(config.data.known_frame_budget // 10), config.data
    divided, parts, line = divide(config, before, ranks)
    count, budget = divided.data.micro_batches, divided.data.known_frame_budget
    assert count >= ranks
    assert parts == max(1, -(-ranks // data.micro_batches))
    total = data.micro_batches * data.known_frame_budget
    assert total <= count * budget < total + count
    assert ("the batch is the same" in line) == (parts > 1)
    shape = StaticShape(budget, suggest_token_budget(before.lengths, budget), budget)
    plan = plan_epoch(before.lengths, shape=shape, micro_batches=count, seed=0, epoch=0)
    assert plan.num_steps > 0
    assert plan.padding_frames < 0.2
    lr = peak_learning_rate(config.optimizer, data.micro_batches)
    assert peak_learning_rate(divided.optimizer, count) == lr


def test_a_long_utterance_makes_the_batch_grow_and_the_line_says_so():
    config = configuration.load(TrainConfig, "small", ["optimizer.lr=1e-3"])
    divided, parts, line = divide(config, corpus(250), 8)
    assert (divided.data.micro_batches, divided.data.frame_budget, parts) == (8, 250, 8)
    assert "the batch is 4.0 times as large. optimizer.lr stays 0.001" in line
    assert line.endswith("by the square-root rule it would be 0.002")


def test_a_resumed_run_keeps_its_parts_for_the_same_request():
    config = configuration.load(TrainConfig, "small", ["optimizer.lr_reference_micro_batches=1"])
    divided, parts, _ = divide(config, corpus(50), 8)
    state = {
        "config": configuration.to_mapping(divided),
        "ranks": 8,
        "step": 3,
        "division": {"parts": parts, "requested": requested(config)},
    }
    saved = Saved(None, state)
    assert as_before(config, saved) == as_before(divided, saved) == divided
    check_resumable(saved, as_before(config, saved), 2)
    other = replace(config, data=replace(config.data, micro_batches=2))
    with pytest.raises(ValueError, match=r"`data\.micro_batches` must stay 1, .* but is 2"):
        as_before(other, saved)


def test_a_strategy_with_batches_of_its_own_needs_as_many_as_ranks():
    config = configuration.load(TrainConfig, "small", ["data.strategy=bucketed"])
    with pytest.raises(ValueError, match=r"but is 1: set data\.micro_batches=4, and"):
        divide(config, corpus(50), 4)


@pytest.mark.slow
def test_a_run_on_more_ranks_goes_on_on_one_and_on_more(make_config, tmp_path):
    recipe = tmp_path / "recipe.yaml"

    def start(name: str, steps: int, size: int) -> str:
        loop = {"max_steps": 6, "stop_at": steps, "threads": 1}
        config = make_config(name=name, data={"micro_batches": 1}, training=loop)
        recipe.write_text(configuration.dump(config))
        done = run_module("effasr.train", str(recipe), size=size)
        assert [item.returncode for item in done] == [0] * size, done
        return done[0].stderr

    for name, sizes in (("divided", (2, 1, 3)), ("idle", (1, 2, 2))):
        visible = [start(name, steps, size) for steps, size in zip((2, 4, 6), sizes, strict=True)]
        assert ("2 ranks share 1 x" in visible[0]) == (name == "divided")
        assert "places stay empty" in visible[2]
        lines = read_lines(tmp_path / name / "metrics.jsonl")
        assert [line["step"] for line in lines] == list(range(1, 7))
