"""Runs with LAMB."""

import importlib.util

import pytest
import torch

from effasr.checkpoint import load_model, resolve
from effasr.optim.adamw import OptimizerConfig
from effasr.training.trainer import run

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("pytorch_optimizer") is None,
    reason="pytorch_optimizer is not installed",
)
LAMB = OptimizerConfig(name="lamb", lr=0.01)


@needs_library
@pytest.mark.extended
def test_an_interrupted_run_ends_as_one_that_was_left_alone(make_config, tmp_path):
    assert run(make_config(name="straight", optimizer=LAMB)) == 0
    assert run(make_config(optimizer=LAMB, training={"stop_at": 5})) == 0
    assert run(make_config(optimizer=LAMB)) == 0
    ours, theirs = (load_model(resolve(tmp_path / name)).model for name in ("run", "straight"))
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor), name


@needs_library
def test_a_run_stays_with_its_optimizer(make_config):
    assert run(make_config(optimizer=LAMB, training={"max_steps": 1})) == 0
    with pytest.raises(ValueError, match=r"`optimizer\.name` must stay 'lamb'.* is 'adamw'"):
        run(make_config(training={"max_steps": 2}))
