"""Training that computes layers again in the backward: the same run, with less memory."""

from dataclasses import replace

import torch

from effasr.training import metrics as meters
from effasr.training.calibration import store
from effasr.training.calibration.calibrate import read_population
from effasr.training.resolve import find_tokenizer
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.trainer import run

CPU = torch.device("cpu")


def test_a_run_logs_what_it_computes_again(make_config, tmp_path, monkeypatch):
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


def test_a_calibration_is_for_as_many_layers(make_config):
    config = make_config()
    population = read_population(config, find_tokenizer(config, None))
    names = set()
    for recomputed in (False, True, 2):
        training = replace(config.training, activation_checkpointing=recomputed)
        made_for = replace(config, training=training)
        names.add(store.fingerprint(store.describe(made_for, 30, population, CPU, 10**9)))
    assert len(names) == 3
