import pytest
import torch
from torch import nn

from effasr_kernels import PackedLayout, batch_norm
from tests.support.operation_cases import batch_statistics

CHANNELS = 3


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("fixed", [False, True])
def test_matches_torch_over_the_real_rows(silu: bool, fixed: bool) -> None:
    theirs = nn.BatchNorm1d(CHANNELS).double()
    for x in (theirs.weight, theirs.bias, theirs.running_mean):
        nn.init.normal_(x)
    nn.init.uniform_(theirs.running_var, 0.5, 2)
    layout = PackedLayout.from_lengths((4, 0, 7), rows=14)
    x = torch.randn(14, CHANNELS, dtype=torch.float64)
    x[11:] = torch.nan
    x.requires_grad_()
    given = batch_statistics(x, layout) if not fixed else (theirs.running_mean, theirs.running_var)
    given = tuple(value.clone() for value in given)
    y = batch_norm(
        x, theirs.weight, theirs.bias, *given, layout, eps=theirs.eps, silu=silu, fixed=fixed
    )
    expected = theirs.train(not fixed)(x[:11])
    expected = nn.functional.silu(expected) if silu else expected
    torch.testing.assert_close(y[:11], expected)
    assert not y[11:].any()
    leaves = [x, theirs.weight, theirs.bias]
    dy = torch.randn(14, CHANNELS, dtype=torch.float64)
    found = torch.autograd.grad(y, leaves, dy)
    for actual, wanted in zip(found, torch.autograd.grad(expected, leaves, dy[:11]), strict=True):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_stay_wide_under_autocast(dtype: torch.dtype) -> None:
    layout = PackedLayout.from_lengths((4, 3))
    x = torch.randn(7, CHANNELS).to(dtype).requires_grad_()
    weight, bias = torch.randn(2, CHANNELS).unbind()
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    mean, variance = batch_statistics(x.bfloat16(), layout)
    with torch.autocast("cpu", torch.bfloat16):
        y = batch_norm(x, weight, bias, mean, variance, layout)
    expected = (x.bfloat16().float() - mean) * (variance + 1e-5).rsqrt() * weight + bias
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected.bfloat16(), rtol=2**-7, atol=1e-3)
    grads = torch.autograd.grad(y.float().square().sum(), [x, weight, bias])
    assert [g.dtype for g in grads] == [dtype, torch.float32, torch.float32]
