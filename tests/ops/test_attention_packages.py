"""torch's attention and the flash-attn packages behind ours, on a GPU that has them."""

import pytest
import torch

from effasr_kernels import BackendUnavailable, PackedLayout, attention
from tests.support.conformance import (
    Variation,
    check_kernel,
    check_order,
    check_repeats,
    check_static_shape,
    check_strides,
)
from tests.support.operation_cases import FACTORIES
from tests.support.tolerance import assert_no_worse

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str),
]
HEADS, GPU = 2, torch.device("cuda")


def _skip_unless(backend: str, dtype: torch.dtype, grad: bool = True) -> None:
    q = torch.zeros(1, HEADS, 64, dtype=dtype, device=GPU, requires_grad=grad)
    try:
        attention(q, q, q, PackedLayout.from_lengths([1], GPU), backend=backend)
    except BackendUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("width", "causal", "across"), [(64, False, False), (128, True, False), (40, False, True)]
)
@pytest.mark.parametrize("backend", ["varlen", "flash_attn_2"])
def test_keeps_the_contract(
    backend: str,
    lengths: tuple[int, ...],
    width: int,
    causal: bool,
    across: bool,
    dtype: torch.dtype,
) -> None:
    _skip_unless(backend, dtype)
    keys = lengths[::-1] if across else None
    case_for = FACTORIES["attention"](lengths, lengths_k=keys, causal=causal, width=width)
    # With one key, the gradient of a query has as a factor the difference of two equal sums over
    # the channels, added in two orders in float32: some steps of 2**-20, as sums up to 16 have,
    # times the scale and a key, which is about 2**-2.
    check_kernel(case_for, dtype, GPU, backend, cancelled=2**-19)


@pytest.mark.parametrize("causal", [False, True])
def test_version_4_keeps_all_but_the_promise_about_neighbours(
    lengths: tuple[int, ...], causal: bool, dtype: torch.dtype
) -> None:
    """Its loads run past the end of a sequence; NaN there would spread."""
    _skip_unless("flash_attn_4", dtype)
    case = FACTORIES["attention"](lengths, causal=causal, width=64)("flash_attn_4")
    there = Variation(dtype=dtype, device=GPU)
    for check in (check_order, check_static_shape, check_strides, check_repeats):
        check(case, there)


def test_version_3_serves_inference(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    _skip_unless("flash_attn_3", dtype, grad=False)
    layout = PackedLayout.from_lengths(lengths, GPU, rows=sum(lengths) + 3)
    q, k, v = (torch.randn(layout.rows, HEADS, 64, device=GPU).to(dtype) for _ in range(3))
    found = attention(q, k, v, layout, backend="flash_attn_3")
    gold = attention(q.double(), k.double(), v.double(), layout, backend="reference")
    assert_no_worse(found, gold, attention(q, k, v, layout, backend="reference"))
