"""Decoder cache in pages, with shapes that never change: for a GPU and for CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from effasr.nn.cache.contiguous import CacheSizes
from effasr_kernels import append_to_pages, decode_attention

PAGE = 32
"""Places per page."""

_UNREAD_PAGE = 0
"""The page that rows without pages write to; it is never read."""


def pages_of(length: int) -> int:
    """Return the number of pages for this many places."""
    return -(-length // PAGE)


def page_writer(
    sizes: CacheSizes, pages: Tensor, table: Tensor, rows: Sequence[int], lengths: Sequence[int]
) -> Callable[[int, Tensor, Tensor], None]:
    """Return a function that writes whole sequences to pages; see `ContiguousCache.loader`."""
    # pages: (layers, 2, P, PAGE, H, D), keys and values; table: int32 (N, M), the pages of each row
    # in order; copied
    total = sum(lengths)
    owners = [row for row, length in zip(rows, lengths, strict=True) for _ in range(length)]
    places = [place for length in lengths for place in range(length)]
    positions = sizes.integers(places, torch.int32)
    tables = table[sizes.integers(owners)]

    def write(layer: int, keys: Tensor, values: Tensor) -> None:
        k_pages, v_pages = pages[layer]
        k, v = (x[:total].to(k_pages.dtype) for x in (keys, values))
        append_to_pages(k, v, k_pages, v_pages, tables, positions)

    return write


class PagedCache:
    """Keys and values of N rows in a pool of pages, which rows take and release.

    Pages, page table and lengths keep their addresses, so that a CUDA graph of a step stays valid.
    """

    def __init__(self, sizes: CacheSizes, rows: int, longest: int, pages: int) -> None:
        """Start with N rows of at most ``longest`` places each, and none of the ``pages`` taken."""
        self.sizes, self.rows = sizes, rows
        shape = sizes.layers, 2, pages + 1, PAGE, sizes.heads, sizes.head_dim
        # Zeros: idle rows read them without effect, but NaN would fail checks.
        self.pages = torch.zeros(shape, dtype=sizes.dtype, device=sizes.device)
        integers = {"dtype": torch.int32, "device": sizes.device}
        self.table = torch.full((rows, max(1, pages_of(longest))), _UNREAD_PAGE, **integers)
        self.lengths = torch.zeros(rows, **integers)
        self.most = pages
        self._free = list(range(pages, 0, -1))
        self._own: list[list[int]] = [[] for _ in range(rows)]
        self._beginning: Tensor | None = None

    @property
    def free(self) -> int:
        """Number of pages that no row has."""
        return len(self._free)

    def take(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Give rows the pages for this many places, in exchange for those they have."""
        self.release(rows)
        for row, length in zip(rows, lengths, strict=True):
            count, most = pages_of(length), self.table.shape[1]
            if count > min(most, len(self._free)):
                raise ValueError(
                    f"PagedCache: `lengths` must fit into the {len(self._free)} pages that are "
                    f"free, and {most} of a row, but {length} places need {count}."
                )
            self._own[row] = [self._free.pop() for _ in range(count)]
        self._copy_table(rows)

    def release(self, rows: Sequence[int]) -> None:
        """Take all pages from rows; what they still write goes to the unread page."""
        for row in rows:
            self._free += reversed(self._own[row])
            self._own[row] = []
        self._copy_table(rows)
        self.lengths.index_fill_(0, self.sizes.integers(rows), 0)

    def loader(
        self, rows: Sequence[int], lengths: Sequence[int]
    ) -> Callable[[int, Tensor, Tensor], None]:
        """Return a function that writes whole sequences; see `ContiguousCache.loader`."""
        self.lengths.index_copy_(
            0, self.sizes.integers(rows), self.sizes.integers(lengths, torch.int32)
        )
        return page_writer(self.sizes, self.pages, self.table, rows, lengths)

    def attend(self, layer: int, q: Tensor, new: Tensor | None = None) -> Tensor:
        """Attend from each query to the first ``lengths`` places; see `ContiguousCache.attend`."""
        k_pages, v_pages = self.pages[layer]
        new_k, new_v = (None, None) if new is None else (x.contiguous() for x in new.unbind(1))
        return decode_attention(
            q.contiguous(), k_pages, v_pages, self.table, self.lengths, new_k=new_k, new_v=new_v
        )

    def keys(self, layer: int) -> Tensor:
        """Return a copy of the keys of a layer: (N, H, places, D), anything finite past the end."""
        return self.pages[layer, 0, self.table.long()].flatten(1, 2).transpose(1, 2)

    def reorder(self, rows: Tensor, length: int) -> None:
        """Continue each row from another one; all rows have the same length.

        Full pages are never written again, so rows share them, and only the last page is copied. A
        page is released only after all rows that may share it.
        """
        # rows: int64 (N,), those others
        full = length // PAGE
        table = self.table[rows]
        own = self._own_table()
        if length % PAGE:
            begun = self.pages[:, :, table[:, full].long(), : length % PAGE]
            self.pages[:, :, own[:, full].long(), : length % PAGE] = begun
        table[:, full:] = own[:, full:]
        self.table.copy_(table)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these; the pages of the others are lost."""
        index = self.sizes.integers(rows)
        self.table, self.lengths = self.table[index], self.lengths[index]
        self._beginning = None
        self._own = [self._own[row] for row in rows]
        self.rows = len(rows)

    def widened(self, times: int, length: int) -> PagedCache:
        """Return a cache with each row's first ``length`` positions ``times`` times."""
        longest = self.table.shape[1] * PAGE
        count = self.rows * times
        wide = PagedCache(self.sizes, count, longest, count * self.table.shape[1])
        wide.take(range(count), [longest] * count)
        used = pages_of(length)
        source = self.table[:, :used].repeat_interleave(times, 0).long()
        wide.pages[:, :, wide.table[:, :used].long()] = self.pages[:, :, source]
        return wide

    def _copy_table(self, rows: Sequence[int]) -> None:
        """Copy the pages of rows to the table on the device."""
        if rows:
            own = self._numbers([self._own[row] for row in rows])
            self.table.index_copy_(0, self.sizes.integers(rows), own)
        self._beginning = None

    def _own_table(self) -> Tensor:
        """Return the table before rows shared pages."""
        if self._beginning is None:
            self._beginning = self._numbers(self._own)
        return self._beginning

    def _numbers(self, own: Sequence[Sequence[int]]) -> Tensor:
        width = self.table.shape[1]
        padded = [[*pages, *[_UNREAD_PAGE] * (width - len(pages))] for pages in own]
        return self.sizes.integers(padded, torch.int32).view(len(own), width)
