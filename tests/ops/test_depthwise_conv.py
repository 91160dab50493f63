import pytest
import torch
import torch.nn.functional as F

from effasr_kernels import PackedLayout, depthwise_conv, pack

CHANNELS = 3


@pytest.mark.parametrize("tail", [0, 3])
def test_gates_as_torch_does(lengths: tuple[int, ...], tail: int) -> None:
    rows = sum(lengths) + tail
    layout = PackedLayout.from_lengths(lengths, rows=rows)
    x = torch.randn(rows, 2 * CHANNELS, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(CHANNELS, 3, dtype=torch.float64)
    y = depthwise_conv(x, weight, layout, gated=True)
    expected = depthwise_conv(F.glu(x), weight, layout)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(
        torch.autograd.grad(y.square().sum(), x), torch.autograd.grad(expected.square().sum(), x)
    )


def _with_statistics(x: torch.Tensor, layout: PackedLayout) -> tuple[torch.Tensor, ...]:
    weight = torch.linspace(-1, 1, 5).repeat(CHANNELS, 1).to(x.dtype)
    bias = torch.full((CHANNELS,), 7.0, dtype=x.dtype)
    return depthwise_conv(x, weight, layout, bias=bias, statistics=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tail", [0, 3])
def test_statistics_are_those_of_the_real_rows(tail: int, dtype: torch.dtype) -> None:
    x = torch.randn(11 + tail, CHANNELS, dtype=torch.float64).to(dtype).requires_grad_()
    y, mean, variance = _with_statistics(x, PackedLayout.from_lengths((4, 0, 7), rows=11 + tail))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert mean.dtype == variance.dtype == wide
    assert not mean.requires_grad
    assert not variance.requires_grad
    real = y.detach()[:11].to(wide)
    torch.testing.assert_close(mean, real.mean(0))
    torch.testing.assert_close(variance, real.var(0, correction=0))


@pytest.mark.parametrize("rows", [0, 2])
def test_statistics_of_nothing_are_zero(rows: int) -> None:
    y, mean, variance = _with_statistics(
        torch.full((rows, CHANNELS), torch.nan), PackedLayout.from_lengths((0,), rows=rows)
    )
    assert mean.shape == variance.shape == (CHANNELS,)
    assert not y.any()
    assert not mean.any()
    assert not variance.any()


def test_statistics_compile_and_leave_the_gradient_alone() -> None:
    layout = PackedLayout.from_lengths((4, 0, 7), rows=12)
    x = torch.randn(12, CHANNELS, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(_with_statistics, fullgraph=True, backend="aot_eager")
    outcomes = []
    for run in (_with_statistics, compiled):
        y, mean, variance = run(x, layout)
        loss = (y * mean + y.square() * variance).sum()
        outcomes.append((y, mean, variance, *torch.autograd.grad(loss, x)))
    for actual, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(actual, expected)
    _, mean, variance = outcomes[0][:3]
    y = depthwise_conv(
        x,
        torch.linspace(-1, 1, 5).repeat(CHANNELS, 1).double(),
        layout,
        bias=torch.full((CHANNELS,), 7.0, dtype=torch.float64),
    )
    (expected,) = torch.autograd.grad((y * mean + y.square() * variance).sum(), x)
    torch.testing.assert_close(outcomes[0][3], expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("taps", [1, 3, 9])
def test_matches_torch_on_each_sequence(
    lengths: tuple[int, ...], taps: int, causal: bool, bias: bool
) -> None:
    sequences = [torch.randn(n, CHANNELS, dtype=torch.float64) for n in lengths]
    weight = torch.randn(CHANNELS, taps, dtype=torch.float64)
    offset = torch.randn(CHANNELS, dtype=torch.float64) if bias else None
    packed = pack(sequences)
    y = depthwise_conv(packed.values, weight, packed.layout, bias=offset, causal=causal)
    padding = (taps - 1, 0) if causal else (taps // 2, taps // 2)
    for x_n, y_n in zip(sequences, y.split(lengths), strict=True):
        if x_n.shape[0]:
            padded = F.pad(x_n.T[None], padding)
            expected = F.conv1d(padded, weight[:, None], offset, groups=CHANNELS)[0].T
            torch.testing.assert_close(y_n, expected)
