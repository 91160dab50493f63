"""Keys and values of a decoder in pages: what a GPU reads, in shapes that never change."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from effasr.nn.cache.contiguous import CacheSizes
from effasr_kernels import append_to_pages, decode_attention

PAGE = 32
"""Places of a page."""

_NOBODYS = 0
"""The page where rows without pages of their own write, and which nobody reads."""


def pages_of(length: int) -> int:
    """How many pages hold so many places."""
    return -(-length // PAGE)


class PagedCache:
    """Keys and values of N rows in a pool of pages, which rows take and give back.

    What steps read lies where it lay, so that a recording of one (a CUDA graph) finds it: pages,
    page table and lengths.

    Attributes:
        rows: N.
        most: Pages that rows can have in all.
        pages: (layers, 2, P, PAGE, H, D), keys and values.
        table: int32 (N, M), the pages of each row in order; the rest are nobody's.
        lengths: int32 (N,), places of each row that `attend` reads.
    """

    def __init__(self, sizes: CacheSizes, rows: int, longest: int, pages: int) -> None:
        """Start with rows that have no pages.

        Args:
            sizes: Of the decoder.
            rows: N.
            longest: Most places of a row.
            pages: That rows can have in all.
        """
        self.sizes, self.rows = sizes, rows
        shape = sizes.layers, 2, pages + 1, PAGE, sizes.heads, sizes.head_dim
        # Zeros: what idle rows read is no matter, but NaN would be seen by who looks for it.
        self.pages = torch.zeros(shape, dtype=sizes.dtype, device=sizes.device)
        integers = {"dtype": torch.int32, "device": sizes.device}
        self.table = torch.full((rows, max(1, pages_of(longest))), _NOBODYS, **integers)
        self.lengths = torch.zeros(rows, **integers)
        self.most = pages
        self._free = list(range(pages, 0, -1))
        self._own: list[list[int]] = [[] for _ in range(rows)]
        self._beginning: Tensor | None = None

    @property
    def free(self) -> int:
        """Pages that no row has."""
        return len(self._free)

    def take(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Give rows the pages for so many places, in exchange for those that they have.

        Raises:
            ValueError: There are not enough, or a row is longer than it may be.
        """
        self.release(rows)
        for row, length in zip(rows, lengths, strict=True):
            count, most = pages_of(length), self.table.shape[1]
            if count > min(most, len(self._free)):
                raise ValueError(
                    f"PagedCache: `lengths` must fit into the {len(self._free)} pages that are "
                    f"free, and {most} of a row, but {length} places need {count}."
                )
            self._own[row] = [self._free.pop() for _ in range(count)]
        self._tell(rows)

    def release(self, rows: Sequence[int]) -> None:
        """Take all pages from rows; what they still write goes nowhere."""
        for row in rows:
            self._free += reversed(self._own[row])
            self._own[row] = []
        self._tell(rows)
        self.lengths.index_fill_(0, self.sizes.integers(rows), 0)

    def loader(
        self, rows: Sequence[int], lengths: Sequence[int]
    ) -> Callable[[int, Tensor, Tensor], None]:
        """What writes the keys and values of whole sequences, from their first place on.

        Args:
            rows: Where each goes; they have the pages.
            lengths: Of each.

        Returns:
            To be called for each layer with its number and with keys and values, packed: at least
            (sum of the lengths, H, D) each.
        """
        total = sum(lengths)
        owners = [row for row, length in zip(rows, lengths, strict=True) for _ in range(length)]
        places = [place for length in lengths for place in range(length)]
        positions = self.sizes.integers(places, torch.int32)
        tables = self.table[self.sizes.integers(owners)]
        self.lengths.index_copy_(
            0, self.sizes.integers(rows), self.sizes.integers(lengths, torch.int32)
        )

        def write(layer: int, keys: Tensor, values: Tensor) -> None:
            k_pages, v_pages = self.pages[layer]
            k, v = (x[:total].to(k_pages.dtype) for x in (keys, values))
            append_to_pages(k, v, k_pages, v_pages, tables, positions)

        return write

    def attend(self, layer: int, q: Tensor, new: Tensor | None = None) -> Tensor:
        """Attend from each query to the first ``lengths`` places of its row.

        Args:
            layer: Whose.
            q: (N K, H, D), K queries of each row.
            new: Keys and values for the last place of each row, (N, 2, H, D), to write first.

        Returns:
            (N K, H, D).
        """
        k_pages, v_pages = self.pages[layer]
        new_k, new_v = (None, None) if new is None else (x.contiguous() for x in new.unbind(1))
        return decode_attention(
            q.contiguous(), k_pages, v_pages, self.table, self.lengths, new_k=new_k, new_v=new_v
        )

    def keys(self, layer: int) -> Tensor:
        """A copy of what a layer attends to: (N, H, places, D), anything finite past the end."""
        return self.pages[layer, 0, self.table.long()].flatten(1, 2).transpose(1, 2)

    def reorder(self, rows: Tensor, length: int) -> None:
        """Let each row go on from another one, all of the same length.

        Full pages are written to no more, so rows share them, and only the last one is copied. A
        page is never given back before all rows that may share it are.

        Args:
            rows: int64 (N,), those others.
            length: Places that each row has.
        """
        full = length // PAGE
        table = self.table[rows]
        own = self._own_table()
        if length % PAGE:
            begun = self.pages[:, :, table[:, full].long(), : length % PAGE]
            self.pages[:, :, own[:, full].long(), : length % PAGE] = begun
        table[:, full:] = own[:, full:]
        self.table.copy_(table)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, and their pages for ever."""
        index = self.sizes.integers(rows)
        self.table, self.lengths = self.table[index], self.lengths[index]
        self._beginning = None
        self._own = [self._own[row] for row in rows]
        self.rows = len(rows)

    def widened(self, times: int, length: int) -> PagedCache:
        """A cache with each row so many times, and the places that it has so far."""
        longest = self.table.shape[1] * PAGE
        count = self.rows * times
        wide = PagedCache(self.sizes, count, longest, count * self.table.shape[1])
        wide.take(range(count), [longest] * count)
        used = pages_of(length)
        source = self.table[:, :used].repeat_interleave(times, 0).long()
        wide.pages[:, :, wide.table[:, :used].long()] = self.pages[:, :, source]
        return wide

    def _tell(self, rows: Sequence[int]) -> None:
        """Copy the pages of rows to the table on the device."""
        if rows:
            own = self._numbers([self._own[row] for row in rows])
            self.table.index_copy_(0, self.sizes.integers(rows), own)
        self._beginning = None

    def _own_table(self) -> Tensor:
        """The table before any row shared pages of another."""
        if self._beginning is None:
            self._beginning = self._numbers(self._own)
        return self._beginning

    def _numbers(self, own: Sequence[Sequence[int]]) -> Tensor:
        width = self.table.shape[1]
        padded = [[*pages, *[_NOBODYS] * (width - len(pages))] for pages in own]
        return self.sizes.integers(padded, torch.int32).view(len(own), width)
