import pytest
import torch
from torch import Tensor

from effasr_kernels import PackedLayout, depthwise_conv
from effasr_kernels.depthwise_conv import ConvArguments, _triton
from effasr_kernels.runtime import launch, tiles
from effasr_kernels.runtime.deferred_sums import waiting


def _error_of_mean(y: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return the largest error of the mean of each channel, by the sums that the kernels compute.

    In units of u = 2^-24, with M the largest absolute value of a channel and R its range, to first
    order in u; a quotient of a GPU may err by two units in the last place, which is 4 u.

    One of 4 groups of a tile adds n rows by Welford's update. Update k rounds the mean (M) and adds
    a product of a difference and a quotient (1 + 1 + 4 of R / k; the first, of 0, 1 + 4 of M). The
    updates after it reduce these errors to k / n: (n + 1) / 2 + 5 / n of M, and 6 of R. The mean of
    a tile is a sum of 4 products, divided: 1 + 3 + 4 of M. The mean of p tiles, up to 16, is a sum
    of as many products and of zeros, divided: p + 4 of M; that of q such groups q + 4. As n is at
    least 4, 5 / n is at most 3 / 2.
    """
    n = 4 * -(-min(max(sizes), 128) // 16)
    tiles = sum(-(-size // 128) for size in sizes)
    merged = min(tiles, 16) + -(-tiles // 16) + 8
    largest, span = y.abs().amax(0), y.amax(0) - y.amin(0)
    return 2**-24 * ((n / 2 + 10 + merged) * largest + 6 * span)


@pytest.mark.parametrize(
    ("sizes", "tail", "shift"),
    [
        ((9, 1), 2, 0.0),
        # More tiles than are loaded at a time, most of them without a row.
        ((257, 0, 1, 128, 127, *[0] * 66), 7, 0.0),
        # Three groups of tiles, whose statistics are merged apart.
        ((3,) * 39, 7, 0.0),
        # The mean is hundreds of times the deviation: E[y^2] - E[y]^2 would be wrong by a percent.
        ((150, 3), 7, 500.0),
        *(((0,) * sequences, rows, 0.0) for sequences, rows in ((0, 0), (0, 3), (2, 0), (1, 5))),
    ],
    ids=["few", "many", "groups", "shifted", "nothing", "tail", "empty", "empty_and_tail"],
)
def test_statistics(
    sizes: tuple[int, ...], tail: int, shift: float, dtype: torch.dtype, device: torch.device
) -> None:
    """Those of what was returned, as it was rounded."""
    total = sum(sizes)
    x = torch.randn(total + tail, 6).to(dtype)
    x[total:] = torch.nan
    bias = torch.randn(3).add(shift).to(dtype)
    layout = PackedLayout.from_lengths(sizes, device, rows=total + tail)
    y, mean, variance = depthwise_conv(
        *(x.to(device), torch.randn(3, 5).to(device, dtype), layout),
        bias=bias.to(device),
        gated=True,
        statistics=True,
        backend="triton",
    )
    assert not y[total:].any()
    y = y[:total].double().cpu()
    if not total:
        assert not mean.any()
        assert not variance.any()
        return
    spread, rtol = y.var(0, correction=0), 1e-4 if shift else 1e-5
    torch.testing.assert_close(variance.double().cpu(), spread, rtol=rtol, atol=0)
    error = (mean.double().cpu() - y.mean(0)).abs()
    assert bool((error <= _error_of_mean(y, sizes)).all())


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


def test_programs_that_take_several_tiles_add_up_their_gradients(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, device: torch.device
) -> None:
    """Of small integers, whose sums are exact in any order."""
    sizes = (257, 0, 1, 128, 127, *[3] * 9)
    layout = PackedLayout.from_lengths(sizes, device, rows=sum(sizes) + 7, num_sequences=40)
    x, weight, bias, dy = (
        torch.randint(-3, 4, shape).to(device, dtype).requires_grad_()
        for shape in ((layout.rows, 6), (6, 5), (6,), (layout.rows, 6))
    )
    gradients = []
    for programs in (528, 1):
        monkeypatch.setattr(tiles, "_PROGRAMS", programs)
        y = depthwise_conv(x, weight, layout, bias=bias, backend="triton")
        gradients.append(torch.autograd.grad(y, (x, weight, bias), dy))
    assert tiles.tile_programs(layout, 128, 1) == 5
    assert all(map(torch.equal, *gradients))


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
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    ((of_y, *others),) = seen
    # It has the table of the forward, also where the layout keeps none, as in compiled code.
    with launch.recording() as launches:
        torch.autograd.grad(y.sum(), x)
    assert "fill_tile_table" not in [x.kernel.fn.__name__ for x in launches]
    assert of_y.all()
    assert others == [None, None]


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_of_parameters_wait_for_those_of_the_layer(
    bias: bool, device: torch.device
) -> None:
    layout = PackedLayout.from_lengths((3, 2), device)
    x, weight, dy = (torch.randn(*shape, device=device) for shape in ((5, 4), (4, 3), (5, 4)))
    given = ConvArguments(x, weight, layout, x[0].clone() if bias else None, False, False, False)
    saved = (tiles.tile_table(layout, 128),)
    expected = _triton.backward(given, (dy,), (), saved)
    with waiting() as found:
        gradients = _triton.backward(given, (dy,), (), saved)
    (sums,) = found
    assert sums.columns == 12 + 4 * bias
    sums.run()
    for name, column in [("weight", 0), ("bias", 12)][: 1 + bias]:
        gradient, same = gradients[name], expected[name]
        assert gradient is not None
        assert same is not None
        assert sums.column_of(gradient) == column
        assert torch.equal(gradient, same)
