import random
import re
from collections.abc import Callable

import pytest
import torch

from effasr_kernels import PackedLayout
from effasr_kernels.runtime import launch
from effasr_kernels.strided_depthwise import StridedArguments, _triton
from effasr_kernels.testing import aot

Check = Callable[..., dict[str, aot.Resources]]
NAMES = {"strided_forward", "strided_backward", "sum_rows"}


def _launches(
    architecture: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    bins: int = 20,
    channels: int = 256,
    relu: bool = False,
    layout: PackedLayout | None = None,
) -> list[launch.Launch]:
    layout = PackedLayout.from_lengths((150, 300), rows=512) if layout is None else layout
    arguments = {
        "x": torch.empty(2 * layout.rows, bins, channels, dtype=dtype),
        "weight": torch.empty(channels, 9, dtype=dtype),
        "bias": torch.empty(channels, dtype=dtype),
        "layout": layout,
        "lengths": torch.zeros(layout.num_sequences, dtype=torch.int64),
        "relu": relu,
    }
    with launch.recording((architecture // 10, architecture % 10)) as launches:
        assert _triton.unsupported_reason(StridedArguments(**arguments)) is None
        results, saved = _triton.forward(StridedArguments(**arguments))
        assert saved == _triton.saved_like(StridedArguments(**arguments))
        gradients = _triton.backward(StridedArguments(**arguments), results, results, saved)
    assert results[0].shape == (layout.rows, bins // 2, channels)
    for name, gradient in gradients.items():
        assert gradient is not None
        assert gradient.shape == arguments[name].shape
        assert gradient.dtype == dtype
    return launches


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("relu", [False, True])
def test_compiles_for_every_architecture(architecture: int, relu: bool, compiled_ok: Check) -> None:
    found = compiled_ok(_launches(architecture, relu=relu), architecture)
    assert set(found) == NAMES
    for needs in found.values():
        assert re.search(r"arith\.muli.*i64", needs.ttir), "offsets are not 64-bit"
    # A thread has eight channels at a time forward, and four backward; each input is read once.
    forward, backward = (found[name].ptx for name in ("strided_forward", "strided_backward"))
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", forward)) == 9
    assert len(re.findall(r"st\.global\S*\.v4\.b32", forward)) == 1
    assert len(re.findall(r"ld\.global\S*\.v2\.b32", backward)) == 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.representative(dtype=torch.float32)
def test_compiles_for_every_dtype(dtype: torch.dtype, compiled_ok: Check) -> None:
    compiled_ok(_launches(90, dtype), 90)


@pytest.mark.parametrize(("bins", "channels"), [(16, 16), (32, 144)])
@pytest.mark.extended
def test_compiles_for_other_widths(bins: int, channels: int, compiled_ok: Check) -> None:
    compiled_ok(_launches(90, bins=bins, channels=channels), 90)


def test_layouts_never_compile_anything() -> None:
    draw = random.Random(0)
    keys = set()
    for _ in range(200):
        lengths = [draw.randrange(40) for _ in range(draw.randrange(20))]
        layout = PackedLayout.from_lengths(lengths, rows=sum(lengths) + draw.randrange(20))
        launches = _launches(90, bins=4, channels=16, layout=layout)
        keys |= {aot.key(one) for one in launches}
    assert len(keys) == len(NAMES)
