"""Averages over steps: of gradients, for the gain of AdaScale, and of weights."""

import pytest
import torch
from torch import nn

from effasr.optim.adamw import OptimizerConfig, apply_update, set_learning_rate
from effasr.optim.adascale import AdaScale, AdaScaleConfig
from effasr.optim.ema import WeightAverage
from effasr.training.step_stats import HostCopy

TRUE = torch.tensor(True)


def adascale(
    parameters=(), *, scale: float = 4.0, factor: float = 1.0, learners: int = 1, **settings
) -> AdaScale:
    return AdaScale(
        parameters, AdaScaleConfig(**settings), scale=scale, factor=factor,
        device=torch.device("cpu"), copy=HostCopy, learners=learners,
    )  # fmt: skip


def take(
    measure: AdaScale, gradients: torch.Tensor, targets: torch.Tensor, ranks: int = 1, **settings
) -> list:
    """Let it see samples with these mean gradients; return gain, progress and factor.

    Several ranks make updates of their own.
    """
    sums, total = torch.zeros(4), targets.sum()
    shares = targets[:, None] / total * gradients
    for parts, counts in zip(shares.chunk(ranks), targets.chunk(ranks), strict=True):
        measure.begin()
        measure.see_rank(parts.sum(0).norm(), counts.sum())
        sums += measure.sums
    sums[:2] = torch.stack([(shares**2).sum(1).div(targets).sum(), torch.tensor(len(targets))])
    message = {"made": TRUE, "seen": TRUE} | settings
    measure.update(sums, total, shares.sum(0).norm() if ranks == 1 else None, **message)
    return measure.reading.read()


def test_with_equal_samples_the_gain_is_the_papers():
    """Section 4 of the paper, of S samples that are a reference batch each."""
    gradients = torch.randn(4, 10, generator=torch.Generator().manual_seed(0)) + 0.8
    mean = gradients.mean(0)
    variance = (gradients**2).sum() / 3 - 4 / 3 * mean.square().sum()
    square = mean.square().sum() - variance / 4
    assert square > 0
    expected = (variance + square) / (variance / 4 + square)
    gain, progress, factor = take(adascale(), gradients, torch.full((4,), 7.0))
    assert gain == progress == pytest.approx(expected.item(), rel=1e-5)
    assert factor == pytest.approx(expected.item() ** 0.5, rel=1e-5)


@pytest.mark.parametrize(("ranks", "learners"), [(1, 1), (2, 1), (1, 3)])
def test_the_estimates_are_unbiased_for_samples_of_unlike_size(ranks, learners):
    """Noise has the variance 1 / targets; the sum of the samples then has 1 / all targets."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.tensor([1.0, 5.0, 20.0, 2.0])
    truth = torch.full((6,), 0.2)
    measure = adascale(smoothing=0.9999, learners=learners)
    for _ in range(4000):
        noise = torch.randn(4, 6, generator=generator) / targets.sqrt()[:, None]
        take(measure, truth + noise, targets, ranks)
    variance, square, *_ = measure.state_dict()["averages"]
    # A learner of three has a third of the step.
    assert variance == pytest.approx(6 / 28 / learners, rel=0.03)
    # Never negative, so a little above.
    assert square == pytest.approx(0.24, rel=0.1 * ranks)


def test_the_gain_lies_between_one_and_the_scale():
    alike = torch.ones(4, 3)
    opposed = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]]) * alike
    equal = torch.full((4,), 3.0)
    assert take(adascale(), alike, equal)[0] == pytest.approx(1.0)
    assert take(adascale(), opposed, equal)[0] == pytest.approx(4.0)
    assert take(adascale(), torch.zeros(4, 3), equal)[0] == 1.0


def test_averages_are_plain_at_first_and_then_decay():
    generator = torch.Generator().manual_seed(1)
    measure, equal = adascale(smoothing=0.5), torch.full((4,), 3.0)
    variances, expected = [], None
    for step in range(5):
        gradients = torch.randn(4, 8, generator=generator)
        take(alone := adascale(), gradients, equal)
        local = alone.state_dict()["averages"][0]
        keep = min(0.5, step / (step + 1))
        expected = local if expected is None else keep * expected + (1 - keep) * local
        take(measure, gradients, equal)
        variances.append((measure.state_dict()["averages"][0], expected))
    assert all(got == pytest.approx(want) for got, want in variances)


def test_a_step_not_made_or_not_seen_leaves_the_averages():
    measure, equal = adascale(), torch.full((4,), 3.0)
    gradients = torch.randn(4, 3, generator=torch.Generator().manual_seed(2))
    gain, progress, _ = take(measure, gradients, equal)
    no = torch.tensor(False)
    broken = torch.full((4, 3), torch.nan)
    assert take(measure, broken, equal, made=no)[:2] == [gain, progress]
    assert take(measure, broken, equal, seen=no)[:2] == [gain, progress + gain]
    # The only sample of a step has no variance.
    assert take(measure, gradients[:1], equal[:1])[0] == gain
    assert take(adascale(), gradients[:1], equal[:1])[0] == 1.0


def test_hooks_see_the_gradient_of_each_sample_and_not_their_sum():
    model = nn.Linear(3, 1)
    measure = adascale(model.parameters(), factor=2.0)
    inputs = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(3))
    expected = 0.0
    measure.begin()
    for x, targets in zip(inputs, (4, 9), strict=True):
        with measure.sample(targets):
            # A weight that is used twice has one gradient.
            loss = model(x).square().sum() + model(-x).sum()
            (2 * loss).backward()
        local = torch.autograd.grad(model(x).square().sum() + model(-x).sum(), model.parameters())
        expected += sum(g.square().sum().item() for g in local) / targets
    with measure.sample(0):
        pass
    assert measure.sums.tolist() == pytest.approx([expected, 2.0, 0.0, 0.0])
    measure.begin()
    assert not measure.sums.any()


def test_it_goes_on_exactly_from_a_saved_state():
    generator, equal = torch.Generator().manual_seed(4), torch.full((4,), 3.0)
    steps = [torch.randn(4, 3, generator=generator) for _ in range(6)]
    straight, first, second = adascale(), adascale(), adascale()
    for gradients in steps[:3]:
        for measure in (straight, first):
            measure.advance()
            take(measure, gradients, equal)
    second.load_state_dict(first.state_dict())
    assert second.progress == straight.progress
    for gradients in steps[3:]:
        assert second.advance() == straight.advance()
        assert take(second, gradients, equal) == take(straight, gradients, equal)
    second.begin_at(50)
    assert second.advance() == 50.0


def test_learners_count_the_steps_of_the_plan_and_go_on_together():
    equal = torch.full((4,), 3.0)
    both = [adascale(), adascale()]
    draw = torch.Generator().manual_seed(5)
    gains = []
    # The slow one takes every other step, and one out of order, which was counted.
    for measure, steps in zip(both, ([0, 1, 2, 3], [0, 2, 1]), strict=True):
        taken = [take(measure, torch.randn(4, 3, generator=draw), equal, step=n) for n in steps]
        gains.append([gain for gain, _, _ in taken])
        measure.advance()
    fast, slow = (measure.state_dict() for measure in both)
    assert fast["progress"] == pytest.approx(sum(gains[0]))
    assert slow["progress"] == pytest.approx(gains[1][0] + 2 * gains[1][1])
    for measure in both:
        measure.merge([fast, slow])
        averages = measure.state_dict()["averages"]
        assert averages[0] == pytest.approx((fast["averages"][0] + slow["averages"][0]) / 2)
        assert averages[3] == measure.advance() == max(fast["progress"], slow["progress"])


@pytest.mark.parametrize("fused", [True, False])
def test_a_factor_on_the_device_multiplies_the_learning_rate(fused):
    moved = []
    for lr, factor in ((0.02, torch.tensor(1.5)), (0.03, None)):
        parameter = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([parameter], lr=1.0, fused=fused)
        parameter.grad = torch.tensor([1.0, -2.0, 3.0])
        set_learning_rate(optimizer, lr, factor)
        apply_update(optimizer, TRUE)
        moved.append(parameter.detach())
    torch.testing.assert_close(*moved)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdaScaleConfig(scale=0.5), "`scale` must be at least 1 or null, but is 0.5"),
        (lambda: AdaScaleConfig(smoothing=1.0), r"`smoothing` must lie in \[0, 1\)"),
        (lambda: AdaScaleConfig(power=0), r"`power` must lie in \(0, 1\]"),
        (lambda: OptimizerConfig(adascale=AdaScaleConfig()), "`adascale.scale` must be given"),
        (lambda: WeightAverage(nn.Linear(2, 2), 1.0), "`decay` must lie between 0 and 1, but is 1"),
        (lambda: WeightAverage(nn.Linear(2, 2), 0.9, 0), "`scale` must be positive, but is 0"),
        (
            lambda: OptimizerConfig(
                adascale=AdaScaleConfig(), lr_scaling="sqrt", lr_reference_micro_batches=2
            ),
            "`lr_scaling` must be none with `adascale`",
        ),
    ],
)
def test_error_messages(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("scale", [1, 4])
def test_the_average_is_its_closed_form(scale):
    """An update on a batch of four times the reference decays as four updates."""
    model = nn.Linear(1, 1, bias=False)
    values = [3.0, 1.0, 4.0, 1.0, 5.0]
    with torch.no_grad():
        model.weight.fill_(2.0)
    average, expected = WeightAverage(model, 0.3, scale), 2.0
    for step, value in enumerate(values):
        with torch.no_grad():
            model.weight.fill_(value)
        average.update(step)
        made = scale * step
        decay = min(0.3, (1 + made) / (10 + made)) ** scale
        expected = decay * expected + (1 - decay) * value
    assert average.average["weight"].item() == pytest.approx(expected, rel=1e-6)


def test_the_weights_come_back_after_an_exchange_even_an_interrupted_one():
    model = nn.Linear(2, 2)
    average = WeightAverage(model, 0.9)
    with torch.no_grad():
        model.weight.add_(1.0)
    trained, selected = model.weight.detach().clone(), average.average["weight"].clone()

    def evaluate():
        with average.in_place():
            assert torch.equal(model.weight, selected)
            raise KeyError

    with pytest.raises(KeyError):
        evaluate()
    assert torch.equal(model.weight, trained)
    assert torch.equal(average.average["weight"], selected)
