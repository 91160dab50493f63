from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from effasr_kernels import PackedLayout, depthwise_conv, pack
from effasr_kernels.conformance import Case, check_compiler

CHANNELS = 3


def _case(lengths: tuple[int, ...], *, taps: int = 5, causal: bool = False) -> Case:
    return Case(
        lambda packed, shared: depthwise_conv(
            packed["x"].values,
            shared["weight"],
            packed["x"].layout,
            bias=shared["bias"],
            causal=causal,
        ),
        {"x": [torch.randn(n, CHANNELS, dtype=torch.float64) for n in lengths]},
        {
            "weight": torch.randn(CHANNELS, taps, dtype=torch.float64),
            "bias": torch.randn(CHANNELS, dtype=torch.float64),
        },
        results=("x",),
    )


@pytest.mark.parametrize(("taps", "causal"), [(5, False), (4, True), (1, False)])
def test_keeps_the_contract(
    check: Callable[[Case], None], lengths: tuple[int, ...], taps: int, causal: bool
) -> None:
    check(_case(lengths, taps=taps, causal=causal))


def test_compiles() -> None:
    check_compiler(_case((5, 0, 2)))


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": torch.zeros(4)}, r"`x` must have shape \(T, C\) = \(any, any\), but is \(4,\)"),
        ({"x": torch.zeros(5, 3)}, r"`x` must have 4 rows, as `layout` does, but is \(5, 3\)"),
        ({"weight": torch.zeros(2, 3)}, r"`weight` must have shape .* = \(3, any\).*\(2, 3\)"),
        ({"weight": torch.zeros(3, 0)}, r"`weight` must have at least one tap, but is 0"),
        ({"weight": torch.zeros(3, 4)}, r"odd number of taps unless causal, but is 4"),
        ({"bias": torch.zeros(4)}, r"`bias` must have shape \(C,\) = \(3,\), but is \(4,\)"),
        ({"bias": torch.zeros(3).double()}, r"`bias` must be torch.float32, as `x` is.*float64"),
        ({"x": torch.zeros(4, 3).long()}, r"`x` must be float16, .*, but is torch.int64"),
    ],
)
def test_says_what_is_wrong(arguments: dict[str, torch.Tensor], message: str) -> None:
    given = {"x": torch.zeros(4, 3), "weight": torch.zeros(3, 3)} | arguments
    with pytest.raises(ValueError, match="^depthwise_conv: .*" + message):
        depthwise_conv(layout=PackedLayout.from_lengths([1, 3]), **given)
