import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from effasr_kernels import gated_activation
from effasr_kernels.testing.conformance import Case, check_compiler

WIDTH = 12


def _logistic(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


FORMULAS: dict[Any, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x * _logistic(x),
    "gelu": lambda x: x / 2 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


def _case(lengths: tuple[int, ...], activation: Any) -> Case:
    def run(packed, shared):
        gate, up = packed["gate"], packed["up"]
        total = gate.layout.total
        # The operation has no layout: the tail is not passed.
        y = gated_activation(gate.values[:total], up.values[:total], activation=activation)
        return F.pad(y, (0, 0, 0, gate.layout.rows - total))

    rows = lambda: [torch.randn(n, WIDTH, dtype=torch.float64) for n in lengths]
    return Case(run, {"gate": rows(), "up": rows()}, results=("gate",))


@pytest.mark.parametrize("activation", FORMULAS)
def test_keeps_the_contract(
    check: Callable[[Case], None], lengths: tuple[int, ...], activation: Any
) -> None:
    check(_case(lengths, activation))


def test_compiles() -> None:
    check_compiler(_case((5, 0, 2), "gelu_tanh"))


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


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gate": torch.zeros(4)}, r"`gate` must have shape \(\.\.\., W\), but is \(4,\)"),
        ({"gate": torch.zeros(2, 4).long()}, "`gate` must be float16"),
        ({"up": torch.zeros(2, 3)}, r"`up` must have shape that of `gate` = \(2, 4\)"),
        ({"up": torch.zeros(2, 4).half()}, "`up` must be torch.float32, as `gate` is"),
        ({"activation": "relu"}, "`activation` must be one of silu, gelu, gelu_tanh, but is relu"),
    ],
)
def test_says_what_is_wrong(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "gate": torch.zeros(2, 4),
        "up": torch.zeros(2, 4),
        "activation": "silu",
    }
    with pytest.raises(ValueError, match=f"gated_activation: {message}"):
        gated_activation(**(arguments | changed))
