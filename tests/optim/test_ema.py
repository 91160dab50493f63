import pytest
import torch
from torch import nn

from effasr.optim.ema import WeightAverage


def test_the_average_is_its_closed_form():
    model = nn.Linear(1, 1, bias=False)
    values = [3.0, 1.0, 4.0, 1.0, 5.0]
    with torch.no_grad():
        model.weight.fill_(2.0)
    average, expected = WeightAverage(model, 0.3), 2.0
    for step, value in enumerate(values):
        with torch.no_grad():
            model.weight.fill_(value)
        average.update(step)
        decay = min(0.3, (1 + step) / (10 + step))
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


def test_decay_must_be_a_fraction():
    with pytest.raises(ValueError, match="`decay` must lie between 0 and 1, but is 1"):
        WeightAverage(nn.Linear(2, 2), 1.0)
    with pytest.raises(ValueError, match="`scale` must be positive, but is 0"):
        WeightAverage(nn.Linear(2, 2), 0.9, scale=0)


def descend(batch: int, decay: float, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """SGD on a quadratic, its rate by the linear rule: weights and average after 512 samples."""
    model = nn.Linear(4, 1, bias=False)
    curvature = torch.tensor([[0.2, 0.5, 1.0, 2.0]])
    with torch.no_grad():
        model.weight.fill_(1.0)
        average = WeightAverage(model, decay, scale)
        for step in range(512 // batch):
            model.weight -= 0.001 * batch * curvature * model.weight
            average.update(step)
    return model.weight.detach(), average.average["weight"]


def test_the_average_agrees_across_batch_sizes_on_a_quadratic():
    """With the decay to the power of the batch; with the same decay, it is left behind."""
    trained, reference = descend(1, 0.95, 1.0)
    for batch in (2, 4, 8):
        weights, scaled = descend(batch, 0.95, batch)
        torch.testing.assert_close(weights, trained, rtol=0.01, atol=0)
        torch.testing.assert_close(scaled, reference, rtol=0.02, atol=0)
    _, unscaled = descend(8, 0.95, 1.0)
    assert (unscaled / reference).max() > 1.05
