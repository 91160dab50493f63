from dataclasses import replace

import pytest
import torch

from effasr.model.losses import Losses
from effasr.training.loss import LOSSES, LossConfig, Objective

CPU = torch.device("cpu")
COUNTS = torch.tensor([5.0, 2.0])
YES, NO = torch.tensor(True), torch.tensor(False)
GATED = LossConfig(
    ctc_weight=0.3,
    transducer_weight=0.0,
    ctc_weight_before=0.5,
    guided_weight=2.0,
    guided_after_ctc=1.0,
)


def losses(cross_entropy=0.0, ctc=0.0, guided=0.0, transducer=0.0, router=None) -> Losses:
    values = cross_entropy, ctc, transducer, guided
    sums = [torch.tensor(value, requires_grad=True) for value in values]
    return Losses(*sums, per_utterance=torch.zeros(1), router=router)


def weighed(config: LossConfig, sums: Losses, counts=COUNTS) -> dict[str, torch.Tensor]:
    return Objective(config, CPU).weigh(sums, counts)


def check(parts: dict[str, torch.Tensor], expected: list[float]):
    assert list(parts) == list(LOSSES)
    assert [x.item() for x in parts.values()] == pytest.approx(expected)
    assert [x.requires_grad for x in parts.values()] == [True, False, False, False, False]


def test_each_loss_is_divided_by_its_own_global_count():
    sums = losses(10.0, 6.0, 3.0)
    config = LossConfig(ctc_weight=0.25, transducer_weight=0.0, guided_weight=2.0)
    parts = weighed(config, sums)
    check(parts, [0.75 * 2 + 0.25 * 3 + 2 * 1.5, 2.0, 3.0, 0.0, 1.5])
    parts["loss"].backward()
    gradients = [sums.cross_entropy.grad, sums.ctc.grad, sums.guided.grad]
    assert [g.item() for g in gradients] == pytest.approx([0.75 / 5, 0.25 / 2, 2 / 2])


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
    return objective.weigh(losses(1.0, 10.0, 100.0), torch.ones(2))["loss"].item()


def test_the_penalty_waits_for_ctc_and_then_stays():
    objective = Objective(GATED, CPU)
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
    assert observed == 80
    assert total(objective) == pytest.approx(0.7 * 1 + 0.3 * 10 + 2 * 100)
    for _ in range(200):
        objective.observe(torch.tensor(9.0), YES)
    assert objective.guided_on


def test_the_gate_continues_from_its_state():
    first, second, resumed = (Objective(GATED, CPU) for _ in range(3))
    for objective in (first, second):
        objective.observe(torch.tensor(1.01), YES)
    resumed.load_state_dict(first.state_dict())
    for objective in (second, resumed):
        objective.observe(torch.tensor(0.4), YES)
    assert bool(resumed.guided_on) == bool(second.guided_on) is True
    assert torch.equal(resumed.state_dict()["average"], second.state_dict()["average"])
    # A penalty that need not wait any more is on at once.
    ungated = Objective(replace(GATED, guided_after_ctc=None, ctc_weight_before=None), CPU)
    ungated.load_state_dict(Objective(GATED, CPU).state_dict())
    assert ungated.guided_on


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
        ({"ctc_weight": 0.3}, "must be numbers here: see `resolve_losses`"),
        ({"transducer_weight": 0.0}, "must be numbers here: see `resolve_losses`"),
    ],
)
def test_error_messages(settings, message):
    with pytest.raises(ValueError, match=message):
        Objective(LossConfig(**settings), CPU)
