"""`decode_attention` by its reference, against a float64 computation of its own."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from effasr_kernels import append_to_pages, decode_attention
from tests.ops.pages import Paged, brute_force, draw
from tests.support.tolerance import assert_no_worse

# None, one, a page and one more or less, and all pages full where columns is 3.
AWKWARD = (0, 1, 3, 4, 5, 12)


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 11), min_size=1, max_size=4),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(0, 2**31),
)
def test_is_the_formula_for_any_shape(
    keys: list[int],
    size: int,
    hypotheses: int,
    heads: int,
    width: int,
    splits: int,
    share: int,
    spare: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    shape = {"hypotheses": hypotheses, "heads": heads, "share": share, "width": width}
    # More pages than a sequence needs may stand in its row.
    columns = spare + max(1, -(-max(keys) // size))
    batch = draw(tuple(keys), size=size, columns=columns, **shape)
    out = decode_attention(*batch.arguments, scale=0.3, splits=splits)
    torch.testing.assert_close(out, brute_force(batch, 0.3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sums_are_wide(dtype: torch.dtype) -> None:
    batch = draw(AWKWARD, hypotheses=2).to("cpu", dtype)
    gold = brute_force(batch.to("cpu", torch.float64))
    out = decode_attention(*batch.arguments)
    assert out.dtype == dtype
    # Nothing is lost but by the rounding of the result.
    assert_no_worse(out, gold, gold.to(dtype), slack=1.0)


@pytest.mark.usefixtures("threads")
def test_a_row_depends_on_its_sequence_alone_to_the_bit() -> None:
    lengths = (0, 100, 1, 33, 64, 375, 2, 375)
    batch = draw(lengths, size=25, hypotheses=3, heads=4, width=64)
    batch = batch.to("cpu", torch.float32)
    together = decode_attention(*batch.arguments).unflatten(0, (-1, 3))
    for chosen in ([5], [7, 5], [3, 2, 1, 0], list(range(8))[::-1]):
        alone = decode_attention(*batch.choose(chosen).arguments)
        assert torch.equal(alone.unflatten(0, (-1, 3)), together[chosen])


def test_where_pages_lie_makes_no_difference_to_the_bit() -> None:
    """In order, they are read in place; else they are gathered."""
    batch = draw((13, 9), size=4, width=16).to("cpu", torch.float32)
    expected = decode_attention(*batch.arguments)
    order = torch.cat([batch.page_table[0, :4], batch.page_table[1, :3]]).long()
    table = torch.full_like(batch.page_table, -1)
    table[0, :4], table[1, :3] = torch.arange(4), torch.arange(4, 7)
    sorted_batch = Paged(batch.q, batch.k_pages[order], batch.v_pages[order], table, batch.lengths)
    assert torch.equal(decode_attention(*sorted_batch.arguments), expected)


@pytest.mark.parametrize("share", [1, 4])
def test_new_keys_are_written_and_seen(share: int) -> None:
    batch = draw(AWKWARD, share=share)
    new_k, new_v = torch.randn(2, len(AWKWARD), 2, 8, dtype=torch.float64)
    new_k[0], new_v[0] = torch.nan, torch.nan  # of the sequence of length 0
    once = replace(batch, k_pages=batch.k_pages.clone(), v_pages=batch.v_pages.clone())
    positions = batch.lengths - 1
    append_to_pages(new_k, new_v, once.k_pages, once.v_pages, batch.page_table, positions)
    expected = decode_attention(*once.arguments)
    found = decode_attention(*batch.arguments, new_k=new_k, new_v=new_v)
    assert torch.equal(found, expected)
    assert torch.equal(batch.k_pages.nan_to_num(9.0), once.k_pages.nan_to_num(9.0))
    assert torch.equal(batch.v_pages.nan_to_num(9.0), once.v_pages.nan_to_num(9.0))
    torch.testing.assert_close(found, brute_force(batch))


def test_takes_no_sequences() -> None:
    empty = torch.zeros(0, 2, 4), torch.zeros(0, 3, 2, 4), torch.zeros(0, 3, 2, 4)
    table, keys = torch.zeros(0, 5, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    assert decode_attention(*empty, table, keys).shape == (0, 2, 4)
