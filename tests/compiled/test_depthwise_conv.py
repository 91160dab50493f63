import random
import re
from collections.abc import Callable

import pytest
import torch

from effasr_kernels import PackedLayout
from effasr_kernels.depthwise_conv import ConvArguments, _triton
from effasr_kernels.runtime import launch
from effasr_kernels.testing import aot

Check = Callable[..., dict[str, aot.Resources]]


def _launches(
    architecture: int,
    taps: int,
    channels: int,
    dtype: torch.dtype,
    *,
    layout: PackedLayout | None = None,
    gated: bool = True,
    causal: bool = False,
    bias: bool = True,
) -> list[launch.Launch]:
    layout = PackedLayout.from_lengths((150, 300), rows=512) if layout is None else layout
    arguments = {
        "x": torch.empty(layout.rows, 2 * channels if gated else channels, dtype=dtype),
        "weight": torch.empty(channels, taps, dtype=dtype),
        "layout": layout,
        "bias": torch.empty(channels, dtype=dtype) if bias else None,
        "causal": causal,
        "gated": gated,
        "statistics": gated,
    }
    with launch.recording((architecture // 10, architecture % 10)) as launches:
        assert _triton.unsupported_reason(ConvArguments(**arguments)) is None
        results, saved = _triton.forward(ConvArguments(**arguments))
        like = _triton.saved_like(ConvArguments(**arguments))
        assert [(x.shape, x.dtype) for x in saved] == [(x.shape, x.dtype) for x in like]
        gradients = _triton.backward(ConvArguments(**arguments), results, results, saved)
    for name, gradient in gradients.items():
        given = arguments[name]
        if given is None:
            assert gradient is None
        else:
            assert gradient.shape == given.shape
            assert gradient.dtype == given.dtype
    return launches


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_compiles_for_every_architecture(architecture: int, compiled_ok: Check) -> None:
    found = compiled_ok(_launches(architecture, 9, 512, torch.bfloat16), architecture)
    assert set(found) == {"convolve", "convolve_backward", "sum_rows"}
    # A multiprocessor runs four programs, though the last of them merge statistics.
    assert found["convolve"].registers <= 128
    for needs in found.values():
        assert re.search(r"arith\.muli.*i64", needs.ttir), "offsets are not 64-bit"
    # Four channels of a thread at a time; and each input is gated once, not for each tap: four in
    # a pass of the loop, and in the forward the eight rows before it.
    for name, gated in (("convolve", 12), ("convolve_backward", 4)):
        ptx = found[name].ptx
        assert len(re.findall(r"ex2\.approx", ptx)) == 4 * gated
        assert len(re.findall(r"ld\.global\S*\.v2\.b32", ptx)) >= 2 * gated


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.representative(dtype=torch.float32)
@pytest.mark.extended
def test_compiles_for_every_dtype(dtype: torch.dtype, compiled_ok: Check) -> None:
    compiled_ok(_launches(90, 9, 512, dtype), 90)


@pytest.mark.parametrize(
    ("taps", "channels", "gated", "causal", "bias"),
    [
        (9, 512, False, False, True),
        (9, 512, False, True, False),
        (5, 176, True, False, True),
        (7, 145, True, True, True),
        (15, 256, True, False, True),
    ],
)
@pytest.mark.representative(taps=7)
def test_compiles_for_every_kind(
    taps: int, channels: int, gated: bool, causal: bool, bias: bool, compiled_ok: Check
) -> None:
    launches = _launches(90, taps, channels, torch.bfloat16, gated=gated, causal=causal, bias=bias)
    compiled_ok(launches, 90)


@pytest.mark.parametrize("taps", [17, pytest.param(32, marks=pytest.mark.extended)])
@pytest.mark.extended
def test_the_most_taps_fit_in_registers(taps: int, compiled_ok: Check) -> None:
    causal = taps % 2 == 0
    compiled_ok(_launches(90, taps, 512, torch.float32, causal=causal), 90)


def test_layouts_never_compile_anything() -> None:
    draw = random.Random(0)
    keys = set()
    for _ in range(200):
        lengths = [draw.randrange(40) for _ in range(draw.randrange(20))]
        layout = PackedLayout.from_lengths(lengths, rows=sum(lengths) + draw.randrange(20))
        keys |= {aot.key(one) for one in _launches(90, 9, 64, torch.bfloat16, layout=layout)}
    assert len(keys) == 3
