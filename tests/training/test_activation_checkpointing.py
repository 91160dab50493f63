"""Training that computes layers again in the backward: the same run, with less memory."""

from dataclasses import replace

import pytest
import torch

from effasr.optim.adamw import OptimizerConfig
from effasr.training import metrics as meters
from effasr.training.calibration import store
from effasr.training.calibration.calibrate import read_population
from effasr.training.config import LoopConfig
from effasr.training.resolve import find_tokenizer
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.step import train_step
from effasr.training.trainer import run
from tests.training.shortage import shortage

CPU = torch.device("cpu")


def loop(recomputed: bool | int, **settings) -> LoopConfig:
    return LoopConfig(max_steps=20, activation_checkpointing=recomputed, **settings)


@pytest.mark.parametrize("where", ["nowhere", "forward", "backward"])
def test_weights_and_statistics_are_bitwise_the_same(make_train_state, batches, where) -> None:
    """Also where memory runs out, and micro-batches are computed in pieces."""
    states = []
    for recomputed in (False, True):
        model, train_state = make_train_state(
            training=loop(recomputed), optimizer=OptimizerConfig(lr=0.01)
        )
        for step in range(3):
            calls = [1] if step == 1 and where != "nowhere" else []
            with shortage(model, *calls, where=where):
                report = train_step(train_state, batches[2 * step : 2 * step + 2], step)
            figures = report.read()
            assert (figures["finite"], figures["splits"]) == (1, len(calls))
        states.append(model.state_dict())
    for name, tensor in states[0].items():
        assert torch.equal(states[1][name], tensor), name


def test_a_run_logs_what_it_computes_again(make_config, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(meters, "peak_flops", lambda device: 1e12)
    shares = []
    for name, recomputed in (("plain", False), ("all", True)):
        training = {"max_steps": 2, "activation_checkpointing": recomputed}
        assert run(make_config(name=name, training=training)) == 0
        lines = read_lines(tmp_path / name / "metrics.jsonl")
        shares.append([line["hfu"] / line["mfu_with_padding"] for line in lines])
    assert shares[0] == [1, 1]
    # A whole forward more would be a third.
    assert all(1.01 < share < 4 / 3 for share in shares[1])


def test_a_calibration_is_for_as_many_layers(make_config) -> None:
    config = make_config()
    population = read_population(config, find_tokenizer(config, None))
    names = set()
    for recomputed in (False, True, 2):
        training = replace(config.training, activation_checkpointing=recomputed)
        made_for = replace(config, training=training)
        names.add(store.fingerprint(store.describe(made_for, 30, population, CPU, 10**9)))
    assert len(names) == 3
