from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from effasr_kernels import rms_norm
from effasr_kernels.testing.conformance import Case, check_compiler

WIDTH, EPS = 12, 1e-5
OFFSETS: list[Any] = [0, 1]


def _case(lengths: tuple[int, ...], offset: Any) -> Case:
    def run(packed, shared):
        x = packed["x"]
        # The operation has no layout: the tail is not passed.
        y = rms_norm(x.values[: x.layout.total], shared["weight"], eps=EPS, offset=offset)
        return F.pad(y, (0, 0, 0, x.layout.rows - x.layout.total))

    return Case(
        run,
        {"x": [torch.randn(n, WIDTH, dtype=torch.float64) for n in lengths]},
        {"weight": torch.randn(WIDTH, dtype=torch.float64)},
        results=("x",),
        rounds_inside=offset == 0,
    )


@pytest.mark.parametrize("offset", OFFSETS)
def test_keeps_the_contract(
    check: Callable[[Case], None], lengths: tuple[int, ...], offset: Any
) -> None:
    check(_case(lengths, offset))


def test_compiles() -> None:
    check_compiler(_case((5, 0, 2), 1))


@pytest.mark.parametrize("offset", OFFSETS)
def test_is_its_formula(offset: Any) -> None:
    x, weight = torch.randn(5, WIDTH).double(), torch.randn(WIDTH).double()
    expected = (offset + weight) * x / ((x * x).sum(1, keepdim=True) / WIDTH + EPS) ** 0.5
    torch.testing.assert_close(rms_norm(x, weight, eps=EPS, offset=offset), expected)


def test_rows_may_have_any_order_in_memory() -> None:
    weight = torch.randn(WIDTH)
    x = torch.randn(2, 7, 3, WIDTH)
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3)):
        turned = x.permute(order)
        y = rms_norm(turned, weight, eps=EPS)
        assert torch.equal(y, rms_norm(turned.contiguous(), weight, eps=EPS))
        # As an elementwise operation of PyTorch leaves it: heads are not copied.
        assert y.stride() == (turned * 1).stride()


def test_only_the_offset_1_rounds_once() -> None:
    x = torch.randn(50, WIDTH).bfloat16()
    weight = torch.randn(WIDTH)
    normal = F.rms_norm(x.float(), (WIDTH,), eps=EPS)
    plain = rms_norm(x, weight, eps=EPS)
    assert plain.dtype == torch.float32
    assert torch.equal(plain, weight * normal.bfloat16())
    shifted = rms_norm(x, weight, eps=EPS, offset=1)
    assert torch.equal(shifted, ((1 + weight) * normal).bfloat16())


def test_under_autocast_the_result_is_narrow_and_the_arguments_are_not() -> None:
    x = torch.randn(50, WIDTH, requires_grad=True)
    weight = torch.randn(WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = rms_norm(x, weight, eps=EPS)
    assert torch.equal(y, rms_norm(x, weight, eps=EPS).bfloat16())
    dx, dweight = torch.autograd.grad(y.float().sum(), [x, weight])
    assert (dx.dtype, dweight.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.zeros(4)}, r"`x` must have shape \(\.\.\., W\), but is \(4,\)"),
        ({"x": torch.zeros(2, 4).long()}, "`x` must be float16"),
        ({"weight": torch.zeros(3)}, r"`weight` must have shape \(W,\) = \(4,\)"),
        ({"weight": torch.zeros(4).double()}, "`weight` must be float64 exactly if `x` is"),
        ({"offset": 2}, "`offset` must be 0 or 1, but is 2"),
    ],
)
def test_says_what_is_wrong(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"x": torch.zeros(2, 4), "weight": torch.zeros(4), "eps": EPS}
    with pytest.raises(ValueError, match=f"rms_norm: {message}"):
        rms_norm(**(arguments | changed))
