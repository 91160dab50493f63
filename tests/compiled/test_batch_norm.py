import random
import re
from collections.abc import Callable

import pytest
import torch

from effasr_kernels import PackedLayout
from effasr_kernels.batch_norm import BatchNormArguments, _triton
from effasr_kernels.runtime import launch
from effasr_kernels.testing import aot
from effasr_kernels.update_running_statistics import UpdateArguments
from effasr_kernels.update_running_statistics import _triton as running

Check = Callable[..., dict[str, aot.Resources]]


def _launches(
    architecture: int,
    channels: int,
    dtype: torch.dtype,
    *,
    layout: PackedLayout | None = None,
    silu: bool = True,
    fixed: bool = False,
) -> list[launch.Launch]:
    layout = PackedLayout.from_lengths((150, 300), rows=512) if layout is None else layout
    parameters = [torch.empty(channels) for _ in range(4)]
    x = torch.empty(layout.rows, channels, dtype=dtype)
    arguments = BatchNormArguments(x, *parameters, layout, 1e-5, silu, fixed)
    batches = torch.tensor(0)
    update = UpdateArguments(*parameters[:2], batches, *parameters[2:], layout, 0.1)
    with launch.recording((architecture // 10, architecture % 10)) as launches:
        assert _triton.unsupported_reason(arguments) is None
        results, saved = _triton.forward(arguments)
        gradients = _triton.backward(arguments, results, results, saved)
        assert running.unsupported_reason(update) is None
        running.run(*[update] * 17)
    for name in ("x", "weight", "bias"):
        gradient, given = gradients[name], getattr(arguments, name)
        assert gradient is not None
        assert (gradient.shape, gradient.dtype) == (given.shape, given.dtype)
    return launches


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("channels", [512, 1024])
@pytest.mark.representative(channels=512)
def test_compiles_for_every_architecture(
    architecture: int, channels: int, compiled_ok: Check
) -> None:
    found = compiled_ok(_launches(architecture, channels, torch.bfloat16), architecture)
    assert set(found) == {"normalize", "sum_gradients", "normalize_backward", "update"}
    # A thread loads 8 values with 16 bytes; and SiLU computes one exponential of each value.
    for name, values, tensors in (
        *(("normalize", 32, 1), ("sum_gradients", 16, 2), ("normalize_backward", 16, 2)),
    ):
        needs = found[name]
        # A multiprocessor runs four programs.
        assert needs.registers <= 128
        assert re.search(r"arith\.muli.*i64", needs.ttir), "offsets are not 64-bit"
        ptx = needs.ptx
        assert len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)) >= values // 8 * tensors
        assert not re.search(r"ld\.global\S*\.b16", ptx)
        assert len(re.findall(r"ex2\.approx", ptx)) == values


@pytest.mark.parametrize(
    ("channels", "dtype", "silu", "fixed"),
    [
        (512, torch.float16, True, False),
        (512, torch.float32, True, False),
        (176, torch.bfloat16, False, True),
        (145, torch.bfloat16, True, True),
    ],
)
@pytest.mark.representative(dtype=torch.float32)
@pytest.mark.representative(silu=False)
def test_compiles_for_every_kind(
    channels: int, dtype: torch.dtype, silu: bool, fixed: bool, compiled_ok: Check
) -> None:
    compiled_ok(_launches(90, channels, dtype, silu=silu, fixed=fixed), 90)


def test_layouts_never_compile_anything() -> None:
    draw = random.Random(0)
    keys = set()
    for _ in range(200):
        lengths = [draw.randrange(40) for _ in range(draw.randrange(20))]
        layout = PackedLayout.from_lengths(lengths, rows=sum(lengths) + draw.randrange(20))
        keys |= {aot.key(one) for one in _launches(90, 64, torch.bfloat16, layout=layout)}
    assert len(keys) == 4
