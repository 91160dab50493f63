import random
import re
from collections.abc import Callable

import pytest
import torch

from effasr_kernels.gated_activation import ACTIVATIONS, GatedArguments, _triton
from effasr_kernels.runtime import launch
from effasr_kernels.testing import aot

Check = Callable[..., dict[str, aot.Resources]]


def _launches(
    architecture: int,
    activation: str = "silu",
    *,
    rows: int = 500,
    width: int = 6144,
    dtype: torch.dtype = torch.bfloat16,
) -> list[launch.Launch]:
    gate, up = torch.empty(2, rows, width, dtype=dtype)
    given = GatedArguments(gate, up, activation)
    with launch.recording((architecture // 10, architecture % 10)) as launches:
        assert _triton.unsupported_reason(given) is None
        results, saved = _triton.forward(given)
        assert saved == _triton.saved_like(given)
        gradients = _triton.backward(given, results, results, saved)
    for name in ("gate", "up"):
        gradient = gradients[name]
        assert gradient is not None
        assert (gradient.shape, gradient.dtype) == (gate.shape, gate.dtype)
    return launches


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.representative(activation=["silu", "gelu_tanh"])
def test_compiles_for_every_architecture(
    architecture: int, activation: str, compiled_ok: Check
) -> None:
    found = compiled_ok(_launches(architecture, activation), architecture)
    assert set(found) == {"activate_gated", "activate_gated_backward"}
    for needs in found.values():
        assert re.search(r"arith\.muli.*i64", needs.ttir), "offsets are not 64-bit"
        assert "convert_layout" not in needs.ttgir
        assert len(re.findall(r"ld\.global\S*\.v4\.b32", needs.ptx)) >= 8
        assert len(re.findall(r"st\.global\S*\.v4\.b32", needs.ptx)) >= 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.representative(dtype=torch.float32)
def test_compiles_for_every_dtype(dtype: torch.dtype, compiled_ok: Check) -> None:
    compiled_ok(_launches(90, dtype=dtype), 90)


@pytest.mark.parametrize("width", [16, 144])
@pytest.mark.representative(width=144)
def test_compiles_for_other_widths(width: int, compiled_ok: Check) -> None:
    compiled_ok(_launches(90, width=width), 90)


def test_numbers_of_rows_never_compile_anything() -> None:
    draw = random.Random(0)
    keys = {aot.key(one) for _ in range(200) for one in _launches(90, rows=draw.randrange(1, 5000))}
    assert len(keys) == 2
