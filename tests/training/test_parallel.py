"""Strategies of several processes: the same training, and the same files."""

import shutil

import pytest
import torch

from effasr import config as configuration
from effasr.checkpoint import load_model, resolve
from effasr.distributed.local_sgd import LocalSGDConfig
from effasr.optim.adamw import OptimizerConfig
from effasr.optim.adascale import AdaScaleConfig
from effasr.training.config import LoopConfig
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.trainer import run
from tests.training.ranks import run_ranks

WORKERS = "tests.training.parallel_workers"


def test_two_ranks_train_as_each_strategy_says() -> None:
    """All scenarios in the same two processes, which take long to begin."""
    for done in run_ranks(WORKERS, "everything", 120):
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout == "equal\nreplayed\nclose\naveraged\nleft out\n"


def train_on_two(config, folder) -> None:
    recipe = folder / "recipe.yaml"
    recipe.write_text(configuration.dump(config))
    for done in run_ranks("effasr.train", str(recipe), 60):
        assert done.returncode == 0, done.stderr[-3000:]
        assert "Warning" not in done.stderr


def weights(folder) -> dict[str, torch.Tensor]:
    return load_model(resolve(folder)).model.state_dict()


@pytest.mark.slow
def test_a_run_goes_on_with_another_strategy_on_another_number_of_ranks(
    make_config, tones, tmp_path
) -> None:
    """On one, on two with fsdp2, and on one again."""
    # The gradient of a key's bias is rounding noise, which Adam would magnify.
    settings = {
        "optimizer": OptimizerConfig(eps=1e-4),
        "data": {"validation": [str(tones / "test.jsonl")]},
    }
    loop = {"validate_every": 4}
    assert run(make_config(name="straight", training=loop, **settings)) == 0
    assert run(make_config(training=loop | {"stop_at": 3}, **settings)) == 0
    sharded = loop | {"strategy": "fsdp2", "stop_at": 9, "threads": 1}
    train_on_two(make_config(training=sharded, **settings), tmp_path)
    assert run(make_config(training=loop, **settings)) == 0
    ours, theirs = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("run", "straight"))
    assert [line["step"] for line in ours] == list(range(1, 13))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)
    assert [line["step"] for line in read_lines(tmp_path / "run" / "validation.jsonl")] == [
        4,
        8,
        12,
    ]
    expected = weights(tmp_path / "straight" / "checkpoints" / "step_00000012")
    got = weights(tmp_path / "run" / "checkpoints" / "step_00000012")
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        # Ranks have running statistics of their own batches, of which the mean is kept.
        if "running" not in name and "tracked" not in name:
            torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
def test_local_sgd_goes_on_exactly(make_config, tmp_path) -> None:
    settings = LocalSGDConfig(period=3, warmup_steps=1)
    loop = {"strategy": "local_sgd", "local_sgd": settings, "threads": 1, "max_steps": 8}
    config = make_config(training=loop)
    train_on_two(config, tmp_path)
    checkpoints = tmp_path / "run" / "checkpoints"
    expected = weights(checkpoints / "step_00000008")
    # As if the run had been killed after the checkpoint before.
    shutil.rmtree(checkpoints / "step_00000008")
    train_on_two(config, tmp_path)
    got = weights(checkpoints / "step_00000008")
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"training": {"strategy": "fsdp2", "cuda_graph": True}},
            r"`training\.cuda_graph` must be false with training\.strategy fsdp2",
        ),
        (
            {"training": {"strategy": "fsdp2"}, "optimizer": OptimizerConfig(name="lamb")},
            r"`optimizer\.name` must not be lamb with training\.strategy fsdp2",
        ),
        (
            {
                "training": {"strategy": "fsdp2"},
                "optimizer": OptimizerConfig(adascale=AdaScaleConfig(scale=2.0)),
            },
            r"`optimizer\.adascale` needs training\.strategy ddp",
        ),
        (
            {
                "training": {"strategy": "local_sgd"},
                "optimizer": OptimizerConfig(adascale=AdaScaleConfig(scale=2.0)),
            },
            r"`optimizer\.adascale` needs training\.strategy ddp",
        ),
    ],
)
def test_what_a_strategy_cannot_do_is_refused(make_config, settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        run(make_config(**settings))


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="`period` must be at least 1, but is 0"):
        LocalSGDConfig(period=0)
    with pytest.raises(ValueError, match="`warmup_steps` must be at least 0, but is -1"):
        LocalSGDConfig(warmup_steps=-1)
    assert LoopConfig().strategy == "ddp"
