import random
import re
from collections.abc import Callable

import pytest
import torch

from effasr_kernels.rms_norm import RMSNormArguments, _triton
from effasr_kernels.runtime import launch
from effasr_kernels.testing import aot

Check = Callable[..., dict[str, aot.Resources]]


def _launches(
    architecture: int,
    *,
    rows: int = 500,
    width: int = 2048,
    offset: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    frozen: bool = False,
) -> list[launch.Launch]:
    x, weight = torch.empty(rows, width, dtype=dtype), torch.empty(width)
    given = RMSNormArguments(x, weight, 1e-6, offset, "bfloat16", frozen)
    with launch.recording((architecture // 10, architecture % 10)) as launches:
        assert _triton.unsupported_reason(given) is None
        results, saved = _triton.forward(given)
        (like,) = _triton.saved_like(given)
        assert (saved[0].shape, saved[0].dtype) == (like.shape, like.dtype)
        gradients = _triton.backward(given, results, results, saved)
    assert set(gradients) == ({"x"} if frozen else {"x", "weight"})
    for name, gradient in gradients.items():
        value = getattr(given, name)
        assert gradient is not None
        assert (gradient.shape, gradient.dtype) == (value.shape, value.dtype)
    return launches


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.representative(offset=0)
def test_compiles_for_every_architecture(
    architecture: int, offset: int, compiled_ok: Check
) -> None:
    found = compiled_ok(_launches(architecture, offset=offset), architecture)
    assert set(found) == {"normalize", "normalize_backward", "sum_rows"}
    for name in ("normalize", "normalize_backward"):
        assert re.search(r"arith\.muli.*i64", found[name].ttir), "offsets are not 64-bit"
        assert re.search(r"ld\.global\S*\.v4\.b32", found[name].ptx)
        assert re.search(r"st\.global\S*\.v4\.b32", found[name].ptx)
        # Tiles are not exchanged between threads.
        assert not re.search(r"convert_layout.*tensor<1x2048x", found[name].ttgir)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.representative(dtype=torch.float32, frozen=True)
def test_compiles_for_every_dtype(dtype: torch.dtype, frozen: bool, compiled_ok: Check) -> None:
    found = compiled_ok(_launches(90, dtype=dtype, frozen=frozen), 90)
    assert ("sum_rows" in found) != frozen


@pytest.mark.parametrize("width", [16, 128, 1152, 5120, 8192])
@pytest.mark.representative(width=[128, 8192])
def test_compiles_for_other_widths(width: int, compiled_ok: Check) -> None:
    compiled_ok(_launches(90, width=width, dtype=torch.float32), 90)


def test_numbers_of_rows_never_compile_anything() -> None:
    draw = random.Random(0)
    keys = {aot.key(one) for _ in range(200) for one in _launches(90, rows=draw.randrange(1, 5000))}
    assert len(keys) == 3


def test_wider_rows_are_refused() -> None:
    given = RMSNormArguments(torch.empty(1, 8193), torch.empty(8193), 1e-6, 0, "float32")
    assert _triton.unsupported_reason(given) == "more than 8,192 channels do not fit in registers"
