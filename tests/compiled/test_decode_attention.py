"""The kernels of `decode_attention`, compiled without a GPU."""

import random
import re
from collections.abc import Callable

import pytest
import torch

from effasr_kernels.decode_attention import DecodeArguments, _triton
from effasr_kernels.runtime.launch import Launch, recording
from effasr_kernels.testing import aot

Check = Callable[..., dict[str, aot.Resources]]


def _launches(
    architecture: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    sequences: int = 32,
    hypotheses: int = 1,
    heads: int = 8,
    share: int = 1,
    width: int = 128,
    size: int = 64,
    columns: int = 6,
    new: bool = False,
    splits: int | None = None,
) -> list[Launch]:
    q = torch.empty(sequences * hypotheses, heads, width, dtype=dtype)
    key_heads = heads // share
    pages = torch.empty(sequences * columns + 1, size, key_heads, width, dtype=dtype)
    added = torch.empty(sequences, key_heads, width, dtype=dtype) if new else None
    arguments = {
        "q": q,
        "k_pages": pages,
        "v_pages": pages,
        "page_table": torch.zeros(sequences, columns, dtype=torch.int32),
        "lengths": torch.zeros(sequences, dtype=torch.int32),
        "new_k": added,
        "new_v": added,
        "scale": 0.125,
        "splits": splits,
    }
    with recording(divmod(architecture, 10)) as launches:
        assert _triton.unsupported_reason(DecodeArguments(**arguments)) is None
        assert _triton.run(DecodeArguments(**arguments)).shape == q.shape
    return launches


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_self_attention_is_one_kernel(architecture: int, compiled_ok: Check) -> None:
    found = compiled_ok(_launches(architecture, columns=4, new=True), architecture)
    assert set(found) == {"attend_one"}
    needs = found["attend_one"]
    assert re.search(r"arith\.muli.*i64", needs.ttir), "offsets are not 64-bit"
    # Keys and values come in pieces of 16 bytes, ahead of their use; so does the query.
    pieces = re.findall(r"cp\.async\.c[ag]\S* .*, 0x10,", needs.ptx)
    assert len(pieces) >= 8


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("hypotheses", [1, 5])
def test_cross_attention_is_split_and_merged(
    hypotheses: int, architecture: int, compiled_ok: Check
) -> None:
    launches = _launches(architecture, hypotheses=hypotheses)
    name = "attend_one" if hypotheses == 1 else "attend_several"
    products = {name} if hypotheses > 1 else set()
    found = compiled_ok(launches, architecture, products=products)
    assert set(found) == {name, "merge_parts"}
    # A tile of keys is loaded once for all hypotheses of a sequence.
    assert launches[0].grid[:2] == (32 * 8, 2)
    assert launches[0].grid[2:] == ((1,) if hypotheses > 1 else ())


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("share", [2, 4, 8])
@pytest.mark.representative(share=4)
def test_heads_that_share_keys_load_them_once(
    share: int, width: int, architecture: int, compiled_ok: Check
) -> None:
    launches = _launches(architecture, share=share, width=width, columns=4, new=True, splits=1)
    found = compiled_ok(launches, architecture, products={"attend_several"})
    assert set(found) == {"attend_several"}
    assert launches[0].grid == (32 * 8 // share, 1, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"width": 64, "size": 375, "columns": 1},
        {"width": 64, "size": 375, "columns": 1, "hypotheses": 4},
        {"width": 80, "size": 16, "columns": 20, "hypotheses": 4, "splits": 1},
        {"width": 256, "new": True},
        {"width": 256, "hypotheses": 20, "splits": 40},
    ],
    ids=str,
)
@pytest.mark.representative(
    dtype=torch.bfloat16,
    options=[{"width": 64, "size": 375, "columns": 1}, {"width": 256, "new": True}],
)
def test_other_shapes(options: dict, dtype: torch.dtype, compiled_ok: Check) -> None:
    compiled_ok(_launches(90, dtype, sequences=2, **options), 90)


@pytest.mark.parametrize("hypotheses", [1, 3])
def test_no_batch_compiles_anything(hypotheses: int) -> None:
    """However many sequences, pages and rows of pages there are; rows come by tiles or not."""
    keys = set()
    draw = random.Random(0)
    for _ in range(100):
        sizes = {"sequences": draw.randint(1, 64), "columns": draw.randint(1, 30)}
        launches = _launches(
            90, **sizes, size=16 * draw.randint(1, 9), hypotheses=hypotheses, splits=3, width=64
        )
        keys |= {aot.key(launch) for launch in launches}
    # Two ways to find a page, and the merging.
    assert len(keys) == 3
