from typing import Any

import pytest
import torch
import torch.nn.functional as F

from effasr_kernels import rms_norm

WIDTH, EPS = 12, 1e-5
OFFSETS: list[Any] = [0, 1]


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
