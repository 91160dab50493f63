"""The kernel of `append_to_pages`, compiled without a GPU."""

import random
import re
from collections.abc import Callable

import pytest
import torch

from effasr_kernels.append_to_pages import AppendArguments, _triton
from effasr_kernels.runtime.launch import Launch, recording
from effasr_kernels.testing import aot


def _launches(
    architecture: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    rows: int = 300,
    heads: int = 8,
    width: int = 128,
    size: int = 64,
    columns: int = 6,
) -> list[Launch]:
    k, pages = (torch.empty(*n, heads, width, dtype=dtype) for n in ((rows,), (99, size)))
    table = torch.zeros(rows, columns, dtype=torch.int32)
    arguments = AppendArguments(k, k, pages, pages, table, table[:, 0])
    with recording(divmod(architecture, 10)) as launches:
        assert _triton.unsupported_reason(arguments) is None
        _triton.run(arguments)
    return launches


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.representative(dtype=torch.bfloat16)
def test_compiles_for_every_architecture(
    dtype: torch.dtype, architecture: int, compiled_ok: Callable
) -> None:
    (needs,) = compiled_ok(_launches(architecture, dtype), architecture).values()
    assert re.search(r"arith\.muli.*i64", needs.ttir), "offsets are not 64-bit"
    # A row is copied in pieces of 16 bytes.
    pieces = 2 if dtype == torch.bfloat16 else 4
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", needs.ptx)) == pieces
    assert len(re.findall(r"st\.global\S*\.v4\.b32", needs.ptx)) == pieces


def test_no_batch_compiles_anything() -> None:
    keys = set()
    draw = random.Random(0)
    for _ in range(100):
        sizes = {name: draw.randint(1, 99) for name in ("rows", "size", "columns")}
        keys |= {aot.key(launch) for launch in _launches(90, **sizes)}
    assert len(keys) == 1
