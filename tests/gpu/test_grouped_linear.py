"""The Triton backend of `grouped_linear` against the reference."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from effasr_kernels import PackedLayout, grouped_linear
from effasr_kernels.grouped_linear import _triton
from effasr_kernels.testing.conformance import Case, check_kernel
from effasr_kernels.testing.tolerance import assert_no_worse
from tests.gpu.conftest import EMULATED
from tests.ops.test_grouped_linear import sorted_by_group


def _case_for(lengths: tuple[int, ...], groups: int = 3) -> Callable[[str], Case]:
    packed = {
        "x": [torch.randn(n, 12, dtype=torch.float64) for n in lengths],
        "group": [torch.randint(groups, (n,)) for n in lengths],
    }
    shared = {
        "weight": torch.randn(groups, 20, 12, dtype=torch.float64) / 12**0.5,
        "bias": torch.randn(groups, 20, dtype=torch.float64),
    }
    return lambda backend: Case(
        lambda packed, shared: sorted_by_group(packed, shared, backend),
        packed,
        shared,
        results=("x",),
    )


def test_keeps_the_contract(
    lengths: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    check_kernel(_case_for(lengths), dtype, device)


def _compare(
    sizes: tuple[int, ...],
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    tail: int = 0,
    bias: bool = True,
) -> None:
    """Compare y and the gradients, with NaN in the tail of x and of the upstream gradient."""
    rows = sum(sizes) + tail
    leaves = {
        "x": torch.randn(rows, inputs).to(dtype),
        "weight": torch.randn(len(sizes), outputs, inputs).div(inputs**0.5).to(dtype),
    }
    if bias:
        leaves["bias"] = torch.randn(len(sizes), outputs).to(dtype)
    dy = torch.randn(rows, outputs).to(dtype)
    leaves["x"][sum(sizes) :] = dy[sum(sizes) :] = torch.nan

    def run(backend: str, dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
        given = {name: x.to(device, dtype).requires_grad_() for name, x in leaves.items()}
        layout = PackedLayout.from_lengths(sizes, device, rows=rows)
        y = grouped_linear(
            given["x"], given["weight"], layout, bias=given.get("bias"), backend=backend
        )
        gradients = torch.autograd.grad(y, list(given.values()), dy.to(device, dtype))
        return {"y": y.detach().cpu()} | {
            name: x.cpu() for name, x in zip(given, gradients, strict=True)
        }

    gold = run("reference", torch.float64, "cpu")
    baseline, actual = run("reference", dtype, "cpu"), run("triton", dtype, device)
    for name, value in actual.items():
        assert_no_worse(value, gold[name], baseline[name])
    for name in ("y", "x"):
        assert not actual[name][sum(sizes) :].any()
    for group, size in enumerate(sizes):
        if not size:
            assert not actual["weight"][group].any()


@pytest.mark.parametrize("bias", [False, True])
def test_tiles_of_one_group_meet(bias: bool, dtype: torch.dtype, device: torch.device) -> None:
    _compare((130, 0, 1, 70), 40, 24, dtype, device, tail=9, bias=bias)


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (37, 16), (65, 129), (96, 200)])
@pytest.mark.representative(inputs=[37, 65])
def test_any_number_of_channels(
    inputs: int, outputs: int, dtype: torch.dtype, device: torch.device
) -> None:
    _compare((17, 3), inputs, outputs, dtype, device, tail=1)


def test_large_tiles_of_weights(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, device: torch.device
) -> None:
    """Those that a GPU with few multiprocessors would choose at this size."""
    monkeypatch.setattr(_triton, "multiprocessors", lambda device: 1)
    _compare((70, 5), 72, 136, dtype, device)


@pytest.mark.extended
def test_more_groups_than_a_search_reads_at_a_time(device: torch.device) -> None:
    sizes = (3, *[0] * 130, 2, 1)
    _compare(sizes, 8, 8, torch.float32, device, tail=2)


@pytest.mark.parametrize(("sizes", "tail"), [((0, 0), 0), ((0, 0), 3)])
def test_nothing_at_all(sizes: tuple[int, ...], tail: int, device: torch.device) -> None:
    _compare(sizes, 8, 8, torch.float32, device, tail=tail)


def test_frozen_weights_launch_no_product_for_their_gradient(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    seen = []
    launch = _triton.launch

    def note(kernel, *arguments, **options):
        seen.append(kernel)
        launch(kernel, *arguments, **options)

    monkeypatch.setattr(_triton, "launch", note)
    layout = PackedLayout.from_lengths((3, 2), device)
    x = torch.randn(5, 8, device=device, requires_grad=True)
    weight = torch.randn(2, 4, 8, device=device)
    grouped_linear(x, weight, layout, backend="triton").sum().backward()
    assert seen == [_triton.multiply] * 2


@pytest.mark.skipif(EMULATED > 0, reason="the same launches as in the interpreter")
def test_rows_of_a_wider_tensor_and_a_transposed_weight(device: torch.device) -> None:
    layout = PackedLayout.from_lengths((4, 3), device)
    wide, weight = torch.randn(7, 20).to(device), torch.randn(2, 8, 6).to(device)
    call = lambda x, weight: grouped_linear(x, weight, layout, backend="triton")
    expected = call(wide[:, 4:12].contiguous(), weight.transpose(1, 2).contiguous())
    assert torch.equal(call(wide[:, 4:12], weight.transpose(1, 2)), expected)
