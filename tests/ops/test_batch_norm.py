from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from effasr_kernels import PackedLayout, batch_norm
from effasr_kernels.shared.ragged import wide_dtype
from effasr_kernels.testing.conformance import Case, check_compiler

CHANNELS = 3


def statistics(x: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of the real rows, 0 without one."""
    real = torch.where(layout.mask()[:, None], x.detach(), 0).to(wide_dtype(x))
    count = layout.cu_seqlens[-1].clamp(min=1)
    mean = real.sum(0) / count
    away = torch.where(layout.mask()[:, None], real - mean, 0)
    return mean, away.square().sum(0) / count


def _case(lengths: tuple[int, ...], *, silu: bool, fixed: bool) -> Case:
    given = torch.randn(CHANNELS), torch.rand(CHANNELS) + 0.5

    def run(packed: Any, shared: Any) -> Tensor:
        x, layout = packed["x"].values, packed["x"].layout
        found = given if fixed else statistics(x, layout)
        weight, bias = shared["weight"], shared["bias"]
        return batch_norm(x, weight, bias, *found, layout, silu=silu, fixed=fixed)

    return Case(
        run,
        {"x": [torch.randn(n, CHANNELS, dtype=torch.float64) for n in lengths]},
        {name: torch.randn(CHANNELS, dtype=torch.float64) for name in ("weight", "bias")},
        results=("x",),
        mixes_sequences=not fixed,
    )


@pytest.mark.parametrize(("silu", "fixed"), [(True, False), (False, False), (True, True)])
def test_keeps_the_contract(
    check: Callable[[Case], None], lengths: tuple[int, ...], silu: bool, fixed: bool
) -> None:
    check(_case(lengths, silu=silu, fixed=fixed))


@pytest.mark.parametrize("fixed", [False, True])
def test_compiles(fixed: bool) -> None:
    check_compiler(_case((5, 0, 2), silu=True, fixed=fixed))


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
    given = statistics(x, layout) if not fixed else (theirs.running_mean, theirs.running_var)
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
    mean, variance = statistics(x.bfloat16(), layout)
    with torch.autocast("cpu", torch.bfloat16):
        y = batch_norm(x, weight, bias, mean, variance, layout)
    expected = (x.bfloat16().float() - mean) * (variance + 1e-5).rsqrt() * weight + bias
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected.bfloat16(), rtol=2**-7, atol=1e-3)
    grads = torch.autograd.grad(y.float().square().sum(), [x, weight, bias])
    assert [g.dtype for g in grads] == [dtype, torch.float32, torch.float32]


def _call(**changed: Any) -> Tensor:
    ones = {name: torch.ones(2) for name in ("weight", "bias", "mean", "variance")}
    layout = PackedLayout.from_lengths((4,))
    return batch_norm(**{"x": torch.ones(4, 2), **ones, "layout": layout, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.ones(4)}, r"`x` must have shape \(T, C\)"),
        ({"x": torch.ones(3, 2)}, "`x` must have 4 rows, as `layout` does"),
        ({"x": torch.ones(4, 2, dtype=torch.int64)}, "`x` must be float16"),
        ({"weight": torch.ones(3)}, r"`weight` must have shape \(C,\) = \(2,\), but is \(3,\)"),
        ({"bias": torch.ones(2).double()}, "`bias` must be torch.float32, as `weight` is"),
        ({"mean": torch.ones(1)}, r"`mean` must have shape \(C,\)"),
        ({"variance": torch.ones(2).half()}, "`variance` must be torch.float32, as `mean` is"),
        ({"mean": torch.ones(2, requires_grad=True)}, "`mean` must not require a gradient"),
        ({"weight": torch.ones(2, device="meta"), "bias": torch.ones(2, device="meta")}, "cpu"),
        ({"eps": 0.0}, "`eps` must be positive, but is 0.0"),
    ],
)
def test_wrong_arguments_are_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _call(**changed)
