from typing import Any

import pytest
import torch
import torch.nn.functional as F

from effasr_kernels import PackedLayout, bias_activation_dropout
from effasr_kernels.shared.dropout import kept_elements

CHANNELS = 12
ACTIVATIONS: list[Any] = ["silu", "relu", "gelu"]


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
