"""oneDNN's linear layer gives what torch's does, in training alone."""

import pytest
import torch
import torch.nn.functional as F

from effasr_kernels.shared.cpu import linear as cpu_linear
from effasr_kernels.shared.cpu.linear import linear, onednn_product, onednn_weight
from tests.support.tolerance import assert_no_worse

pytestmark = pytest.mark.skipif(
    not cpu_linear.has_onednn(), reason="this torch has no oneDNN for an x86-64 processor"
)
LARGE, SMALL = (70, 160, 200), (3, 5, 7)


def arguments(
    shape: tuple[int, int, int], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    rows, width, size = shape
    torch.manual_seed(0)
    sizes = (2, rows, width), (size, width), (size,)
    return tuple(torch.randn(*x).to(dtype).requires_grad_() for x in sizes)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the left operands that oneDNN has multiplied."""
    calls: list[tuple[int, ...]] = []
    original = onednn_product

    def noted(rows: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
        calls.append(tuple(rows.shape))
        return original(rows, *others)

    monkeypatch.setattr(cpu_linear, "onednn_product", noted)
    return calls


@pytest.mark.parametrize("with_bias", [True, False])
def test_results_and_gradients_err_no_more_than_torchs(
    with_bias: bool, products: list[tuple[int, ...]]
) -> None:
    found, usual = {}, {}
    given = arguments(LARGE)
    upstream = torch.randn(2, LARGE[0], LARGE[2])
    for into, function in ((found, linear), (usual, F.linear)):
        x, weight, bias = (value.detach().clone().requires_grad_() for value in given)
        y = function(x, weight, bias if with_bias else None)
        y.backward(upstream)
        into |= {"y": y.detach(), "x": x.grad, "weight": weight.grad, "bias": bias.grad}
    x, weight, bias = (value.detach().double().requires_grad_() for value in given)
    exact = F.linear(x, weight, bias if with_bias else None)
    exact.backward(upstream.double())
    truth = {"y": exact.detach(), "x": x.grad, "weight": weight.grad, "bias": bias.grad}
    assert len(products) == 3
    for name, value in found.items():
        if value is None:
            assert truth[name] is None
        else:
            assert_no_worse(value, truth[name], usual[name])


def test_inference_and_small_products_are_torchs(products: list[tuple[int, ...]]) -> None:
    """A row's result must not depend on the number of rows where nothing is trained."""
    given = arguments(LARGE)
    with torch.no_grad():
        assert torch.equal(linear(*given), F.linear(*given))
    small = arguments(SMALL)
    assert torch.equal(linear(*small), F.linear(*small))
    double = arguments(LARGE, torch.float64)
    assert torch.equal(linear(*double), F.linear(*double))
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(*given).dtype == torch.bfloat16
    assert products == []


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight, bias = (value.detach() for value in arguments(LARGE))
    rows = x.flatten(0, 1)
    weight = onednn_weight(weight)
    whole = onednn_product(rows, weight, bias)
    for count in (1, 2, 17, 139):
        assert torch.equal(onednn_product(rows[:count], weight, bias), whole[:count])
