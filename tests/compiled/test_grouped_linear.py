"""The kernels of `grouped_linear`, compiled without a GPU."""

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from effasr_kernels import PackedLayout
from effasr_kernels.grouped_linear import GroupedLinearArguments, _triton
from effasr_kernels.runtime import launch
from effasr_kernels.testing import aot

Check = Callable[..., dict[str, aot.Resources]]
PRODUCTS = {"multiply", "multiply_transposed"}


def _launches(
    architecture: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    inputs: int = 512,
    outputs: int = 2048,
    groups: int = 4,
    bias: bool = True,
    layout: PackedLayout | None = None,
) -> list[launch.Launch]:
    if layout is None:
        layout = PackedLayout.from_lengths((150, 0, 300, *[1] * (groups - 3)), rows=512)
    weight = torch.empty(layout.num_sequences, outputs, inputs, dtype=dtype)
    arguments: dict[str, Any] = {
        "x": torch.empty(layout.rows, inputs, dtype=dtype),
        "weight": weight,
        "layout": layout,
        "bias": torch.empty(weight.shape[:2], dtype=dtype) if bias else None,
    }
    with launch.recording(divmod(architecture, 10)) as launches:
        assert _triton.unsupported_reason(GroupedLinearArguments(**arguments)) is None
        results, saved = _triton.forward(GroupedLinearArguments(**arguments))
        gradients = _triton.backward(GroupedLinearArguments(**arguments), results, results, saved)
    for name, gradient in gradients.items():
        given = arguments[name]
        if given is None or gradient is None:
            assert gradient is given
        else:
            assert gradient.shape == given.shape
            assert gradient.dtype == given.dtype
    return launches


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_compiles_for_every_architecture(architecture: int, compiled_ok: Check) -> None:
    found = compiled_ok(_launches(architecture), architecture, products=PRODUCTS)
    assert set(found) == PRODUCTS
    for needs in found.values():
        assert re.search(r"arith\.muli.*i64", needs.ttir), "offsets are not 64-bit"
    if architecture >= 90:
        # Two programs of 256 threads fit on a multiprocessor.
        assert found["multiply"].registers <= 128
        assert 2 * found["multiply"].shared <= aot.SHARED_LIMIT[architecture]


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float32},
        {"dtype": torch.float16},
        {"inputs": 145, "outputs": 100, "bias": False},
        {"inputs": 2048, "outputs": 512, "bias": False},
        {"inputs": 256, "outputs": 256},
    ],
    ids=str,
)
@pytest.mark.representative(options=[{"dtype": torch.float32}, {"inputs": 256, "outputs": 256}])
def test_compiles_for_every_kind(options: dict, compiled_ok: Check) -> None:
    products = set() if options.get("dtype") == torch.float32 else PRODUCTS
    compiled_ok(_launches(90, **options), 90, products=products)


def test_layouts_never_compile_anything() -> None:
    draw = random.Random(0)
    keys = set()
    for _ in range(200):
        lengths = [draw.randrange(40) for _ in range(4)]
        layout = PackedLayout.from_lengths(lengths, rows=sum(lengths) + draw.randrange(20))
        keys |= {aot.key(one) for one in _launches(90, layout=layout)}
    # The product of the forward, that of the gradient of x, and that of the weight's.
    assert len(keys) == 3
