from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from effasr_kernels import BackendUnavailable, PackedLayout, subsampling_stem
from effasr_kernels.subsampling_stem import _triton
from effasr_kernels.testing.conformance import Case, check_kernel
from effasr_kernels.testing.tolerance import assert_no_worse

BINS = 8
both = pytest.mark.parametrize("per_slot", [4, 8])

NAMES = ("y", "dweight", "dbias", "dtaps", "doffset")


def _case_for(slots: tuple[int, ...], channels: int, per_slot: int) -> Callable[[str], Case]:
    packed = {
        "x": [torch.randn(n, per_slot, BINS, dtype=torch.float64) for n in slots],
        "length": [
            torch.tensor([max(0, per_slot * n - i % per_slot)]) for i, n in enumerate(slots)
        ],
    }
    shapes = {"weight": (channels, 9), "bias": (channels,)}
    shapes |= {"taps": (channels, 9), "offset": (channels,)}
    shared = {name: torch.randn(*shape, dtype=torch.float64) for name, shape in shapes.items()}
    return lambda backend: Case(
        lambda packed, shared: subsampling_stem(
            packed["x"].values.detach().flatten(0, 1),
            *shared.values(),
            packed["x"].layout,
            # Where sequences are appended, the test fills up with a negative number.
            packed["length"].values[: packed["x"].layout.num_sequences].clamp(min=0),
            rows_per_slot=per_slot,
            backend=backend,
        ).view(packed["x"].layout.rows, per_slot // 4 * BINS // 4, channels),
        packed,
        shared,
        results=("x",),
        one_more=frozenset({"length"}),
    )


@both
def test_keeps_the_contract(dtype: torch.dtype, device: torch.device, per_slot: int) -> None:
    check_kernel(_case_for((1, 0, 3), 5, per_slot), dtype, device)


def _compare(
    slots: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    channels: int = 3,
    bins: int = BINS,
    rows: int | None = None,
    per_slot: int = 8,
) -> None:
    """Compare the result and the gradients, with NaN in every row that is not real."""
    rows = sum(slots) if rows is None else rows
    layout = PackedLayout.from_lengths(slots, rows=rows)
    lengths = torch.tensor([max(0, per_slot * n - 3 * i % per_slot) for i, n in enumerate(slots)])
    lengths, quarters = lengths.long(), per_slot // 4
    x = torch.full((per_slot * rows, bins), torch.nan)
    for begin, length in zip(layout.cu_seqlens_host, lengths.tolist(), strict=False):
        x[per_slot * begin : per_slot * begin + length] = torch.randn(length, bins)
    shapes = (channels, 9), (channels,), (channels, 9), (channels,)
    parameters = [torch.randn(*shape).to(dtype) for shape in shapes]
    dy = torch.randn(quarters * rows, bins // 4, channels).to(dtype)
    dy[quarters * sum(slots) :] = torch.nan

    def run(backend: str, dtype_: torch.dtype, where: torch.device | str) -> dict[str, Tensor]:
        leaves = [value.to(where, dtype_).requires_grad_() for value in parameters]
        values = x.to(dtype).to(where, dtype_)
        there = layout.to(where), lengths.to(where)
        y = subsampling_stem(values, *leaves, *there, rows_per_slot=per_slot, backend=backend)
        grads = torch.autograd.grad(y, leaves, dy.to(where, dtype_))
        return {name: v.detach().cpu() for name, v in zip(NAMES, (y, *grads), strict=True)}

    gold = run("reference", torch.float64, "cpu")
    baseline, actual = run("reference", dtype, "cpu"), run("triton", dtype, device)
    for name, value in actual.items():
        assert_no_worse(value, gold[name], baseline[name])
    assert not actual["y"][quarters * sum(slots) :].any()


@both
@pytest.mark.representative(per_slot=4)
@pytest.mark.representative(per_slot=8, lengths=(1, 37, 2, 1))
def test_every_layout(lengths: tuple[int, ...], device: torch.device, per_slot: int) -> None:
    _compare(lengths, torch.float32, device, rows=sum(lengths) + 2, per_slot=per_slot)


@pytest.mark.parametrize(("channels", "bins"), [(1, 4), (16, 12), (37, 20), (130, 4)])
@pytest.mark.representative(channels=37)
def test_any_number_of_channels_and_bands(
    channels: int, bins: int, dtype: torch.dtype, device: torch.device
) -> None:
    _compare((3, 1), dtype, device, channels=channels, bins=bins, rows=5)


@both
def test_spans_meet_and_programs_take_several(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, per_slot: int
) -> None:
    small = _triton.Config(16, 16, 32, 4)
    monkeypatch.setattr(_triton, "configs", lambda *_: (small, small))
    monkeypatch.setattr(_triton, "_PATCH_SPAN", 16)
    monkeypatch.setattr(_triton, "_PROGRAMS", 2)
    _compare((9, 0, 8, 5), torch.float32, device, channels=17, rows=23, per_slot=per_slot)


@pytest.mark.parametrize(("sequences", "rows"), [(0, 0), (0, 3), (2, 0), (1, 5)])
@both
def test_nothing_at_all(sequences: int, rows: int, device: torch.device, per_slot: int) -> None:
    _compare((0,) * sequences, torch.float32, device, rows=rows, per_slot=per_slot)


def test_nan_in_the_features_is_not_hidden(device: torch.device) -> None:
    layout = PackedLayout.from_lengths((1,), device)
    x = torch.full((8, 8), torch.nan, device=device)
    ones = [torch.ones(*shape, device=device) for shape in ((2, 9), (2,), (2, 9), (2,))]
    y = subsampling_stem(x, *ones, layout, torch.tensor([8], device=device), backend="triton")
    assert y.isnan().all()


def test_gives_no_gradient_to_features(device: torch.device) -> None:
    layout = PackedLayout.from_lengths((1,), device)
    x = torch.zeros(8, 8, device=device, requires_grad=True)
    rest = [torch.ones(*shape, device=device) for shape in ((2, 9), (2,), (2, 9), (2,))]
    length = torch.tensor([8], device=device)
    with pytest.raises(BackendUnavailable, match="gives no gradient to x"):
        subsampling_stem(x, *rest, layout, length, backend="triton")
    watched = FlopCounterMode(display=False)
    with pytest.raises(BackendUnavailable, match="gives no gradient to x"), watched:
        subsampling_stem(x, *rest, layout, length, backend="triton")
    subsampling_stem(x.detach(), *rest, layout, length, backend="triton")
