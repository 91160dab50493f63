"""A run that is killed, and goes on on another number of ranks."""

import pytest

from effasr import config as configuration
from effasr.optim.adamw import OptimizerConfig
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.trainer import run
from tests.support.run_ranks import run_module, started
from tests.training.test_faults import wait_for, wait_for_checkpoint

STEPS = 24


@pytest.mark.slow
def test_a_killed_run_goes_on_on_more_ranks_and_on_fewer(make_config, tmp_path):
    """No step is lost or made twice, whoever makes it."""
    settings = {
        # The gradient of a key's bias is rounding noise, which Adam would magnify.
        "optimizer": OptimizerConfig(eps=1e-4),
        "data": {"micro_batches": 3},
    }
    loop = {"max_steps": STEPS, "checkpoint_every": 5, "timeout_s": 30.0, "threads": 1}
    assert run(make_config(name="straight", training=loop, **settings)) == 0
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(configuration.dump(make_config(training=loop | {"stop_at": 18}, **settings)))
    with started("effasr.train", str(recipe)) as processes:
        wait_for(tmp_path / "run", 7, processes)
        # The checkpoint of step 5 is written while training goes on.
        wait_for_checkpoint(tmp_path / "run", processes)
        for process in processes:
            process.kill()
    done = run_module("effasr.train", str(recipe), size=3)
    assert [one.returncode for one in done] == [0] * 3, done
    assert "3 x cpu" in done[0].stderr
    assert "continuing from step" in done[0].stderr
    assert run(make_config(training=loop, **settings)) == 0
    ours, theirs = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("run", "straight"))
    assert [line["step"] for line in ours] == list(range(1, STEPS + 1))
    for name in ("loss", "tokens", "audio_seconds", "epoch"):
        expected = [line[name] for line in theirs]
        assert [line[name] for line in ours] == pytest.approx(expected, rel=1e-4), name
