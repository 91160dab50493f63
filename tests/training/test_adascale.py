"""AdaScale in a run: on two ranks, over an interruption, and until its end."""

import pytest

from effasr.checkpoint import load_model, resolve
from effasr.optim.adamw import OptimizerConfig
from effasr.optim.adascale import AdaScaleConfig
from effasr.training import trainer
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.trainer import run
from tests.training.ranks import run_ranks

ADASCALE = OptimizerConfig(adascale=AdaScaleConfig(scale=8.0))


def test_the_gain_of_two_ranks_is_that_of_a_direct_computation() -> None:
    for done in run_ranks("tests.training.scaling_workers", "gain", 60):
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout == "measured\n"


def test_a_killed_run_goes_on_exactly_and_ends_by_progress(
    make_config, tmp_path, monkeypatch
) -> None:
    assert run(make_config(name="straight", optimizer=ADASCALE)) == 0
    steps = trainer.train_step

    def killed(trainee, batches, step, **settings):
        if step == 6:
            raise KeyboardInterrupt
        return steps(trainee, batches, step, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "train_step", killed)
        with pytest.raises(KeyboardInterrupt):
            run(make_config(optimizer=ADASCALE))
    assert run(make_config(optimizer=ADASCALE)) == 0
    ours_lines, straight = (
        read_lines(tmp_path / name / "metrics.jsonl") for name in ("run", "straight")
    )
    assert [line["progress"] for line in ours_lines] == [line["progress"] for line in straight]
    last = straight[-1]
    # Steps are worth more than one each, and the end shows in the step after it.
    assert last["step"] < 12 <= straight[-2]["progress"]
    assert straight[-3]["progress"] < 12
    gains = [line["gain"] for line in straight]
    assert all(1 <= gain <= 8 for gain in gains)
    assert last["progress"] == pytest.approx(sum(gains))
    ours, theirs = (load_model(resolve(tmp_path / name)).model for name in ("run", "straight"))
    for name, tensor in theirs.state_dict().items():
        assert ours.state_dict()[name].equal(tensor), name
    # A run that is done stays so.
    assert run(make_config(optimizer=ADASCALE)) == 0
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == len(ours_lines)


def test_a_run_that_had_none_counts_its_steps(make_config, tmp_path) -> None:
    assert run(make_config(training={"max_steps": 4})) == 0
    assert run(make_config(training={"max_steps": 5}, optimizer=ADASCALE)) == 0
    (last,) = read_lines(tmp_path / "run" / "metrics.jsonl")[4:]
    assert last["progress"] == pytest.approx(4 + last["gain"])


def test_what_cannot_be_measured_is_refused(make_config) -> None:
    with pytest.raises(ValueError, match=r"`data\.micro_batches` must be at least 2 with .* is 1"):
        run(make_config(data={"micro_batches": 1}, optimizer=ADASCALE))
    wide = OptimizerConfig(lr_reference_micro_batches=8, adascale=AdaScaleConfig())
    with pytest.raises(ValueError, match=r"must be at most data\.micro_batches, 2, .* but is 8"):
        run(make_config(optimizer=wide))
