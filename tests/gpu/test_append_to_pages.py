"""The Triton backend of `append_to_pages` against the reference: the same bytes."""

import pytest
import torch
from torch import Tensor

from effasr_kernels import BackendUnavailable, append_to_pages


def _places(rows: int, pages: int, size: int, columns: int) -> tuple[Tensor, Tensor]:
    """A table for each row and its positions, no place twice, every third row skipped."""
    places = torch.randperm(pages * size)[:rows]
    table = torch.full((rows, columns), 2**31 - 1, dtype=torch.int32)
    column = torch.arange(rows) % columns
    table[torch.arange(rows), column] = (places // size).int()
    positions = (column * size + places % size).int()
    positions[::3] = -1
    return table, positions


@pytest.mark.parametrize(
    ("rows", "heads", "width"), [(7, 1, 1), (7, 2, 8), (7, 3, 40), (7, 8, 130), (0, 1, 8)]
)
@pytest.mark.representative(width=[8, 130])
def test_matches_the_reference(
    rows: int, heads: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    k, v = torch.randn(2, rows, heads, width).to(dtype)
    pages = torch.randn(2, 5, 3, heads, width).to(dtype)
    table, positions = _places(rows, 5, 3, 2)
    expected, found = pages.clone(), pages.clone().to(device)
    append_to_pages(k, v, *expected, table, positions, backend="reference")
    there = [x.to(device) for x in (k, v, *found, table, positions)]
    append_to_pages(*there, backend="triton")
    assert torch.equal(there[2].cpu(), expected[0])
    assert torch.equal(there[3].cpu(), expected[1])
    assert torch.equal(expected, pages) == (rows == 0)


def test_tensors_need_not_be_contiguous(dtype: torch.dtype, device: torch.device) -> None:
    """Projections give keys and values side by side; pages may have heads before rows."""
    kv = torch.randn(7, 2, 3, 8, device=device).to(dtype)
    k_pages, v_pages = torch.randn(2, 5, 3, 3, 8, device=device).to(dtype).transpose(2, 3)
    expected = [k_pages.cpu().contiguous(), v_pages.cpu().contiguous()]
    table, positions = _places(7, 5, 3, 2)
    k, v = kv.unbind(1)
    append_to_pages(k.cpu(), v.cpu(), *expected, table, positions, backend="reference")
    strided = table.to(device).t().contiguous().t(), positions.to(device).repeat(2, 1).t()[:, 0]
    append_to_pages(k, v, k_pages, v_pages, *strided, backend="triton")
    assert torch.equal(k_pages.cpu(), expected[0])
    assert torch.equal(v_pages.cpu(), expected[1])


def test_a_row_without_a_place_is_not_written(device: torch.device) -> None:
    k = torch.ones(4, 1, 8, device=device)
    pages = torch.zeros(2, 2, 3, 1, 8, device=device)
    table = torch.tensor([[2], [-1], [0], [1]], dtype=torch.int32, device=device)
    positions = torch.tensor([0, 0, 3, 2], dtype=torch.int32, device=device)
    append_to_pages(k, k, *pages, table, positions, backend="triton")
    assert pages.sum((0, 3, 4)).tolist() == [[0.0, 0.0, 0.0], [0.0, 0.0, 16.0]]


def test_pages_are_never_copied(device: torch.device) -> None:
    """What would be written to a copy would be lost."""
    k = torch.ones(1, 1, 8, device=device)
    pages = torch.zeros(2, 3, 1, 16, device=device)[..., ::2]
    one = torch.zeros(1, 1, dtype=torch.int32, device=device)
    with pytest.raises(BackendUnavailable, match="pages whose channels are contiguous"):
        append_to_pages(k, k, pages, pages, one, one[0], backend="triton")
