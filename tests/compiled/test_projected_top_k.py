"""The kernels of `projected_top_k`, compiled without a GPU."""

import random
import re
from collections.abc import Callable

import pytest
import torch

from effasr_kernels.projected_top_k import TopKArguments, _triton
from effasr_kernels.runtime.launch import Launch, recording
from effasr_kernels.testing import aot

Check = Callable[..., dict[str, aot.Resources]]
PRODUCT = "rank_parts"
NAMES = {PRODUCT, "merge_parts"}


def _launches(
    architecture: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    rows: int = 32,
    width: int = 1024,
    count: int = 5_248,
    k: int = 1,
    bias: bool = True,
) -> list[Launch]:
    arguments = {
        "hidden": torch.empty(rows, width, dtype=dtype),
        "weight": torch.empty(count, width, dtype=dtype),
        "bias": torch.empty(count, dtype=dtype) if bias else None,
        "k": k,
        "classes": count,
    }
    with recording(divmod(architecture, 10)) as launches:
        assert _triton.unsupported_reason(TopKArguments(**arguments)) is None
        log_probs, indices = _triton.run(TopKArguments(**arguments))
    assert (log_probs.shape, log_probs.dtype) == ((rows, k), torch.float32)
    assert (indices.shape, indices.dtype) == ((rows, k), torch.int64)
    return launches


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize(("rows", "k"), [(1, 1), (32, 1), (80, 8)])
@pytest.mark.representative(rows=[1, 80])
def test_common_shapes(rows: int, k: int, architecture: int, compiled_ok: Check) -> None:
    found = compiled_ok(_launches(architecture, rows=rows, k=k), architecture, products={PRODUCT})
    assert set(found) == NAMES
    needs = found[PRODUCT]
    assert re.search(r"arith\.muli.*i64", needs.ttir), "offsets are not 64-bit"
    # The weight comes in pieces of 16 bytes, ahead of its use; two blocks fit on a multiprocessor.
    assert len(re.findall(r"cp\.async\.c[ag]\S* .*, 0x10,", needs.ptx)) >= 8
    assert 2 * needs.shared <= aot.SHARED_LIMIT[architecture]


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float32, "rows": 1, "k": 16},
        {"dtype": torch.float32, "rows": 80, "k": 5},
        {"dtype": torch.float16, "rows": 256, "k": 16, "bias": False},
        {"rows": 5, "width": 144, "count": 1_025, "k": 3},
    ],
    ids=str,
)
@pytest.mark.representative(
    options=[
        {"dtype": torch.float32, "rows": 80, "k": 5},
        {"rows": 5, "width": 144, "count": 1_025, "k": 3},
    ]
)
def test_other_shapes(options: dict, compiled_ok: Check) -> None:
    compiled_ok(_launches(90, **options), 90)


def test_few_and_many_rows_are_all_that_is_compiled() -> None:
    keys = set()
    draw = random.Random(0)
    for rows in [1, 16, 17, 64, *(draw.randint(1, 256) for _ in range(100))]:
        keys |= {aot.key(launch) for launch in _launches(90, rows=rows, width=64, count=400)}
    assert len(keys) == 2 + 1


@pytest.mark.parametrize(
    ("rows", "count", "splits"), [(1, 5_248, 164), (80, 5_248, 82), (256, 5_248, 55), (1, 20, 1)]
)
def test_few_rows_share_the_vocabulary(rows: int, count: int, splits: int) -> None:
    """So that every multiprocessor has work; the number depends on shapes alone."""
    product, merging = _launches(90, rows=rows, width=64, count=count)
    assert product.grid == (splits, -(-rows // (16 if rows <= 16 else 64)))
    assert merging.grid == (rows,)
