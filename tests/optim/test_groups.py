import torch
from torch import nn

from effasr.nn.predictor import LSTM
from effasr.optim.adamw import parameter_groups


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)
        self.position_bias = nn.Parameter(torch.zeros(2, 2))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)


def names(model: nn.Module, group: dict) -> list[str]:
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return [by_id[id(parameter)] for parameter in group["params"]]


def test_the_biases_of_an_lstm_are_biases():
    model = LSTM(4, 2)
    _, spared = parameter_groups(model, 0.1, ("biases",))
    assert names(model, spared) == [f"bias_{x}_l{n}" for n in range(2) for x in ("ih", "hh")]


def test_norms_and_biases_are_spared_and_every_parameter_is_listed_once():
    model = Tied()
    decayed, spared = parameter_groups(model, 0.1, ("biases", "norms"))
    assert names(model, decayed) == ["embedding.weight", "linear.weight"]
    assert names(model, spared) == ["position_bias", "norm.weight", "norm.bias", "linear.bias"]
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)


def test_embeddings_can_be_spared_and_nothing_need_be():
    model = Tied()
    decayed, _ = parameter_groups(model, 0.1, ("biases", "norms", "embeddings"))
    assert names(model, decayed) == ["linear.weight"]
    (everything,) = parameter_groups(model, 0.1, ())
    assert len(everything["params"]) == 6
