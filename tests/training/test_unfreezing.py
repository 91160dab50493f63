"""Runs that freeze parts of the model for some steps."""

import pytest
import torch

from effasr.checkpoint import load_model
from effasr.distributed.tensor_files import read_whole
from effasr.training.config import ASYNCHRONOUS
from effasr.training.trainer import run
from tests.support.run_ranks import train_on_ranks
from tests.training.test_exactness import assert_same_end

LOOP = {"freeze": ("encoder", "ctc_head"), "freeze_steps": 5, "checkpoint_every": 1, "keep": 20}


def checkpoint(folder, step: int):
    return folder / "checkpoints" / f"step_{step:08d}"


def test_what_was_frozen_is_trained_after_its_steps(make_config, tones, tmp_path, capsys):
    data = {"validation": str(tones / "test.jsonl")}
    loop = LOOP | {"validate_every": 5, "max_steps": 8, "tensorboard": True}
    assert run(make_config(name="whole", data=data, training=loop)) == 0
    shown = capsys.readouterr().err
    assert "step 5: training.freeze ends" in shown
    assert "stopped" not in shown
    weights = {
        step: load_model(checkpoint(tmp_path / "whole", step)).model.state_dict()
        for step in (1, 5, 8)
    }
    frozen = [name for name in weights[1] if name.startswith(LOOP["freeze"])]
    assert all(torch.equal(weights[1][name], weights[5][name]) for name in frozen)
    changed = [name for name in frozen if not torch.equal(weights[5][name], weights[8][name])]
    # All but fixed buffers.
    assert len(changed) > 0.9 * len(frozen)
    counts = [
        sum(
            name.endswith("exp_avg")
            for name in read_whole(checkpoint(tmp_path / "whole", step) / "training")
        )
        for step in (4, 6)
    ]
    assert 0 < counts[0] < counts[1]
    # Stopped before, at and after that step, it ends the same.
    for stop_at in (3, 5, 6):
        assert run(make_config(data=data, training=loop | {"stop_at": stop_at})) == 0
        assert f"stopped at step {stop_at}; the same command" in capsys.readouterr().err
    assert run(make_config(data=data, training=loop)) == 0
    assert_same_end(tmp_path / "whole", tmp_path / "run", steps=8)


def test_moments_of_the_others_go_on(make_config, tmp_path):
    """Without anything to learn for the frozen part, the others train as if nothing had changed."""
    assert run(make_config(training=LOOP | {"max_steps": 6})) == 0
    before, after = (
        torch.load(checkpoint(tmp_path / "run", step) / "training.pt", weights_only=True)[
            "optimizer"
        ]
        for step in (5, 6)
    )
    steps = sorted(float(row["step"]) for row in after["state"].values())
    assert steps[0] == 1
    assert steps[-1] == 6
    assert steps.count(6) == len(before["state"])


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "local_sgd"])
def test_ranks_unfreeze_together(make_config, tmp_path, strategy):
    loop = LOOP | {"max_steps": 7, "strategy": strategy, "log_every": 1}
    train_on_ranks(make_config(training=loop))
    assert checkpoint(tmp_path / "run", 7).is_dir()
    changed = [load_model(checkpoint(tmp_path / "run", n)).model.state_dict() for n in (5, 7)]
    name = next(name for name in changed[0] if name.startswith("ctc_head"))
    assert not torch.equal(changed[0][name], changed[1][name])


def test_error_messages(make_config):
    for training, message in (
        (
            {"freeze_steps": 3},
            r"`training.freeze_steps` has no effect unless training.freeze is given",
        ),
        (
            LOOP | {"strategy": ASYNCHRONOUS[0]},
            r"`training.freeze_steps` must be null with .* adpsgd",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            run(make_config(training=training))
