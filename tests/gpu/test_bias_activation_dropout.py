from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from effasr_kernels import PackedLayout, bias_activation_dropout
from effasr_kernels.bias_activation_dropout import _triton
from effasr_kernels.testing.conformance import Case, check_kernel
from effasr_kernels.testing.tolerance import assert_no_worse

ACTIVATIONS: list[Any] = ["silu", "relu", "gelu"]


def _case_for(lengths: tuple[int, ...], activation: Any) -> Callable[[str], Case]:
    packed = {"x": [torch.randn(n, 12, dtype=torch.float64) for n in lengths]}
    shared = {"bias": torch.randn(12, dtype=torch.float64)}
    return lambda backend: Case(
        lambda packed, shared: bias_activation_dropout(
            packed["x"].values,
            shared["bias"],
            packed["x"].layout,
            activation=activation,
            backend=backend,
        ),
        packed,
        shared,
        results=("x",),
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_keeps_the_contract(activation: Any, dtype: torch.dtype, device: torch.device) -> None:
    check_kernel(_case_for((1, 0, 6), activation), dtype, device)


def _compare(
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    activation: Any = "silu",
    *,
    channels: int = 12,
    rows: int | None = None,
    bias: bool = True,
) -> None:
    """Compare the result and the gradients with dropout, with NaN in the tail."""
    total = sum(lengths)
    rows = total if rows is None else rows
    layout = PackedLayout.from_lengths(lengths, rows=rows)
    given = [torch.randn(rows, channels).to(dtype)] + [torch.randn(channels)] * bias
    given[0][total:] = torch.nan
    dy = torch.randn(rows, channels).to(dtype)
    dy[total:] = torch.nan

    def run(backend: str, where: torch.device | str, wide: bool) -> list[Tensor]:
        as_wide = lambda x: x.to(where, torch.float64 if wide else x.dtype)
        leaves = [as_wide(x).requires_grad_() for x in given]
        y = bias_activation_dropout(
            leaves[0],
            leaves[1] if bias else None,
            layout.to(where),
            activation=activation,
            dropout=0.3,
            seed=7,
            offset=5,
            backend=backend,
        )
        return [y.detach(), *torch.autograd.grad(y, leaves, as_wide(dy))]

    gold = run("reference", "cpu", True)
    baseline, actual = run("reference", "cpu", False), run("triton", device, False)
    for got, exact, same in zip(actual, gold, baseline, strict=True):
        assert_no_worse(got.cpu(), exact, same)
    assert not any(x[total:].any() for x in actual[:2])


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.representative(activation="silu")
def test_every_activation(activation: Any, dtype: torch.dtype, device: torch.device) -> None:
    _compare((3, 2), dtype, device, activation, rows=6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_stays_nan(activation: Any, device: torch.device) -> None:
    layout = PackedLayout.from_lengths([4])
    x = torch.tensor([[torch.nan, 1.0, -1.0, torch.nan]]).repeat(4, 1)
    dy = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).repeat(4, 1)

    def run(backend: str, where: torch.device | str) -> list[Tensor]:
        leaf = x.to(where).requires_grad_()
        y = bias_activation_dropout(
            leaf, None, layout.to(where), activation=activation, backend=backend
        )
        return [y.detach().cpu(), *(dx.cpu() for dx in torch.autograd.grad(y, leaf, dy.to(where)))]

    for got, expected in zip(run("triton", device), run("reference", "cpu"), strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True)


def test_every_layout(lengths: tuple[int, ...], device: torch.device) -> None:
    _compare(lengths, torch.float32, device, rows=sum(lengths) + 6)


@pytest.mark.parametrize("channels", [1, 6, 37, 1_040])
@pytest.mark.representative(channels=[1, 1_040])
def test_any_number_of_channels(channels: int, dtype: torch.dtype, device: torch.device) -> None:
    _compare((3, 2), dtype, device, channels=channels, rows=6)


def test_a_program_adds_several_tiles(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_triton, "_PROGRAMS", 2)
    _compare((9, 0, 14), torch.float32, device, rows=29)


def test_there_need_be_no_bias(device: torch.device) -> None:
    _compare((3, 2), torch.float32, device, rows=6, bias=False)


@pytest.mark.parametrize(("sequences", "rows"), [(0, 0), (0, 3), (2, 0), (1, 5)])
def test_nothing_at_all(sequences: int, rows: int, device: torch.device) -> None:
    _compare((0,) * sequences, torch.float32, device, rows=rows)
