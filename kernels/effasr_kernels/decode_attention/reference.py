"""Reference implementation of `decode_attention`, also used for decoding on a CPU.

It computes one sequence at a time, as all references do, here for two more reasons. Only valid keys
are read, without a copy if the pages of a sequence are adjacent. And the products of a sequence
have the same shapes for any batch, so that results are bitwise independent of the other sequences.
Batched products are not: MKL chooses the order of summation by the batch size, and so does
`scaled_dot_product_attention` with several threads.
"""

import torch
from torch import Tensor

from effasr_kernels.decode_attention import DecodeArguments
from effasr_kernels.runtime.checks import wrong
from effasr_kernels.shared.paged import check_page_numbers
from effasr_kernels.shared.ragged import wide_dtype, widen


def run(a: DecodeArguments) -> Tensor:
    q, k_pages, v_pages = a.q, a.k_pages, a.v_pages
    (count, heads, width), sequences = q.shape, a.page_table.shape[0]
    if not count:
        return q.new_empty(q.shape)
    counts_of_keys = a.lengths.tolist()
    tables = _needed(a.page_table, counts_of_keys, k_pages)
    if a.new_k is not None and a.new_v is not None:
        _write(a.new_k, k_pages, tables, counts_of_keys)
        _write(a.new_v, v_pages, tables, counts_of_keys)
    # All queries and heads that share a head of keys are the rows of one product.
    hypotheses, key_heads = count // sequences, k_pages.shape[2]
    shape = sequences, hypotheses, key_heads, heads // key_heads, width
    rows = hypotheses * (heads // key_heads)
    outputs = q.new_zeros(sequences, key_heads, rows, width, dtype=wide_dtype(q))
    grouped = (widen(q) * a.scale).view(shape).transpose(1, 2).flatten(2, 3)
    keys, values = _Rows(k_pages), _Rows(v_pages)
    # For small sequences the number of calls dominates, so all tensors are split together.
    parts = zip(tables, counts_of_keys, grouped.unbind(), outputs.unbind(), strict=True)
    for table, length, queries, out in parts:
        if length:
            weights = torch.bmm(queries, keys.take(table, length).transpose(1, 2)).softmax(-1)
            torch.bmm(weights, values.take(table, length), out=out)
    outputs = outputs.unflatten(2, (hypotheses, -1))
    return outputs.transpose(1, 2).reshape(q.shape).to(q.dtype)


def _needed(page_table: Tensor, lengths: list[int], k_pages: Tensor) -> list[list[int]]:
    """Return the page numbers of each sequence, up to its length."""
    count, size = k_pages.shape[:2]
    capacity = page_table.shape[1] * size
    tables = page_table.tolist()
    for s, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            raise wrong("decode_attention", "lengths", f"be in [0, M * B = {capacity}]", length)
        tables[s] = tables[s][: -(-length // size)]
        check_page_numbers("decode_attention", tables[s], count)
    return tables


def _write(new: Tensor, pages: Tensor, tables: list[list[int]], lengths: list[int]) -> None:
    """Write the new row of each nonempty sequence to the position of its last key."""
    rows = [s for s, length in enumerate(lengths) if length]
    if rows:
        entries = [tables[s][-1] for s in rows], [(lengths[s] - 1) % pages.shape[1] for s in rows]
        pages[entries] = new[rows]


class _Rows:
    def __init__(self, pages: Tensor):
        self.pages, self.size = pages, pages.shape[1]
        self.joined: Tensor | None = None
        if pages.stride(0) == self.size * pages.stride(1):
            self.joined = pages.flatten(0, 1).transpose(0, 1)

    def take(self, numbers: list[int], length: int) -> Tensor:
        """Return (Hk, length, D), a view if the pages are adjacent, else a copy."""
        first = numbers[0]
        follows = len(numbers) == 1 or numbers == list(range(first, first + len(numbers)))
        if follows and self.joined is not None:
            return widen(self.joined[:, first * self.size : first * self.size + length])
        chosen = self.pages.index_select(0, torch.tensor(numbers, device=self.pages.device))
        return widen(chosen.flatten(0, 1)[:length].transpose(0, 1))
