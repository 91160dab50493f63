"""The logarithm of sums of masses, over all of its range."""

import pytest
import torch
import triton
import triton.language as tl

from effasr_kernels.runtime.launch import launch
from effasr_kernels.shared.logarithm import log2_of_more


@triton.jit
def take(x, out, BLOCK: tl.constexpr):
    """Each number's."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, log2_of_more(tl.load(x + i)))


def _of(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    launch(take, (x.numel() // 1024,), x, out, BLOCK=1024)
    return out


def test_it_errs_by_roundings(device: torch.device) -> None:
    small = torch.logspace(-126, 0, 2**14, 2, dtype=torch.float32)
    x = torch.cat([torch.linspace(0, 1, 2**15), small]).to(device)
    exact = torch.log1p(x.double()) / torch.log(torch.tensor(2.0, dtype=torch.float64))
    error = (_of(x).double() - exact).abs()
    assert float(error.max()) < 1.2e-7
    assert float((error / exact.clamp(min=1e-37)).max()) < 1.3e-7


@pytest.mark.parametrize(("x", "expected"), [(0.0, 0.0), (1.0, 1.0), (torch.nan, torch.nan)])
def test_it_is_exact_at_both_ends(x: float, expected: float, device: torch.device) -> None:
    result = _of(torch.full((1024,), x, device=device))
    assert torch.equal(result.nan_to_num(9.0), torch.full_like(result, expected).nan_to_num(9.0))
