from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from effasr_kernels import PackedLayout, bias_activation_dropout
from effasr_kernels.shared.dropout import kept_elements
from effasr_kernels.testing.conformance import Case, check_compiler

CHANNELS = 12
ACTIVATIONS: list[Any] = ["silu", "relu", "gelu"]


def _case(lengths: tuple[int, ...], activation: Any, *, bias: bool = True) -> Case:
    return Case(
        lambda packed, shared: bias_activation_dropout(
            packed["x"].values, shared.get("bias"), packed["x"].layout, activation=activation
        ),
        {"x": [torch.randn(n, CHANNELS, dtype=torch.float64) for n in lengths]},
        {"bias": torch.randn(CHANNELS, dtype=torch.float64)} if bias else {},
        results=("x",),
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_keeps_the_contract(
    check: Callable[[Case], None], lengths: tuple[int, ...], activation: Any
) -> None:
    check(_case(lengths, activation))


def test_keeps_the_contract_without_a_bias(check: Callable[[Case], None]) -> None:
    check(_case((3, 0, 2), "silu", bias=False))


def test_compiles() -> None:
    check_compiler(_case((5, 0, 2), "gelu"))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_matches_torch_with_dropout(activation: Any) -> None:
    x = torch.randn(7, CHANNELS, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(CHANNELS, dtype=torch.float64, requires_grad=True)
    layout = PackedLayout.from_lengths((3, 4))
    options = {"dropout": 0.25, "seed": 11, "offset": 2}
    y = bias_activation_dropout(x, bias, layout, activation=activation, **options)
    keep = kept_elements(torch.tensor(11), (7, CHANNELS), 0.25, 2)
    expected = getattr(F, activation)(x + bias) * keep / 0.75
    torch.testing.assert_close(y, expected)
    upstream = torch.randn_like(y)
    got = torch.autograd.grad(y, [x, bias], upstream)
    own = torch.autograd.grad(expected, [x, bias], upstream)
    for a, b in zip(got, own, strict=True):
        torch.testing.assert_close(a, b)


def test_the_bias_keeps_its_dtype_under_autocast() -> None:
    x = torch.randn(5, CHANNELS, requires_grad=True)
    bias = torch.randn(CHANNELS, requires_grad=True)
    layout = PackedLayout.from_lengths((5,))
    with torch.autocast("cpu", torch.bfloat16):
        y = bias_activation_dropout(x, bias, layout, activation="silu")
    expected = F.silu(x.bfloat16().float() + bias).bfloat16()
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    dx, dbias = torch.autograd.grad(y.float().sum(), [x, bias])
    assert (dx.dtype, dbias.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.zeros(2)}, r"`x` must have shape \(T, C\)"),
        ({"x": torch.zeros(3, 4)}, "`x` must have 2 rows, as `layout` does"),
        ({"x": torch.zeros(2, 4).long()}, "`x` must be float16"),
        ({"bias": torch.zeros(3)}, r"`bias` must have shape \(C,\) = \(4,\)"),
        ({"bias": torch.zeros(4).double()}, "`bias` must be float64 exactly if `x` is"),
        ({"activation": "tanh"}, "`activation` must be one of silu, relu, gelu, but is tanh"),
        ({"dropout": -0.1}, r"`dropout` must be in \[0, 1\)"),
        ({"offset": 2**31}, r"`offset` must be in \[0, 2\^31\)"),
    ],
)
def test_says_what_is_wrong(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "x": torch.zeros(2, 4),
        "bias": torch.zeros(4),
        "layout": PackedLayout.from_lengths((2,)),
        "activation": "silu",
    }
    with pytest.raises(ValueError, match=f"bias_activation_dropout: {message}"):
        bias_activation_dropout(**(arguments | changed))
