"""`append_to_pages` by its reference, against row by row."""

from __future__ import annotations

import torch

from effasr_kernels import append_to_pages


def test_writes_each_row_to_its_place_and_nothing_else() -> None:
    k, v = torch.randn(2, 6, 2, 4)
    k_pages, v_pages = torch.randn(2, 8, 3, 2, 4)
    # Two sequences, and a row that is skipped, whose pages nobody looks at.
    table = torch.tensor([[5, 2]] * 3 + [[-5, 99]] + [[7, 0]] * 2, dtype=torch.int32)
    positions = torch.tensor([0, 5, 3, -1, 1, 4], dtype=torch.int32)
    expected_k, expected_v = k_pages.clone(), v_pages.clone()
    for n, position in enumerate(positions.tolist()):
        if position >= 0:
            page = int(table[n, position // 3])
            expected_k[page, position % 3], expected_v[page, position % 3] = k[n], v[n]
    append_to_pages(k, v, k_pages, v_pages, table, positions)
    assert torch.equal(k_pages, expected_k)
    assert torch.equal(v_pages, expected_v)


def test_writes_nothing_where_all_are_skipped() -> None:
    k = torch.full((3, 1, 2), torch.nan)
    pages = torch.zeros(2, 4, 1, 2)
    nowhere = torch.full((3,), -1, dtype=torch.int32)
    append_to_pages(k, k, pages, pages.clone(), torch.zeros(3, 1, dtype=torch.int32), nowhere)
    assert not pages.any()
