"""Learners that train apart, in the real trainer: whole runs of several processes."""

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

from effasr import config as configuration
from effasr.checkpoint import load_model, resolve
from effasr.data.loader import Loader
from effasr.distributed.async_sgd.gossip.config import GossipConfig
from effasr.distributed.process_group import DistributedContext
from effasr.model.cost import cost_model
from effasr.optim.adamw import OptimizerConfig
from effasr.optim.adascale import AdaScaleConfig
from effasr.training import build
from effasr.training.config import TrainConfig
from effasr.training.corpus import load_corpus
from effasr.training.resolve import find_tokenizer
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.strategies.parallelism import SynchronousStrategy
from effasr.training.trainer import run
from tests.support.run_ranks import run_module

SHARED = GossipConfig(learner_size=1)


def train(config: TrainConfig, folder: Path, fates: list[dict], codes: list[int]) -> list[str]:
    """As torchrun would start them, but that the end of one does not end the others."""
    recipe, notes = folder / "recipe.yaml", folder / "notes"
    recipe.write_text(configuration.dump(config))
    notes.mkdir()
    local = [json.dumps(fate) for fate in fates]
    module, arguments = "tests.training.gossip_rank", (str(recipe), str(notes))
    ended = run_module(module, *arguments, size=len(fates), own=local)
    message = [done.stderr for done in ended]
    everything = "\n-----\n".join(text[-6000:] for text in message)
    assert [done.returncode for done in ended] == codes, everything
    return message


def noted(folder: Path, rank: int) -> list[dict]:
    return read_lines(folder / "notes" / f"{rank}.jsonl")


def check_trained_once(config: TrainConfig, folder: Path, steps: int, ranks: int):
    tokenizer = find_tokenizer(config, None)
    corpus = load_corpus(config, tokenizer, None)
    cost = cost_model(config.model, tokenizer.vocab_size)
    loader = Loader(corpus, config.data, seed=config.seed, pin_memory=False, cost=cost)
    expected = defaultdict(Counter)
    epoch, number = 0, 0
    while number < steps:
        plan = loader.plan(epoch)
        for step in range(min(plan.num_steps, steps - number)):
            for indices in plan.step(step):
                expected[number + step].update(corpus.name(i) for i in indices.tolist())
        epoch, number = epoch + 1, number + plan.num_steps
    result = defaultdict(Counter)
    for rank in range(ranks):
        for line in noted(folder, rank):
            result[line["step"]].update(line["ids"])
    assert result == expected


def test_a_slow_learner_does_less_and_a_stopped_run_goes_on_with_ddp(make_config, tones, tmp_path):
    """Two learners, of which the slow one gets the request to stop; then one process.

    Foreign programs connect to the slow one, which does not write the metrics.
    """
    loop = {"max_steps": 20, "checkpoint_every": 4, "validate_every": 4, "log_every": 2}
    apart = loop | {"strategy": "h_adpsgd", "gossip": SHARED, "threads": 1}
    data = {"micro_batches": 4, "validation": [str(tones / "test.jsonl")]}
    config = make_config(data=data, training=apart)
    fates = [{"pause_s": 0.1}, {"pause_s": 1.0, "stop_at": 3, "late_at": 1, "strangers": 3}]
    message = train(config, tmp_path, fates, [0, 0])
    assert "2 learners of 1 processes each" in message[0]
    assert not message[1]
    steps = max(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step_*"))
    assert steps < 20
    assert f"stopped at step {steps}" in message[0]
    check_trained_once(config, tmp_path, steps, 2)
    fast, slow = (noted(tmp_path, rank) for rank in range(2))
    assert len(slow) + len(fast) == 2 * steps
    # It obeys after the step that then begins, or in a validation before that, and finishes what
    # nobody else does.
    assert 3 <= len(slow) <= 5
    assert len(slow) < len(fast)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert lines[-1]["step"] == steps
    assert lines[-1]["learner_steps"] == [len(fast), len(slow)]
    assert lines[-1]["gossip_exchanges"] > 0
    counts = [line["gossip_strangers"] for line in lines]
    # The first lines may be written before all have connected.
    assert counts == sorted(counts)
    assert counts[-1] == 3
    assert lines[-1]["consensus_distance"] > 0
    assert lines[-1]["plan_steps_per_s"] > 0
    assert any(line["staleness"] is not None for line in lines)
    assert [line["step"] for line in read_lines(tmp_path / "run" / "validation.jsonl")] == [
        step for step in (4, 8, 12, 16) if step < steps
    ]
    load_model(resolve(tmp_path / "run"))
    # From here on by one process.
    assert run(make_config(data=data, training=loop)) == 0
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert lines[-1]["step"] == 20
    assert all(line["skipped"] == 0 for line in lines)
    weights = load_model(tmp_path / "run" / "checkpoints" / "step_00000020").model.state_dict()
    assert all(value.isfinite().all() for value in weights.values())


@pytest.mark.slow
@pytest.mark.extended
def test_another_rank_writes_the_files_when_that_which_did_was_killed(make_config, tones, tmp_path):
    loop = {
        "max_steps": 9, "checkpoint_every": 5, "validate_every": 5, "log_every": 3, "threads": 1,
        "strategy": "adpsgd",
    }  # fmt: skip
    data = {"micro_batches": 3, "validation": [str(tones / "test.jsonl")], "workers": 1}
    config = make_config(data=data, training=loop)
    fates = [{"kill_at": 2}, {"pause_s": 0.1}, {"pause_s": 0.1}]
    message = train(config, tmp_path, fates, [-9, 0, 0])
    check_trained_once(config, tmp_path, 9, 3)
    assert len(noted(tmp_path, 0)) == 2
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert lines[-1]["step"] == 9
    assert lines[-1]["learners_lost"] == [0]
    validated = read_lines(tmp_path / "run" / "validation.jsonl")
    assert [(line["step"], line["utterances"]) for line in validated] == [(5, 6), (9, 6)]
    load_model(tmp_path / "run" / "checkpoints" / "step_00000009")
    assert "rank 0 is lost: from step 5 on, another rank writes the files of the run" in message[1]
    assert "done: " in message[1]
    assert "done: " not in message[2]
    met = next(line for line in lines if line["step"] == 5)
    assert lines[-1]["gossip_exchanges"] > met["gossip_exchanges"], "no new neighbours"


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_run_of_all(make_config, tmp_path):
    loop = {"strategy": "adpsgd", "threads": 1, "max_steps": 500, "checkpoint_every": 500}
    config = make_config(data={"micro_batches": 2}, training=loop)
    message = train(config, tmp_path, [{}, {"nan_at": 2}], [1, 1])
    assert "failed: step" in message[0]
    assert "the loss is not finite; utterances: train-" in message[0]
    assert len(noted(tmp_path, 0)) < 900


@pytest.mark.slow
@pytest.mark.extended
def test_learners_of_two_processes(make_config, tones, tmp_path):
    loop = {
        "max_steps": 6, "checkpoint_every": 3, "log_every": 2, "threads": 1,
        "strategy": "h_adpsgd", "gossip": GossipConfig(learner_size=2),
    }  # fmt: skip
    config = make_config(data={"micro_batches": 4, "workers": 1}, training=loop)
    train(config, tmp_path, [{}, {}, {}, {"pause_s": 0.2}], [0] * 4)
    check_trained_once(config, tmp_path, 6, 4)
    made = [[line["step"] for line in noted(tmp_path, rank)] for rank in range(4)]
    assert made[0] == made[1]
    assert made[2] == made[3]
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert lines[-1]["learner_steps"] == [len(made[0]), len(made[2])]
    load_model(resolve(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.extended
def test_adascale_ends_the_run_of_all_learners(make_config, tmp_path):
    """By the progress of the fastest, with a gain that is about that of ddp."""
    adascale = OptimizerConfig(lr=1e-4, adascale=AdaScaleConfig(scale=4.0))
    loop = {"max_steps": 24, "checkpoint_every": 100, "threads": 1}
    settings = {"data": {"micro_batches": 8}, "optimizer": adascale}
    assert run(make_config(name="ddp", training=loop, **settings)) == 0
    apart = make_config(training=loop | {"strategy": "adpsgd"}, **settings)
    assert "done: " in train(apart, tmp_path, [{}, {"pause_s": 0.2}], [0, 0])[0]
    (*_, expected), (*_, last) = (
        read_lines(tmp_path / name / "metrics.jsonl") for name in ("ddp", "run")
    )
    assert last["step"] < 24 <= last["progress"]
    rates = [line["progress"] / line["step"] for line in (expected, last)]
    assert 1 < rates[1] == pytest.approx(rates[0], rel=0.15)
    assert run(apart) == 0
    assert read_lines(tmp_path / "run" / "metrics.jsonl")[-1] == last, "it goes on"


def test_error_messages(make_config):
    random = {"data": {"strategy": "random"}}
    for training, settings, message in (
        ({"strategy": "h_adpsgd"}, random, r"`data\.strategy` must be packed with .* h_adpsgd"),
        ({"strategy": "adpsgd", "gossip": GossipConfig(learner_size=2)}, {},
         r"`training\.gossip\.learner_size` must be 1 or null with training\.strategy adpsgd"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            run(make_config(training=training, **settings))


def test_processes_form_learners(make_config, monkeypatch, caplog):
    def form(size: int, learner_size: int | None):
        gossip = GossipConfig(learner_size=learner_size)
        config = make_config(training={"strategy": "h_adpsgd", "gossip": gossip})
        return build.build_strategy(config, DistributedContext(0, size, torch.device("cpu")))

    assert type(form(1, None)) is SynchronousStrategy
    assert not caplog.text
    assert type(form(4, 4)) is SynchronousStrategy
    assert "has a single learner here, of 4 processes, and trains as ddp does" in caplog.text
    with pytest.raises(ValueError, match="must divide the 4 processes, but is 3: set it"):
        form(4, 3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="but is 3, those of this node: set it"):
        form(4, None)
