"""A step: the losses it weighs, the update it makes, and steps that are not finite."""

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from effasr.data.batch import StaticShape
from effasr.data.collate import collate
from effasr.distributed.failures import TrainingFailed
from effasr.distributed.process_group import DistributedContext
from effasr.model.losses import Losses
from effasr.training.config import LoopConfig
from effasr.training.fault_tolerance.nonfinite_guard import NonFiniteGuard
from effasr.training.loss import LOSSES, LossConfig, Objective
from effasr.training.run_dir.run_directory import RunDirectory, read_lines
from effasr.training.seeds import micro_batch_seed
from effasr.training.step import StepReport, train_step
from effasr.training.step_stats import HostCopy, StepCounts


def weights(model) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_the_gradient_is_that_of_the_mean_over_all_micro_batches(make_train_state, batches):
    """Against one plain backward of the summed losses, with the same seeds for dropout."""
    loss_config = LossConfig(ctc_weight=0.4, guided_weight=0.5)
    model, train_state = make_train_state(loss=loss_config)
    reference, _ = make_train_state(loss=loss_config)
    targets = sum(batch.num_targets for batch in batches[:3])
    monotonic = sum(batch.num_monotonic_targets for batch in batches[:3])
    total = torch.zeros(())
    for index, batch in enumerate(batches[:3]):
        torch.manual_seed(micro_batch_seed(0, 5, index))
        losses = reference(batch, label_smoothing=0.1, guided_sigma=0.2)
        total = total + 0.6 * losses.cross_entropy / targets
        total = total + (0.4 * losses.ctc + 0.5 * losses.guided) / monotonic
    total.backward()

    gradients = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: gradients.__setitem__(name, p.grad.clone())
        )
    report = train_step(train_state, batches[:3], 5)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-7)
    norm = torch.stack([p.grad.norm() for p in reference.parameters()]).norm()
    figures = report.read()
    assert figures["loss"] == pytest.approx(total.item(), rel=1e-5)
    assert figures["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert [figures[x] for x in ("finite", "guided_on", "splits")] == [1.0, 1.0, 0.0]


def test_the_report_counts_what_was_computed(make_train_state, batches):
    _, train_state = make_train_state()
    report = train_step(train_state, batches[:2], 0)
    counts = StepCounts.from_values(report.counts.read())
    assert counts.audio_seconds == pytest.approx(sum(b.audio_seconds for b in batches[:2]))
    assert counts.targets == sum(len(b.ids) for b in batches[:2]) * 4
    assert counts.monotonic_targets == counts.targets * 2 / 3
    assert (counts.frame_rows, counts.token_rows) == (120, 60)
    assert counts.frames == sum(b.frames.total for b in batches[:2])
    assert counts.tokens == 2 * 3 * 5
    assert [batch.ids for batch, _ in report.micro_batches] == [b.ids for b in batches[:2]]


def test_seeds_differ_by_run_step_and_micro_batch():
    seeds = {
        micro_batch_seed(seed, step, index) % 2**32
        for seed in range(3)
        for step in range(20)
        for index in range(8)
    }
    assert len(seeds) == 3 * 20 * 8


@pytest.mark.parametrize("broken", ["loss", "gradient"])
def test_what_is_not_finite_changes_nothing(make_train_state, batches, broken_batch, broken):
    model, train_state = make_train_state(training=LoopConfig(max_steps=20, ema_decay=0.9))
    train_step(train_state, batches[:2], 0)
    before = weights(model)
    selected = {name: value.clone() for name, value in train_state.average.average.items()}
    statistics = [statistic.clone() for statistic in train_state.statistics]
    if broken == "loss":
        report = train_step(train_state, [batches[2], broken_batch], 1)
        assert not report.micro_batches[1][1].isfinite().all()
    else:
        hook = next(model.parameters()).register_hook(lambda gradient: gradient * torch.nan)
        report = train_step(train_state, batches[1:3], 1)
        hook.remove()
        assert math.isfinite(report.read()["loss"])
    assert torch.equal(weights(model), before)
    assert len(statistics) == 2
    for statistic, earlier in zip(train_state.statistics, statistics, strict=True):
        assert torch.equal(statistic, earlier)
    assert not report.read()["finite"]
    train_step(train_state, batches[3:5], 2)
    assert not torch.equal(train_state.statistics[0], statistics[0])
    assert weights(model).isfinite().all()
    assert not torch.equal(weights(model), before)
    assert all(value.isfinite().all() for value in train_state.average.average.values())
    assert any(
        not torch.equal(value, selected[n]) for n, value in train_state.average.average.items()
    )


def test_the_scale_of_float16_changes_no_gradient_and_falls_where_one_is_infinite(
    make_train_state, batches
):
    norms = []
    for scale in (2.0**4, 2.0**12):
        model, state = make_train_state(training=LoopConfig(max_steps=20, precision="float16"))
        assert state.loss_scale is not None
        state.loss_scale.scale.fill_(scale)
        report = train_step(state, batches[:2], 0).read()
        norms.append(report["grad_norm"])
        assert (report["finite"], float(state.loss_scale.scale)) == (1, scale)
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)
    before = weights(model)
    state.loss_scale.scale.fill_(2.0**60)
    report = train_step(state, batches[2:4], 1).read()
    assert report["finite"] == 0
    assert math.isfinite(report["loss"])
    assert torch.equal(weights(model), before)
    assert state.loss_scale.line() == {"loss_scale": 2.0**59}


@pytest.mark.parametrize(
    ("shape", "padded"), [(StaticShape(60, 30, 4), False), (None, False), (None, True)]
)
def test_a_micro_batch_without_utterances_adds_nothing(make_train_state, batches, shape, padded):
    """It fills up a step that is short of utterances, or none of its audio could be read."""
    empty = collate([], shape, eos_id=1, pad_id=0, padded=padded)
    (model, train_state), (reference, alone) = make_train_state(), make_train_state()
    report = train_step(train_state, [batches[0], empty], 0)
    train_step(alone, [batches[0]], 0)
    assert report.read()["finite"]
    torch.testing.assert_close(weights(model), weights(reference))
    if shape is not None:
        _, nobody = make_train_state()
        figures = train_step(nobody, [empty], 0).read()
        assert [figures[name] for name in LOSSES] == [0.0] * 6


def test_the_learning_rate_and_the_clip_are_obeyed(make_train_state, batches):
    model, train_state = make_train_state(training=LoopConfig(max_steps=20, clip=1e-3))
    norms = []
    step = train_state.optimizer.step

    def watched():
        norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())
        step()

    train_state.optimizer.step = watched
    report = train_step(train_state, batches[:1], 7)
    assert norms == pytest.approx([1e-3], rel=1e-3)
    assert report.read()["grad_norm"] > 1e-2
    assert (
        train_state.optimizer.param_groups[0]["lr"]
        == report.lr
        == train_state.config.learning_rate(7)
    )


CPU = torch.device("cpu")
COUNTS = torch.tensor([5.0, 2.0])
YES, NO = torch.tensor(True), torch.tensor(False)
GATED = LossConfig(
    ctc_weight=0.3,
    transducer_weight=0.0,
    ctc_weight_before=0.5,
    guided_weight=2.0,
    guided_after_ctc=0.25,
    consistency_weight=3.0,
    consistency_after_ctc=0.5,
)


def losses(
    cross_entropy=0.0, ctc=0.0, guided=0.0, transducer=0.0, router=None, consistency=0.0
) -> Losses:
    values = cross_entropy, ctc, transducer, guided, consistency
    sums = [torch.tensor(value, requires_grad=True) for value in values]
    return Losses(*sums, per_utterance=torch.zeros(1), router=router)


def weighed(config: LossConfig, sums: Losses, counts=COUNTS) -> dict[str, torch.Tensor]:
    return Objective(config, CPU).weigh(sums, counts)


def check(parts: dict[str, torch.Tensor], expected: list[float], consistency: float = 0.0):
    assert list(parts) == list(LOSSES)
    assert [x.item() for x in parts.values()] == pytest.approx([*expected, consistency])
    assert [x.requires_grad for x in parts.values()] == [True, *[False] * 5]


def test_consistency_is_added_for_each_target_of_a_transcription():
    config = LossConfig(ctc_weight=0.0, transducer_weight=0.0, consistency_weight=0.5)
    parts = weighed(config, losses(10.0, consistency=3.0))
    check(parts, [2.0 + 0.5 * 1.5, 2.0, 0.0, 0.0, 0.0], consistency=1.5)


def test_losses_of_routers_are_added_for_each_target():
    router = torch.tensor(1.5, requires_grad=True)
    config = LossConfig(ctc_weight=0.25, transducer_weight=0.0)
    parts = weighed(config, losses(10.0, 6.0, 3.0, router=router))
    check(parts, [0.75 * 2 + 0.25 * 3 + 1.5 / 5, 2.0, 3.0, 0.0, 1.5])
    parts["loss"].backward()
    assert router.grad == pytest.approx(1 / 5)


def test_a_step_without_transcriptions_has_no_ctc_and_no_nan():
    config = LossConfig(ctc_weight=0.3, transducer_weight=0.0)
    check(weighed(config, losses(4.0), torch.tensor([2.0, 0.0])), [0.7 * 2, 2.0, 0.0, 0.0, 0.0])


def test_the_transducer_shares_with_cross_entropy_what_ctc_leaves():
    sums = losses(10.0, 6.0, 0.0, 8.0)
    for share, expected in ((0.0, 2.0), (0.5, 3.0), (1.0, 4.0)):
        parts = weighed(LossConfig(ctc_weight=0.3, transducer_weight=share), sums)
        check(parts, [0.7 * expected + 0.3 * 3, 2.0, 3.0, 4.0, 0.0])
    parts["loss"].backward()
    assert sums.transducer.grad == pytest.approx(0.7 / 2)
    # Every part of the model gets a gradient, for the processes of a group wait for it.
    assert sums.cross_entropy.grad == 0


def total(objective: Objective) -> float:
    sums = losses(1.0, 10.0, 100.0, consistency=1000.0)
    return objective.weigh(sums, torch.ones(2))["loss"].item()


def test_a_penalty_that_need_not_wait_any_more_is_on_at_once():
    ungated = Objective(replace(GATED, guided_after_ctc=None, ctc_weight_before=None), CPU)
    ungated.load_state_dict(Objective(GATED, CPU).state_dict())
    assert ungated.guided_on


def test_the_penalty_and_masks_wait_for_ctc_and_then_stay():
    objective = Objective(GATED, CPU, masks_after_ctc=0.5, blind_ctc=4.0)
    objective.observe(torch.tensor(3.0), YES)
    for value in (torch.nan, 0.0):
        # Steps that are not valid are not observed.
        objective.observe(torch.tensor(value), NO)
    assert total(objective) == pytest.approx(0.5 * 1 + 0.5 * 10)
    observed, average = 0, 3.0
    while not objective.guided_on:
        objective.observe(torch.tensor(0.5), YES)
        average = 0.98 * average + 0.02 * 0.5
        observed += 1
        assert bool(objective.guided_on) == (average < 1.0)
        assert bool(objective.masks_on) == (average < 2.0)
        resumed = Objective(GATED, CPU, masks_after_ctc=0.5, blind_ctc=4.0)
        resumed.load_state_dict(objective.state_dict())
        assert resumed.masks_on == objective.masks_on
        assert resumed.consistency_on == objective.consistency_on == objective.masks_on
    assert observed == 80
    assert total(objective) == pytest.approx(0.7 * 1 + 0.3 * 10 + 2 * 100 + 3 * 1000)
    for _ in range(200):
        objective.observe(torch.tensor(9.0), YES)
    assert objective.guided_on


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label_smoothing": 1.0}, "`label_smoothing` must lie in"),
        ({"ctc_weight": 1.5}, "`ctc_weight` must lie between 0 and 1, but is 1.5"),
        ({"guided_weight": -1.0}, "`guided_weight` must be at least 0"),
        ({"guided_sigma": 0.0}, "`guided_sigma` must be positive"),
        ({"transducer_weight": -0.1}, "`transducer_weight` must lie between 0 and 1, but is -0.1"),
        ({"ctc_weight_before": 0.5}, "needs `guided_after_ctc`"),
        ({"guided_after_ctc": 1.0, "ctc_weight": 0.0}, "needs a `ctc_weight` above 0"),
        ({"consistency_after_ctc": 1.0, "ctc_weight": 0.0}, "needs a `ctc_weight` above 0"),
        ({"ctc_weight": 0.3}, "must be numbers here: see `resolve_losses`"),
        ({"transducer_weight": 0.0}, "must be numbers here: see `resolve_losses`"),
    ],
)
def test_error_messages(settings, message):
    with pytest.raises(ValueError, match=message):
        Objective(LossConfig(**settings), CPU)


WORLD = DistributedContext(0, 1, torch.device("cpu"))


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    run.open("", 0)
    return run


def lines(directory: RunDirectory) -> list[dict]:
    return read_lines(directory.path / "skipped.jsonl")


def test_stop_names_the_one_utterance_to_blame(make_train_state, batches, broken_batch, directory):
    """Although batch norm made the losses of the whole micro-batch NaN."""
    model, train_state = make_train_state()
    report = train_step(train_state, [batches[0], broken_batch], 4)
    assert not report.micro_batches[1][1][:3].isfinite().any()
    before = [statistic.clone() for statistic in train_state.statistics]
    with pytest.raises(TrainingFailed, match=r"step 5: the loss is not finite; utterances: 9-2\."):
        NonFiniteGuard(model, nullcontext, "stop", WORLD, directory.skipped).handle([report], 1)
    assert lines(directory) == [{"step": 5, "reason": "loss", "utterances": ["9-2"]}]
    assert model.training
    assert all(map(torch.equal, train_state.statistics, before))


def reports(batches, steps, loss: float) -> list[StepReport]:
    nothing = HostCopy(torch.zeros(1))
    losses = torch.full((4,), loss)
    return [StepReport(step, 0.1, nothing, nothing, [(batches[0], losses)]) for step in steps]


def test_where_only_the_gradient_is_not_finite_all_are_named(make_train_state, batches, directory):
    guard = NonFiniteGuard(make_train_state()[0], nullcontext, "skip", WORLD, directory.skipped)
    guard.handle(reports(batches, [4, 6], loss=1.0), 2)
    names = ["0-0", "0-1", "0-2"]
    assert lines(directory) == [
        {"step": 5, "reason": "gradient", "utterances": names},
        {"step": 7, "reason": "gradient", "utterances": names},
    ]


def test_a_scale_that_was_too_large_is_no_error(make_train_state, batches, directory):
    """Unless it has long been small, or the loss itself is not finite."""
    settings = make_train_state()[0], nullcontext, "stop", WORLD, directory.skipped
    guard = NonFiniteGuard(*settings, is_scaled=True)
    guard.handle(reports(batches, range(29), loss=1.0), 29)
    assert lines(directory) == []
    for consecutive, loss, reason in ((30, 1.0, "gradient"), (1, math.nan, "loss")):
        with pytest.raises(TrainingFailed, match=f"step 7: the {reason} is not finite"):
            guard.handle(reports(batches, [6], loss=loss), consecutive)


def test_losses_that_only_training_makes_nan(make_train_state, batches, directory):
    guard = NonFiniteGuard(make_train_state()[0], nullcontext, "skip", WORLD, directory.skipped)
    (report,) = reports(batches, [0], loss=1.0)
    losses = torch.tensor([1.0, torch.inf, torch.nan, 0.0])
    guard.handle([replace(report, micro_batches=[(batches[0], losses)])], 1)
    assert lines(directory) == [{"step": 1, "reason": "loss", "utterances": ["0-1", "0-2"]}]


def test_skip_gives_up_only_after_very_many_in_a_row(make_train_state, batches, directory):
    guard = NonFiniteGuard(make_train_state()[0], nullcontext, "skip", WORLD, directory.skipped)
    guard.handle(reports(batches, range(400), loss=1.0), 99)
    with pytest.raises(TrainingFailed, match=r"step 1000: 100 steps in a row"):
        guard.handle(reports(batches, [999], loss=1.0), 100)
