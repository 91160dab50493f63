import traceback

import pytest
import torch

from effasr.data.batch import StaticShape
from effasr.data.collate import collate
from effasr.training.config import LoopConfig
from effasr.training.loss import LOSSES, LossConfig
from effasr.training.seeds import micro_batch_seed
from effasr.training.step import train_step
from effasr.training.step_stats import StepCounts


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


def test_dropout_depends_on_the_step_alone(make_train_state, batches):
    """Neither the state of the generator nor the steps before matter: resuming needs no history."""
    results = []
    for noise in (1, 2):
        model, train_state = make_train_state()
        torch.manual_seed(noise)
        torch.rand(noise)
        train_step(train_state, batches[:2], 3)
        results.append(weights(model))
    assert torch.equal(*results)
    model, train_state = make_train_state()
    train_step(train_state, batches[:2], 4)
    assert not torch.equal(weights(model), results[0])


def test_seeds_differ_by_run_step_and_micro_batch():
    seeds = {
        micro_batch_seed(seed, step, index) % 2**32
        for seed in range(3)
        for step in range(20)
        for index in range(8)
    }
    assert len(seeds) == 3 * 20 * 8


def test_seeds_cost_no_stack_of_calls(make_train_state, batches, monkeypatch):
    """As `torch.manual_seed` does, which formats one for each kind of device not in use."""

    def refuse(*arguments) -> list[str]:
        raise AssertionError("the stack of calls was formatted")

    _, train_state = make_train_state()
    monkeypatch.setattr(traceback, "format_stack", refuse)
    assert train_step(train_state, batches[:2], 0).read()["finite"]


def test_a_loss_that_is_not_finite_changes_nothing(make_train_state, batches, broken_batch):
    model, train_state = make_train_state(training=LoopConfig(max_steps=20, ema_decay=0.9))
    train_step(train_state, batches[:2], 0)
    before = weights(model)
    selected = {name: value.clone() for name, value in train_state.average.average.items()}
    statistics = [statistic.clone() for statistic in train_state.statistics]
    report = train_step(train_state, [batches[2], broken_batch], 1)
    assert torch.equal(weights(model), before)
    assert len(statistics) == 2
    for statistic, earlier in zip(train_state.statistics, statistics, strict=True):
        assert torch.equal(statistic, earlier)
    assert not report.read()["finite"]
    assert not report.micro_batches[1][1].isfinite().all()
    train_step(train_state, batches[3:5], 2)
    assert not torch.equal(train_state.statistics[0], statistics[0])
    assert weights(model).isfinite().all()
    assert not torch.equal(weights(model), before)
    assert all(value.isfinite().all() for value in train_state.average.average.values())
    assert any(
        not torch.equal(value, selected[n]) for n, value in train_state.average.average.items()
    )


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
        assert [figures[name] for name in LOSSES] == [0.0] * 5


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
