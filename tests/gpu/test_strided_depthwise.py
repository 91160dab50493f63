from collections.abc import Callable

import pytest
import torch

from effasr_kernels import PackedLayout, strided_depthwise
from effasr_kernels.strided_depthwise import _triton
from effasr_kernels.testing.conformance import Case, check_kernel
from effasr_kernels.testing.tolerance import assert_no_worse


def _case_for(
    slots: tuple[int, ...], channels: int = 3, bins: int = 4, *, relu: bool = False
) -> Callable[[str], Case]:
    packed = {
        "x": [torch.randn(n, 2, bins, channels, dtype=torch.float64) for n in slots],
        "length": [torch.tensor([max(0, 2 * n - i % 2)]) for i, n in enumerate(slots)],
    }
    shared = {
        "weight": torch.randn(channels, 9, dtype=torch.float64),
        "bias": torch.randn(channels, dtype=torch.float64),
    }
    return lambda backend: Case(
        lambda packed, shared: strided_depthwise(
            packed["x"].values.flatten(0, 1),
            *shared.values(),
            packed["x"].layout,
            # Where sequences are appended, the test fills up with a negative number.
            packed["length"].values[: packed["x"].layout.num_sequences].clamp(min=0),
            relu=relu,
            backend=backend,
        ),
        packed,
        shared,
        results=("x",),
        one_more=frozenset({"length"}),
    )


@pytest.mark.parametrize("relu", [False, True])
def test_keeps_the_contract(relu: bool, dtype: torch.dtype, device: torch.device) -> None:
    check_kernel(_case_for((1, 0, 3), relu=relu), dtype, device)


def _compare(
    slots: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    channels: int = 3,
    bins: int = 4,
    rows: int | None = None,
) -> None:
    """Compare the result and the gradients, with NaN in every row that is not real."""
    rows = sum(slots) if rows is None else rows
    layout = PackedLayout.from_lengths(slots, rows=rows)
    lengths = torch.tensor([max(0, 2 * n - i % 3) for i, n in enumerate(slots)]).long()
    x = torch.full((2 * rows, bins, channels), torch.nan)
    for begin, length in zip(layout.cu_seqlens_host, lengths.tolist(), strict=False):
        x[2 * begin : 2 * begin + length] = torch.randn(length, bins, channels)
    given = [x.to(dtype), torch.randn(channels, 9).to(dtype), torch.randn(channels).to(dtype)]
    dy = torch.randn(rows, bins // 2, channels).to(dtype)
    dy[sum(slots) :] = torch.nan

    def run(backend: str, dtype: torch.dtype, where: torch.device | str) -> list[torch.Tensor]:
        leaves = [value.to(where, dtype).requires_grad_() for value in given]
        y = strided_depthwise(*leaves, layout.to(where), lengths.to(where), backend=backend)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(where, dtype))]

    gold = run("reference", torch.float64, "cpu")
    baseline, actual = run("reference", dtype, "cpu"), run("triton", dtype, device)
    for got, exact, same_dtype in zip(actual, gold, baseline, strict=True):
        assert_no_worse(got.cpu(), exact, same_dtype)
    y, dx = actual[:2]
    assert not y[sum(slots) :].any()
    assert not dx[2 * sum(slots) :].any()


def test_every_layout(lengths: tuple[int, ...], device: torch.device) -> None:
    _compare(lengths, torch.float32, device, rows=sum(lengths) + 2)


@pytest.mark.parametrize(("channels", "bins"), [(1, 2), (16, 6), (37, 10), (260, 2)])
@pytest.mark.representative(channels=37)
def test_any_number_of_channels_and_bands(
    channels: int, bins: int, dtype: torch.dtype, device: torch.device
) -> None:
    _compare((3, 1), dtype, device, channels=channels, bins=bins, rows=5)


def test_spans_meet_and_programs_take_several(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = _triton.Config(8, 16, 16)
    monkeypatch.setattr(_triton, "configs", lambda *_: (small, small))
    monkeypatch.setattr(_triton, "_PROGRAMS", 2)
    _compare((17, 0, 16, 5), torch.float32, device, channels=17, rows=40)


@pytest.mark.parametrize(("sequences", "rows"), [(0, 0), (0, 3), (2, 0), (1, 5)])
def test_nothing_at_all(sequences: int, rows: int, device: torch.device) -> None:
    _compare((0,) * sequences, torch.float32, device, rows=rows)
