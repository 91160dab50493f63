import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from effasr_kernels import PackedLayout
from effasr_kernels.dropout_add_layer_norm import NormArguments, _triton
from effasr_kernels.runtime import launch
from effasr_kernels.testing import aot

Check = Callable[..., dict[str, aot.Resources]]
MODES = ["pre-norm", "post-norm", "addition", "norm"]
BIASED = ["pre-norm, bias", "post-norm, bias", "addition, bias"]


def _launches(
    architecture: int,
    mode: str = "pre-norm",
    *,
    channels: int = 1024,
    dtype: torch.dtype = torch.bfloat16,
    stream: torch.dtype = torch.float32,
    dropout: float = 0.1,
    layout: PackedLayout | None = None,
) -> list[launch.Launch]:
    layout = PackedLayout.from_lengths((150, 300), rows=512) if layout is None else layout
    rows = layout.rows
    mode, _, biased = mode.partition(", ")
    has_branch = mode != "norm"
    parameter = None if mode == "addition" else torch.empty(channels)
    arguments: dict[str, Any] = {
        "residual": torch.empty(rows, channels, dtype=stream),
        "x": torch.empty(rows, channels, dtype=dtype) if has_branch else None,
        "weight": parameter,
        "bias": parameter,
        "x_bias": torch.empty(channels, dtype=dtype) if biased else None,
        "seed": torch.zeros((), dtype=torch.int64) if has_branch and dropout else None,
    }
    options: dict[str, Any] = {
        "scale": 0.5,
        "dropout": dropout if has_branch else 0.0,
        "eps": 1e-5,
        "prenorm": mode != "post-norm",
        "offset": 3,
        "has_branch": has_branch,
        "dtype": str(dtype).removeprefix("torch."),
    }
    given = NormArguments(**arguments, layout=layout, **options)
    with launch.recording((architecture // 10, architecture % 10)) as launches:
        assert _triton.unsupported_reason(given) is None
        results, saved = _triton.forward(given)
        like = _triton.saved_like(given)
        assert [(x.shape, x.dtype) for x in saved] == [(x.shape, x.dtype) for x in like]
        gradients = _triton.backward(given, results, results, saved)
    for name, gradient in gradients.items():
        assert gradient is not None or arguments[name] is None
        if gradient is not None:
            assert gradient.shape == arguments[name].shape
            assert gradient.dtype == arguments[name].dtype
    return launches


def _accesses(ptx: str) -> tuple[set[str], set[str]]:
    """Return the widths of loads and stores of rows, in 32-bit words."""
    found = [set(re.findall(rf"{kind}\.global\S*\.(v\d)\.b32", ptx)) for kind in ("ld", "st")]
    return found[0], found[1]


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_compiles_for_every_architecture(architecture: int, compiled_ok: Check) -> None:
    found = compiled_ok(_launches(architecture), architecture)
    assert set(found) == {"add_norm", "add_norm_backward", "sum_rows"}
    found.pop("sum_rows")
    for needs in found.values():
        assert re.search(r"arith\.muli.*i64", needs.ttir), "offsets are not 64-bit"
        # 16 bytes of float32 and 8 of bfloat16, four columns of a thread.
        assert _accesses(needs.ptx) == ({"v4", "v2"}, {"v4", "v2"})


@pytest.mark.parametrize("mode", [*MODES, *BIASED])
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
@pytest.mark.representative(
    stream=torch.bfloat16, mode=["pre-norm, bias", "post-norm", "addition", "norm"]
)
def test_compiles_in_every_mode(mode: str, stream: torch.dtype, compiled_ok: Check) -> None:
    found = compiled_ok(_launches(90, mode, channels=512, stream=stream), 90)
    found.pop("sum_rows", None)
    for needs in found.values():
        # Neither rows nor what is dropped is exchanged between threads.
        assert not re.search(r"convert_layout.*tensor<4x512x", needs.ttgir)
        if stream == torch.bfloat16:
            assert _accesses(needs.ptx) == ({"v4"}, {"v4"})


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.representative(dtype=torch.float32)
def test_compiles_for_every_dtype(dtype: torch.dtype, compiled_ok: Check) -> None:
    compiled_ok(_launches(90, dtype=dtype, dropout=0.0), 90)


@pytest.mark.parametrize("channels", [16, 144, 768, 1280, 4096])
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
