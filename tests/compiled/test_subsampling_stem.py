import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from effasr_kernels import PackedLayout
from effasr_kernels.runtime import launch
from effasr_kernels.subsampling_stem import StemArguments, _triton
from effasr_kernels.testing import aot

Check = Callable[..., dict[str, aot.Resources]]
NAMES = {"stem_patches", "stem_forward", "stem_backward", "sum_rows"}
PRODUCTS = ("stem_forward", "stem_backward")


def _launches(
    architecture: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    bins: int = 80,
    channels: int = 256,
    layout: PackedLayout | None = None,
    lengths_dtype: torch.dtype = torch.int64,
    per_slot: int = 8,
) -> list[launch.Launch]:
    layout = PackedLayout.from_lengths((150, 300), rows=512) if layout is None else layout
    arguments: dict[str, Any] = {
        "x": torch.empty(per_slot * layout.rows, bins, dtype=dtype),
        "weight": torch.empty(channels, 9, dtype=dtype),
        "bias": torch.empty(channels, dtype=dtype),
        "depthwise_weight": torch.empty(channels, 9, dtype=dtype),
        "depthwise_bias": torch.empty(channels, dtype=dtype),
        "layout": layout,
        "lengths": torch.zeros(layout.num_sequences, dtype=lengths_dtype),
        "rows_per_slot": per_slot,
    }
    with launch.recording((architecture // 10, architecture % 10)) as launches:
        assert _triton.unsupported_reason(StemArguments(**arguments)) is None
        results, saved = _triton.forward(StemArguments(**arguments))
        assert saved == _triton.saved_like(StemArguments(**arguments))
        gradients = _triton.backward(StemArguments(**arguments), results, results, saved)
    assert results[0].shape == (per_slot // 4 * layout.rows, bins // 4, channels)
    for name, gradient in gradients.items():
        assert gradient is not None
        assert gradient.shape == arguments[name].shape
        assert gradient.dtype == dtype
    return launches


@pytest.mark.parametrize("per_slot", [4, 8])
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_compiles_for_every_architecture(
    architecture: int, per_slot: int, compiled_ok: Check
) -> None:
    launches = _launches(architecture, per_slot=per_slot)
    found = compiled_ok(launches, architecture, products=PRODUCTS)
    assert set(found) == NAMES
    for needs in found.values():
        assert re.search(r"arith\.muli.*i64", needs.ttir), "offsets are not 64-bit"
    # Sixteen bytes at a time: to memory, and from there straight to where the products read.
    assert re.search(r"st\.global\S*\.v4\.b32", found["stem_patches"].ptx)
    assert re.search(r"st\.global\S*\.v4\.b32", found["stem_forward"].ptx)
    for name in PRODUCTS:
        assert len(re.findall(r"cp\.async\.c[ag]\S*", found[name].ptx)) >= 9
        assert not re.search(r"st\.global\S*\.b16", found[name].ptx)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.representative(dtype=torch.float32)
@pytest.mark.extended
def test_compiles_for_every_dtype(dtype: torch.dtype, compiled_ok: Check) -> None:
    products = () if dtype == torch.float32 else PRODUCTS
    compiled_ok(_launches(90, dtype), 90, products=products)


@pytest.mark.parametrize(("bins", "channels"), [(64, 16), (128, 144)])
@pytest.mark.extended
def test_compiles_for_other_widths(bins: int, channels: int, compiled_ok: Check) -> None:
    launches = _launches(90, bins=bins, channels=channels, lengths_dtype=torch.int32)
    compiled_ok(launches, 90, products=PRODUCTS)


def test_partial_sums_stay_small() -> None:
    """However long the batch, the backward's buffer is of one size: four megabytes."""
    for slots in (10_000, 100_000):
        layout = PackedLayout.from_lengths((slots,))
        with launch.recording() as launches:
            x = torch.empty(8 * slots, 80, dtype=torch.bfloat16, device="meta")
            taps, bias = x.new_empty(256, 9), x.new_empty(256)
            lengths = torch.empty(1, dtype=torch.int64, device="meta")
            grad = x.new_empty(2 * slots, 20, 256)
            arguments = StemArguments(x, taps, bias, taps, bias, layout, lengths)
            _triton.backward(arguments, (grad,), (grad,), ())
        assert launches[-1].args["partials"].numel() == 198 * 256 * 20


def test_layouts_never_compile_anything() -> None:
    draw = random.Random(0)
    keys = set()
    for number in range(200):
        lengths = [draw.randrange(40) for _ in range(draw.randrange(20))]
        layout = PackedLayout.from_lengths(lengths, rows=sum(lengths) + draw.randrange(20))
        launches = _launches(90, bins=8, channels=16, layout=layout, per_slot=4 + number % 2 * 4)
        keys |= {aot.key(one) for one in launches}
    assert len(keys) == len(NAMES)
