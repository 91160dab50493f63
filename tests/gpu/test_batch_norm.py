from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from effasr_kernels import PackedLayout, batch_norm
from effasr_kernels.batch_norm import OPERATION, BatchNormArguments
from effasr_kernels.shared.ragged import wide_dtype
from effasr_kernels.testing.conformance import Case, check_kernel
from effasr_kernels.testing.tolerance import assert_no_worse


def _statistics(x: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of the real rows, 0 without one."""
    real = torch.where(layout.mask()[:, None], x.detach(), 0).to(wide_dtype(x))
    count = layout.cu_seqlens[-1].clamp(min=1)
    mean = real.sum(0) / count
    away = torch.where(layout.mask()[:, None], real - mean, 0)
    return mean, away.square().sum(0) / count


def _case_for(
    lengths: tuple[int, ...], channels: int, *, silu: bool, fixed: bool
) -> Callable[[str], Case]:
    packed = {"x": [torch.randn(n, channels, dtype=torch.float64) for n in lengths]}
    shared = {name: torch.randn(channels, dtype=torch.float64) for name in ("weight", "bias")}
    given = torch.randn(channels), torch.rand(channels) + 0.5

    def run(packed: Any, shared: Any, backend: str) -> Tensor:
        x, layout = packed["x"].values, packed["x"].layout
        found = tuple(y.to(x.device) for y in given) if fixed else _statistics(x, layout)
        weight, bias = shared["weight"], shared["bias"]
        return batch_norm(x, weight, bias, *found, layout, silu=silu, fixed=fixed, backend=backend)

    return lambda backend: Case(
        lambda packed, shared: run(packed, shared, backend),
        packed,
        shared,
        results=("x",),
        mixes_sequences=not fixed,
    )


@pytest.mark.parametrize(("silu", "fixed"), [(True, False), (False, True)])
def test_keeps_the_contract(
    lengths: tuple[int, ...], silu: bool, fixed: bool, dtype: torch.dtype, device: torch.device
) -> None:
    check_kernel(_case_for(lengths, 5, silu=silu, fixed=fixed), dtype, device)


def _compare(
    lengths: tuple[int, ...],
    channels: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    rows: int | None = None,
    silu: bool = True,
    shift: float = 0.0,
) -> None:
    """Compare y and the gradients with float32 parameters and a tail of NaN."""
    rows = sum(lengths) if rows is None else rows
    x = torch.randn(rows, channels).add(shift).to(dtype)
    x[sum(lengths) :] = torch.nan
    dy = torch.randn(rows, channels).to(dtype)
    dy[sum(lengths) :] = torch.nan
    weight, bias = torch.randn(2, channels).unbind()
    found = _statistics(x.float(), PackedLayout.from_lengths(lengths, rows=rows))

    def run(backend: str, dtype: torch.dtype, device: torch.device | str) -> list[Tensor]:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        leaves = [x.to(device, dtype), weight.to(device, wide), bias.to(device, wide)]
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        layout = PackedLayout.from_lengths(lengths, device, rows=rows)
        statistics = [y.to(device, wide) for y in found]
        y = batch_norm(*leaves, *statistics, layout, silu=silu, backend=backend)
        results = [y, *torch.autograd.grad(y, leaves, dy.to(device, dtype))]
        return [z.detach().cpu() for z in results]

    gold = run("reference", torch.float64, "cpu")
    baseline, actual = run("reference", dtype, "cpu"), run("triton", dtype, device)
    for one, exact, same_dtype in zip(actual, gold, baseline, strict=True):
        assert_no_worse(one, exact, same_dtype)
    for one in actual[:2]:
        assert not one[sum(lengths) :].any()


def test_spans_of_rows_meet(dtype: torch.dtype, device: torch.device) -> None:
    """The last span has rows of the tail alone."""
    _compare((255, 0, 1, 256, 5), 70, dtype, device, rows=800)


@pytest.mark.parametrize("channels", [1, 64, 176, 260])
@pytest.mark.representative(channels=[1, 260])
def test_any_number_of_channels(channels: int, dtype: torch.dtype, device: torch.device) -> None:
    _compare((9, 3), channels, dtype, device, rows=13, silu=channels != 64)


def test_a_large_mean_does_not_cancel(device: torch.device) -> None:
    _compare((50, 3), 5, torch.float32, device, rows=60, shift=300.0)


@pytest.mark.parametrize(("sequences", "rows"), [(0, 0), (0, 3), (2, 0), (1, 5)])
def test_nothing_at_all(sequences: int, rows: int, device: torch.device) -> None:
    _compare((0,) * sequences, 3, torch.float32, device, rows=rows)


def test_a_part_of_a_larger_tensor_may_be_given(dtype: torch.dtype, device: torch.device) -> None:
    layout = PackedLayout.from_lengths((5, 2), device)
    wide, ones = torch.randn(7, 10).to(device, dtype), torch.ones(6, device=device)
    x, given = wide[:, 2:8], (ones, ones, ones, ones, layout)
    whole = batch_norm(x.contiguous(), *given, silu=True, backend="triton")
    assert torch.equal(batch_norm(x, *given, silu=True, backend="triton"), whole)


def test_gradients_in_compiled_code_share_no_memory(device: torch.device) -> None:
    """Those of weight and bias are parts of one tensor, which the compiler does not expect."""
    layout = PackedLayout.from_lengths((5, 2), device)
    x, dy = torch.randn(2, 7, 6, device=device).unbind()
    one = torch.ones(6, device=device)
    arguments = BatchNormArguments(x, one, one, one, one, layout, 1e-5, True, False)
    flat = OPERATION.flatten(arguments, "triton")
    required = [True] * 3 + [False] * (len(flat) - 3)
    found = torch.ops.effasr.batch_norm_backward([dy], [], required, *flat)
    assert [x.shape for x in found] == [x.shape for x in flat[:3]]
    assert len({x.untyped_storage().data_ptr() for x in found}) == 3
