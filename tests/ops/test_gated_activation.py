import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from effasr_kernels import gated_activation

WIDTH = 12


def _logistic(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


FORMULAS: dict[Any, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x * _logistic(x),
    "gelu": lambda x: x / 2 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


@pytest.mark.parametrize("activation", FORMULAS)
def test_is_its_formula(activation: Any) -> None:
    gate, up = torch.randn(2, 5, 2, WIDTH).double()
    y = gated_activation(gate, up, activation=activation)
    torch.testing.assert_close(y, FORMULAS[activation](gate) * up)


def test_takes_the_halves_of_a_product() -> None:
    product = torch.randn(1, 5, 2 * WIDTH)
    gate, up = product.chunk(2, dim=-1)
    y = gated_activation(gate, up, activation="silu")
    assert y.is_contiguous()
    torch.testing.assert_close(y, F.silu(gate) * up)
