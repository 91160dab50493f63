from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from effasr_kernels import gated_activation
from effasr_kernels.testing.conformance import Case, check_kernel
from effasr_kernels.testing.tolerance import assert_no_worse

ACTIVATIONS: list[Any] = ["silu", "gelu", "gelu_tanh"]


def _case_for(lengths: tuple[int, ...], activation: Any) -> Callable[[str], Case]:
    rows = lambda: [torch.randn(n, 12, dtype=torch.float64) for n in lengths]
    packed = {"gate": rows(), "up": rows()}

    def run_on(backend: str) -> Callable:
        def run(packed, shared):
            gate, up = packed["gate"], packed["up"]
            total = gate.layout.total
            given = gate.values[:total], up.values[:total]
            y = gated_activation(*given, activation=activation, backend=backend)
            return F.pad(y, (0, 0, 0, gate.layout.rows - total))

        return run

    return lambda backend: Case(run_on(backend), packed, results=("gate",))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_keeps_the_contract(activation: Any, dtype: torch.dtype, device: torch.device) -> None:
    check_kernel(_case_for((1, 0, 6), activation), dtype, device)


def _compare(
    rows: int, width: int, dtype: torch.dtype, device: torch.device, activation: Any = "silu"
) -> None:
    """Compare the result and the gradients of the halves of a product."""
    product, dy = (3 * torch.randn(rows, 2 * width)).to(dtype), torch.randn(rows, width).to(dtype)

    def run(backend: str, where: torch.device | str, wide: bool) -> list[Tensor]:
        as_wide = lambda x: x.to(where, torch.float64 if wide else x.dtype)
        leaf = as_wide(product).requires_grad_()
        y = gated_activation(*leaf.chunk(2, dim=-1), activation=activation, backend=backend)
        return [y.detach(), *torch.autograd.grad(y, [leaf], as_wide(dy))]

    gold = run("reference", "cpu", True)
    baseline, actual = run("reference", "cpu", False), run("triton", device, False)
    for got, exact, same in zip(actual, gold, baseline, strict=True):
        assert_no_worse(got.cpu(), exact, same)


@pytest.mark.parametrize("width", [1, 6, 37, 1_040])
@pytest.mark.representative(width=[1, 1_040])
def test_any_width(width: int, dtype: torch.dtype, device: torch.device) -> None:
    _compare(5, width, dtype, device)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: Any, dtype: torch.dtype, device: torch.device) -> None:
    _compare(6, 24, dtype, device, activation)


def test_large_values(device: torch.device) -> None:
    """Where the logistic function is 0 or 1, gradients are finite."""
    for activation in ACTIVATIONS:
        gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]], device=device, requires_grad=True)
        y = gated_activation(gate, torch.ones_like(gate), activation=activation, backend="triton")
        (slope,) = torch.autograd.grad(y.sum(), gate)
        assert slope.tolist() == [[0.0, 0.0, 0.5, 1.0, 1.0]]
        assert y.tolist() == [[0.0, 0.0, 0.0, 100.0, 1e4]]


def test_nothing_at_all(device: torch.device) -> None:
    _compare(0, 16, torch.float32, device)
