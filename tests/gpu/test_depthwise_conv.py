from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from effasr_kernels import BackendUnavailable, PackedLayout, depthwise_conv
from effasr_kernels.depthwise_conv import ConvArguments, _triton
from effasr_kernels.runtime.deferred_sums import waiting
from effasr_kernels.testing.conformance import Case, check_kernel
from effasr_kernels.testing.tolerance import assert_no_worse
from tests.gpu.conftest import EMULATED


def _case_for(
    lengths: tuple[int, ...], channels: int, taps: int, *, causal: bool, gated: bool
) -> Callable[[str], Case]:
    width = 2 * channels if gated else channels
    packed = {"x": [torch.randn(n, width, dtype=torch.float64) for n in lengths]}
    shared = {
        "weight": torch.randn(channels, taps, dtype=torch.float64),
        "bias": torch.randn(channels, dtype=torch.float64),
    }
    return lambda backend: Case(
        lambda packed, shared: depthwise_conv(
            packed["x"].values,
            shared["weight"],
            packed["x"].layout,
            bias=shared["bias"],
            causal=causal,
            gated=gated,
            backend=backend,
        ),
        packed,
        shared,
        results=("x",),
    )


def test_keeps_the_contract(
    lengths: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    check_kernel(_case_for(lengths, 5, 3, causal=False, gated=True), dtype, device)


def test_keeps_the_contract_otherwise_too(dtype: torch.dtype, device: torch.device) -> None:
    check_kernel(_case_for((5, 0, 11), 5, 4, causal=True, gated=False), dtype, device)


def _compare(
    lengths: tuple[int, ...],
    channels: int,
    taps: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    rows: int | None = None,
    causal: bool = False,
    gated: bool = True,
    bias: bool = True,
    scale: float = 1.0,
    shift: float = 0.0,
    rtol: float = 1e-5,
) -> dict[str, Tensor]:
    """Compare y, its statistics and the gradients, with a tail of NaN; return those of Triton."""
    rows = sum(lengths) if rows is None else rows
    width = 2 * channels if gated else channels
    x = torch.randn(rows, width).mul(scale).to(dtype)
    x[sum(lengths) :] = torch.nan
    parameters = [torch.randn(channels, taps).to(dtype)]
    parameters += [torch.randn(channels).add(shift).to(dtype)] if bias else []
    dy = torch.randn(rows, channels).to(dtype)
    dy[sum(lengths) :] = torch.nan
    names = ["y", "mean", "variance", "dx", "dweight", "dbias"]

    def run(backend: str, dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
        leaves = [value.to(device, dtype).requires_grad_() for value in (x, *parameters)]
        results = depthwise_conv(
            leaves[0],
            leaves[1],
            PackedLayout.from_lengths(lengths, device, rows=rows),
            bias=leaves[2] if bias else None,
            causal=causal,
            gated=gated,
            statistics=True,
            backend=backend,
        )
        grads = torch.autograd.grad(results[0], leaves, dy.to(device, dtype))
        return {n: v.detach().cpu() for n, v in zip(names, (*results, *grads), strict=False)}

    gold = run("reference", torch.float64, "cpu")
    baseline, actual = run("reference", dtype, "cpu"), run("triton", dtype, device)
    for name in actual.keys() - {"mean", "variance"}:
        assert_no_worse(actual[name], gold[name], baseline[name])
    # The statistics are those of what was returned, as it was rounded.
    y = actual["y"][: sum(lengths)].double()
    if len(y):
        spread = y.var(0, correction=0)
        torch.testing.assert_close(actual["variance"].double(), spread, rtol=rtol, atol=0)
        error = (actual["mean"].double() - y.mean(0)).abs()
        assert bool((error <= _error_of_mean(y, max(lengths))).all())
    assert not actual["y"][sum(lengths) :].any()
    assert not actual["dx"][sum(lengths) :].any()
    return actual


def _error_of_mean(y: Tensor, longest: int) -> Tensor:
    """Return the largest error of the mean of each channel, by the sums that the kernels compute.

    In units of u = 2^-24, with M the largest absolute value of a channel and R its range, to first
    order in u; a quotient of a GPU may err by two units in the last place, which is 4 u.

    One of 4 groups of a tile adds n rows by Welford's update. Update k rounds the mean (M) and adds
    a product of a difference and a quotient (1 + 1 + 4 of R / k; the first, of 0, 1 + 4 of M). The
    updates after it reduce these errors to k / n: (n + 1) / 2 + 5 / n of M, and 6 of R. The mean of
    a tile is a sum of 4 products, divided: 1 + 3 + 4 of M. The mean of all rows is a sum of up to 8
    such products and of zeros, divided: 1 + 7 + 4 of M. As n is at least 4, 5 / n is at most 3 / 2.
    """
    n = 4 * -(-min(longest, 128) // 16)
    largest, span = y.abs().amax(0), y.amax(0) - y.amin(0)
    return 2**-24 * ((n / 2 + 22) * largest + 6 * span)


def test_tiles_of_one_sequence_meet(dtype: torch.dtype, device: torch.device) -> None:
    """The statistics of more tiles than are loaded at a time, most of them without a row."""
    lengths = (257, 0, 1, 128, 127, *[0] * 66)
    _compare(lengths, 3, 5, dtype, device, rows=520)


@pytest.mark.parametrize("taps", [1, 11, 12, 17, 18, 32])
@pytest.mark.representative(taps=[1, 12, 32])
def test_any_number_of_taps(taps: int, dtype: torch.dtype, device: torch.device) -> None:
    if EMULATED and taps in (12, 18, 32):
        pytest.skip("long to compile: `tests/compiled` does it once, and 1, 11 and 17 run here")
    _compare((9, 1), 2, taps, dtype, device, causal=taps % 2 == 0, rows=12)


@pytest.mark.parametrize("channels", [1, 32, 33, 130])
@pytest.mark.representative(channels=33)
def test_any_number_of_channels(channels: int, dtype: torch.dtype, device: torch.device) -> None:
    _compare((9, 3), channels, 3, dtype, device, rows=13)


@pytest.mark.parametrize(("gated", "causal"), [(False, False), (True, True)])
@pytest.mark.representative(gated=True)
def test_bias_can_be_left_out(
    gated: bool, causal: bool, dtype: torch.dtype, device: torch.device
) -> None:
    _compare((4, 7), 3, 3, dtype, device, gated=gated, causal=causal, bias=False)


@pytest.mark.parametrize(("sequences", "rows"), [(0, 0), (0, 3), (2, 0), (1, 5)])
def test_nothing_at_all(sequences: int, rows: int, device: torch.device) -> None:
    found = _compare((0,) * sequences, 3, 3, torch.float32, device, rows=rows)
    assert not any(value.any() for value in found.values())


def test_statistics_do_not_cancel(device: torch.device) -> None:
    # The mean is hundreds of times the deviation: E[y^2] - E[y]^2 would be wrong by a percent.
    _compare((150, 3), 3, 3, torch.float32, device, rows=160, scale=1e-2, shift=5.0, rtol=1e-4)


def test_statistics_repeat_to_the_bit_and_change_nothing_else(
    dtype: torch.dtype, device: torch.device
) -> None:
    layout = PackedLayout.from_lengths((20, 140), device, rows=170)
    x, weight = torch.randn(170, 6, dtype=torch.float32), torch.randn(3, 5)
    x, weight = x.to(device, dtype), weight.to(device, dtype)
    plain = depthwise_conv(x, weight, layout, gated=True, backend="triton")
    first, second = (
        depthwise_conv(x, weight, layout, gated=True, statistics=True, backend="triton")
        for _ in range(2)
    )
    assert all(map(torch.equal, first, second))
    assert torch.equal(plain, first[0])


def test_no_gradients_of_the_statistics_are_made(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Autograd would write zeros, one launch for each."""
    seen = []
    backward = _triton.backward

    def note(arguments, grads, *others):
        seen.append(grads)
        return backward(arguments, grads, *others)

    monkeypatch.setattr(_triton, "backward", note)
    layout = PackedLayout.from_lengths((3, 2), device)
    x, weight = torch.randn(5, 4, device=device), torch.randn(4, 3, device=device)
    x.requires_grad_()
    y, *_ = depthwise_conv(x, weight, layout, statistics=True, backend="triton")
    torch.autograd.grad(y.sum(), x)
    ((of_y, *others),) = seen
    assert of_y.all()
    assert others == [None, None]


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_parameters_wait_for_those_of_the_layer(
    bias: bool, device: torch.device
) -> None:
    layout = PackedLayout.from_lengths((3, 2), device)
    x, weight, dy = (torch.randn(*shape, device=device) for shape in ((5, 4), (4, 3), (5, 4)))
    given = ConvArguments(x, weight, layout, x[0].clone() if bias else None, False, False, False)
    expected = _triton.backward(given, (dy,), (), ())
    with waiting() as found:
        gradients = _triton.backward(given, (dy,), (), ())
    (sums,) = found
    assert sums.columns == 12 + 4 * bias
    sums.run()
    for name, column in [("weight", 0), ("bias", 12)][: 1 + bias]:
        gradient, same = gradients[name], expected[name]
        assert gradient is not None
        assert same is not None
        assert sums.column_of(gradient) == column
        assert torch.equal(gradient, same)


def test_a_row_of_a_larger_tensor_may_be_given(dtype: torch.dtype, device: torch.device) -> None:
    layout = PackedLayout.from_lengths((5, 2), device)
    wide, weight = torch.randn(7, 10).to(device, dtype), torch.randn(3, 3).to(device, dtype)
    rows = wide[:, 2:8]
    whole = depthwise_conv(rows.contiguous(), weight, layout, gated=True, backend="triton")
    assert torch.equal(depthwise_conv(rows, weight, layout, gated=True, backend="triton"), whole)


def test_says_why_it_cannot_serve(device: torch.device) -> None:
    x, weight = torch.zeros(4, 2, device=device), torch.zeros(2, 33, device=device)
    layout = PackedLayout.from_lengths((4,), device)
    with pytest.raises(BackendUnavailable, match="more than 32 taps"):
        depthwise_conv(x, weight, layout, backend="triton")
