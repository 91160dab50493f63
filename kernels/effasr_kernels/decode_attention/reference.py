"""The definition of `decode_attention`, and what decodes on a CPU.

One sequence at a time, as everywhere, but here for two more reasons. Only keys that count are read,
in place where the pages of a sequence follow each other. And the products of a sequence have the
same shapes whatever is decoded beside it, so that its results are the same to the bit. A batched
product does not give that: MKL chooses the order of its sums by the size of the batch, and so does
`scaled_dot_product_attention` with several threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from effasr_kernels.decode_attention.definition import DecodeArguments
from effasr_kernels.runtime.checks import wrong
from effasr_kernels.shared.paged import check_page_numbers
from effasr_kernels.shared.ragged import wide_dtype, widen


def run(a: DecodeArguments) -> Tensor:
    """See `effasr_kernels.decode_attention.decode_attention`."""
    q, k_pages, v_pages = a.q, a.k_pages, a.v_pages
    (count, heads, width), sequences = q.shape, a.page_table.shape[0]
    if not count:
        return q.new_empty(q.shape)
    known = a.lengths.tolist()
    tables = _needed(a.page_table, known, k_pages)
    if a.new_k is not None and a.new_v is not None:
        _write(a.new_k, k_pages, tables, known)
        _write(a.new_v, v_pages, tables, known)
    found = q.new_zeros(sequences, heads, count // sequences, width, dtype=wide_dtype(q))
    grouped = (widen(q) * a.scale).view(sequences, -1, heads, width).transpose(1, 2)
    keys, values = _Rows(k_pages), _Rows(v_pages)
    # What costs time for small sequences is the number of calls, so all is cut up at once.
    parts = zip(tables, known, grouped.unbind(), found.unbind(), strict=True)
    for table, length, queries, out in parts:
        if length:
            weights = torch.bmm(queries, keys.take(table, length).transpose(1, 2)).softmax(-1)
            torch.bmm(weights, values.take(table, length), out=out)
    return found.transpose(1, 2).reshape(q.shape).to(q.dtype)


def _needed(page_table: Tensor, lengths: list[int], k_pages: Tensor) -> list[list[int]]:
    """The pages that each sequence needs."""
    count, size = k_pages.shape[:2]
    room = page_table.shape[1] * size
    tables = page_table.tolist()
    for s, length in enumerate(lengths):
        if not 0 <= length <= room:
            raise wrong("decode_attention", "lengths", f"be in [0, M * B = {room}]", length)
        tables[s] = tables[s][: -(-length // size)]
        check_page_numbers("decode_attention", tables[s], count)
    return tables


def _write(new: Tensor, pages: Tensor, tables: list[list[int]], lengths: list[int]) -> None:
    """Put a row of each sequence that is not empty where its last key is."""
    rows = [s for s, length in enumerate(lengths) if length]
    if rows:
        places = [tables[s][-1] for s in rows], [(lengths[s] - 1) % pages.shape[1] for s in rows]
        pages[places] = new[rows]


class _Rows:
    """The rows of pages, for each sequence in order."""

    def __init__(self, pages: Tensor):
        self.pages, self.size = pages, pages.shape[1]
        self.joined: Tensor | None = None
        if pages.stride(0) == self.size * pages.stride(1):
            self.joined = pages.flatten(0, 1).transpose(0, 1)

    def take(self, numbers: list[int], length: int) -> Tensor:
        """(H, length, D): a view where the pages follow each other, else a copy."""
        first = numbers[0]
        follows = len(numbers) == 1 or numbers == list(range(first, first + len(numbers)))
        if follows and self.joined is not None:
            return widen(self.joined[:, first * self.size : first * self.size + length])
        chosen = self.pages.index_select(0, torch.tensor(numbers, device=self.pages.device))
        return widen(chosen.flatten(0, 1)[:length].transpose(0, 1))
