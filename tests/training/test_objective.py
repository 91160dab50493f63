from dataclasses import dataclass, replace

import pytest
import torch

from effasr.training.loss import LossConfig, Objective

CPU = torch.device("cpu")


@dataclass
class Losses:
    cross_entropy: torch.Tensor
    ctc: torch.Tensor
    guided: torch.Tensor
    transducer: torch.Tensor
    router: torch.Tensor | None = None


def losses(cross_entropy: float, ctc: float, guided: float, transducer: float = 0.0) -> Losses:
    values = cross_entropy, ctc, guided, transducer
    return Losses(*(torch.tensor(value, requires_grad=True) for value in values))


def test_each_loss_is_divided_by_its_own_global_count() -> None:
    config = LossConfig(ctc_weight=0.25, transducer_weight=0.0, guided_weight=2.0)
    objective = Objective(config, CPU)
    sums = losses(10.0, 6.0, 3.0)
    parts = objective.parts(sums, torch.tensor([5.0, 2.0]))
    expected = [0.75 * 2 + 0.25 * 3 + 2 * 1.5, 2.0, 3.0, 0.0, 1.5]
    assert parts.tolist() == pytest.approx(expected)
    parts[0].backward()
    gradients = [sums.cross_entropy.grad, sums.ctc.grad, sums.guided.grad]
    assert [g.item() for g in gradients] == pytest.approx([0.75 / 5, 0.25 / 2, 2 / 2])


def test_losses_of_routers_are_added_for_each_target() -> None:
    objective = Objective(LossConfig(ctc_weight=0.25, transducer_weight=0.0), CPU)
    sums, counts = losses(10.0, 6.0, 3.0), torch.tensor([5.0, 2.0])
    without = objective.parts(sums, counts)
    sums.router = torch.tensor(1.5, requires_grad=True)
    parts = objective.parts(sums, counts)
    assert parts[0].item() == pytest.approx(without[0].item() + 1.5 / 5)
    assert torch.equal(parts[1:], without[1:])
    parts[0].backward()
    assert sums.router.grad == pytest.approx(1 / 5)


def test_a_step_without_transcriptions_has_no_ctc_and_no_nan() -> None:
    parts = Objective(LossConfig(ctc_weight=0.3, transducer_weight=0.0), CPU).parts(
        losses(4.0, 0.0, 0.0), torch.tensor([2.0, 0.0])
    )
    assert parts.tolist() == pytest.approx([0.7 * 2, 2.0, 0.0, 0.0, 0.0])


GATED = LossConfig(
    ctc_weight=0.3,
    transducer_weight=0.0,
    ctc_weight_before=0.5,
    guided_weight=2.0,
    guided_after_ctc=1.0,
)


def total(objective: Objective) -> float:
    parts = objective.parts(losses(1.0, 10.0, 100.0), torch.ones(2))
    return parts[0].item()


def test_the_penalty_waits_for_ctc_and_then_stays() -> None:
    objective, yes = Objective(GATED, CPU), torch.tensor(True)
    objective.observe(torch.tensor(3.0), yes)
    assert total(objective) == pytest.approx(0.5 * 1 + 0.5 * 10)
    averages, average = 0, 3.0
    while not objective.is_guided:
        objective.observe(torch.tensor(0.5), yes)
        average = 0.98 * average + 0.02 * 0.5
        averages += 1
        assert bool(objective.is_guided) == (average < 1.0)
    assert averages == 80
    assert total(objective) == pytest.approx(0.7 * 1 + 0.3 * 10 + 2 * 100)
    for _ in range(200):
        objective.observe(torch.tensor(9.0), yes)
    assert objective.is_guided


def test_steps_that_are_not_valid_are_not_observed() -> None:
    objective = Objective(GATED, CPU)
    objective.observe(torch.tensor(3.0), torch.tensor(True))
    for value in (torch.nan, 0.0):
        objective.observe(torch.tensor(value), torch.tensor(False))
    assert objective.state_dict()["average"].item() == 3.0


def test_the_gate_continues_from_its_state() -> None:
    first, second = Objective(GATED, CPU), Objective(GATED, CPU)
    for objective in (first, second):
        objective.observe(torch.tensor(1.01), torch.tensor(True))
    resumed = Objective(GATED, CPU)
    resumed.load_state_dict(first.state_dict())
    for objective in (second, resumed):
        objective.observe(torch.tensor(0.4), torch.tensor(True))
    assert bool(resumed.is_guided) == bool(second.is_guided) is True
    assert torch.equal(resumed.state_dict()["average"], second.state_dict()["average"])


def test_a_penalty_that_need_not_wait_any_more_is_on_at_once() -> None:
    waiting = Objective(GATED, CPU)
    settings = {"guided_after_ctc": None, "ctc_weight_before": None}
    resumed = Objective(replace(GATED, **settings), CPU)
    resumed.load_state_dict(waiting.state_dict())
    assert resumed.is_guided


def test_an_open_weight_must_be_resolved_before() -> None:
    for config in (LossConfig(ctc_weight=0.3), LossConfig(transducer_weight=0.0)):
        with pytest.raises(ValueError, match="must be numbers here: see `resolve_losses`"):
            Objective(config, CPU)


def test_the_transducer_shares_with_cross_entropy_what_ctc_leaves() -> None:
    sums = losses(10.0, 6.0, 0.0, 8.0)
    counts = torch.tensor([5.0, 2.0])
    for share, expected in ((0.0, 2.0), (0.5, 3.0), (1.0, 4.0)):
        config = LossConfig(ctc_weight=0.3, transducer_weight=share)
        parts = Objective(config, CPU).parts(sums, counts)
        assert parts.tolist() == pytest.approx([0.7 * expected + 0.3 * 3, 2.0, 3.0, 4.0, 0.0])
    parts[0].backward()
    assert sums.transducer.grad == pytest.approx(0.7 / 2)
    # Every part of the model gets a gradient, for the processes of a group wait for it.
    assert sums.cross_entropy.grad == 0


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
    ],
)
def test_bad_weights_are_refused_by_name(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        LossConfig(**settings)
