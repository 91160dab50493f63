from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from effasr_kernels import rms_norm
from effasr_kernels.rms_norm import _triton
from effasr_kernels.testing.conformance import Case, check_kernel
from effasr_kernels.testing.tolerance import assert_no_worse

EPS = 1e-6


def _case_for(lengths: tuple[int, ...], offset: Any) -> Callable[[str], Case]:
    packed = {"x": [torch.randn(n, 12, dtype=torch.float64) for n in lengths]}
    shared = {"weight": torch.randn(12, dtype=torch.float64)}

    def run_on(backend: str) -> Callable:
        def run(packed, shared):
            x = packed["x"]
            given = x.values[: x.layout.total], shared["weight"]
            y = rms_norm(*given, eps=EPS, offset=offset, backend=backend)
            return F.pad(y, (0, 0, 0, x.layout.rows - x.layout.total))

        return run

    return lambda backend: Case(run_on(backend), packed, shared, results=("x",))


@pytest.mark.parametrize("offset", [0, 1])
def test_keeps_the_contract(offset: Any, dtype: torch.dtype, device: torch.device) -> None:
    check_kernel(_case_for((1, 0, 6), offset), dtype, device)


def _compare(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    offset: Any = 0,
    frozen: bool = False,
    transposed: bool = False,
) -> None:
    x = torch.randn(shape).to(dtype)
    weight = torch.randn(shape[-1])
    dy = torch.randn(shape)

    def run(backend: str, where: torch.device | str, wide: bool) -> list[Tensor]:
        as_wide = lambda x: x.to(where, torch.float64 if wide else x.dtype)
        leaves = [as_wide(x).requires_grad_(), as_wide(weight).requires_grad_(not frozen)]
        given = leaves[0].transpose(0, 1) if transposed else leaves[0]
        y = rms_norm(given, leaves[1], eps=EPS, offset=offset, backend=backend)
        y = y.transpose(0, 1) if transposed else y
        found = torch.autograd.grad(y, leaves[: 2 - frozen], dy.to(y.device, y.dtype))
        return [y.detach(), *found]

    gold = run("reference", "cpu", True)
    baseline, actual = run("reference", "cpu", False), run("triton", device, False)
    for got, exact, same in zip(actual, gold, baseline, strict=True):
        assert_no_worse(got.cpu(), exact, same)


# A row of one number is 1 or -1 whatever its size, and its gradient is what rounding leaves.
@pytest.mark.parametrize("width", [2, 6, 37, 128, 2_048, 5_120])
@pytest.mark.representative(width=[2, 128, 5_120])
def test_any_width(width: int, dtype: torch.dtype, device: torch.device) -> None:
    _compare((5, width), dtype, device)


@pytest.mark.parametrize("offset", [0, 1])
def test_heads_in_any_order(offset: Any, dtype: torch.dtype, device: torch.device) -> None:
    _compare((3, 4, 16), dtype, device, offset=offset, transposed=True)


def test_a_frozen_weight(dtype: torch.dtype, device: torch.device) -> None:
    _compare((5, 24), dtype, device, frozen=True)


def test_a_program_adds_several_tiles(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_triton, "_MOST_PROGRAMS", 2)
    # Tiles of 16 rows.
    _compare((70, 128), torch.float32, device, offset=1)


def test_nothing_at_all(device: torch.device) -> None:
    _compare((0, 16), torch.float32, device)
