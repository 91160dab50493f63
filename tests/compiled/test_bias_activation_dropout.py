import random
import re
from collections.abc import Callable

import pytest
import torch

from effasr_kernels import PackedLayout
from effasr_kernels.bias_activation_dropout import ACTIVATIONS, ActivationArguments, _triton
from effasr_kernels.runtime import launch
from effasr_kernels.testing import aot

Check = Callable[..., dict[str, aot.Resources]]


def _launches(
    architecture: int,
    activation: str = "silu",
    *,
    channels: int = 2048,
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = True,
    layout: PackedLayout | None = None,
) -> list[launch.Launch]:
    layout = PackedLayout.from_lengths((150, 300), rows=512) if layout is None else layout
    given = ActivationArguments(
        torch.empty(layout.rows, channels, dtype=dtype),
        torch.empty(channels) if bias else None,
        torch.zeros((), dtype=torch.int64),
        layout,
        activation,
        0.1,
        3,
    )
    with launch.recording((architecture // 10, architecture % 10)) as launches:
        assert _triton.unsupported_reason(given) is None
        results, saved = _triton.forward(given)
        assert saved == _triton.saved_like(given)
        gradients = _triton.backward(given, results, results, saved)
    for name, gradient in gradients.items():
        value = getattr(given, name)
        assert (gradient is None) == (value is None)
        if gradient is not None:
            assert (gradient.shape, gradient.dtype) == (value.shape, value.dtype)
    return launches


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_compiles_for_every_architecture(
    architecture: int, activation: str, compiled_ok: Check
) -> None:
    found = compiled_ok(_launches(architecture, activation), architecture)
    assert set(found) == {"activate", "activate_backward", "sum_rows"}
    assert re.search(r"ld\.global\S*\.v4\.b32", found.pop("sum_rows").ptx)
    for needs in found.values():
        assert re.search(r"arith\.muli.*i64", needs.ttir), "offsets are not 64-bit"
        # Neither rows nor what is dropped is exchanged between threads; each has 16 bytes of a row.
        assert not re.search(r"convert_layout.*tensor<4x512x", needs.ttgir)
        assert len(re.findall(r"st\.global\S*\.v4\.b32", needs.ptx)) >= 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.representative(dtype=torch.float32, bias=False)
def test_compiles_for_every_dtype(dtype: torch.dtype, bias: bool, compiled_ok: Check) -> None:
    compiled_ok(_launches(90, dtype=dtype, bias=bias), 90)


@pytest.mark.parametrize("channels", [16, 144, 5120])
@pytest.mark.representative(channels=144)
def test_compiles_for_other_widths(channels: int, compiled_ok: Check) -> None:
    compiled_ok(_launches(90, channels=channels), 90)


def test_layouts_never_compile_anything() -> None:
    draw = random.Random(0)
    keys = set()
    for _ in range(200):
        lengths = [draw.randrange(40) for _ in range(draw.randrange(20))]
        layout = PackedLayout.from_lengths(lengths, rows=sum(lengths) + draw.randrange(20))
        keys |= {aot.key(one) for one in _launches(90, channels=16, layout=layout)}
    assert len(keys) == 3
