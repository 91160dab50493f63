"""Cache of rows with lengths of their own, which share pages until they differ: for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from effasr.nn.cache.contiguous import CacheSizes
from effasr.nn.cache.paged import PAGE, page_writer, pages_of
from effasr_kernels import decode_attention

_NO_PAGE = 0
"""Fills the page table past the pages of a row, where it is not read."""


def most_pages(length: int, more: int, hypotheses: int = 1) -> int:
    """Return the most pages that the hypotheses of a sequence take together."""
    full = length // PAGE
    return full + hypotheses * (pages_of(length + more) - full)


class SharedPageCache:
    """Keys and values of N rows in a pool of pages; H heads are those of the keys.

    The host knows the pages of each row, and copies them to the device when they change. Rows that
    continue the same row share its pages, with the number of rows that read each. A row which
    writes to a page that others read copies that page first, so only pages that are not full are
    ever copied.
    """

    def __init__(self, sizes: CacheSizes, rows: int) -> None:
        """Start with N idle rows and no pages; see `reserve`."""
        self.sizes = sizes
        self.pages = self._pool(0)
        self._free: list[int] = []
        # Of each page: rows that read it.
        self._readers: list[int] = []
        # Of each row: its pages in order.
        self._own: list[list[int]] = [[] for _ in range(rows)]
        self._columns = 1
        self._table: Tensor | None = None
        self._lengths: Tensor | None = None

    @property
    def page_bytes(self) -> int:
        """Bytes of the keys and values of a page, in all layers."""
        sizes = self.sizes
        return 2 * sizes.layers * PAGE * sizes.heads * sizes.head_dim * sizes.dtype.itemsize

    @property
    def used(self) -> int:
        """Number of pages that rows read."""
        return len(self._readers) - len(self._free)

    def reserve(self, pages: int, longest: int, most: int | None = None) -> None:
        """Make room, if possible twice as much as before if there is too little.

        The page table grows here alone: the order of the sums in `decode_attention` may depend on
        its width.
        """
        columns, before = pages_of(longest), len(self._readers)
        if columns > self._columns:
            self._columns, self._table = max(columns, 2 * self._columns), None
        if pages > before:
            ahead = max(pages, 2 * before)
            if most is not None and 2 * ahead > most:
                ahead = most
            pages = max(pages, ahead)
            pool = self._pool(pages)
            pool[:, :, :before] = self.pages
            self.pages = pool
            self._free += range(pages - 1, before - 1, -1)
            self._readers += [0] * (pages - before)

    def loader(
        self, rows: Sequence[int], lengths: Sequence[int]
    ) -> Callable[[int, Tensor, Tensor], None]:
        """Return a function that writes whole sequences; see `ContiguousCache.loader`."""
        self.release(rows)
        for row, length in zip(rows, lengths, strict=True):
            self._own[row] = [self._take() for _ in range(pages_of(length))]
        owners = self._numbers([self._own[row] for row in rows])
        return page_writer(self.sizes, self.pages, owners, range(len(rows)), lengths)

    def release(self, rows: Sequence[int]) -> None:
        """Make rows idle; pages that no other row reads become free."""
        for row in rows:
            own, self._own[row] = self._own[row], []
            self._let_go(own)
        if rows:
            self._table = None

    def select(self, rows: Sequence[int]) -> None:
        """Continue with these rows, which may repeat and take any order."""
        before, self._own = self._own, [list(self._own[row]) for row in rows]
        for own in self._own:
            for page in own:
                self._readers[page] += 1
        for own in before:
            self._let_go(own)
        self._table = None

    def look(self, lengths: Sequence[int]) -> None:
        """Make `attend` read this many places of each row, the last of which it writes first."""
        sources, copies = [], []
        for own, length in zip(self._own, lengths, strict=True):
            if pages_of(length) > len(own):
                own.append(self._take())
                self._table = None
            elif length and self._readers[own[-1]] > 1:
                sources.append(own[-1])
                copies.append(self._take())
                self._readers[own[-1]] -= 1
                own[-1] = copies[-1]
                self._table = None
        if copies:
            found = self.pages.index_select(2, self.sizes.integers(sources))
            self.pages.index_copy_(2, self.sizes.integers(copies), found)
        self._lengths = self.sizes.integers(lengths, torch.int32)
        if self._table is None:
            self._table = self._numbers(self._own)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """Attend from a new place of each row to all of its places, after `look`."""
        # q: (N, heads, D), a multiple of H heads -> (N, heads, D), in the data type of the cache
        assert self._table is not None
        assert self._lengths is not None
        k_pages, v_pages = self.pages[layer]
        q, k, v = (x.to(self.sizes.dtype) for x in (q, k, v))
        options = {"new_k": k, "new_v": v, "scale": scale}
        return decode_attention(q, k_pages, v_pages, self._table, self._lengths, **options)

    def _take(self) -> int:
        if not self._free:
            raise ValueError(
                f"SharedPageCache: `reserve` must have made room for more than {self.used} pages, "
                "which rows have taken, but has not."
            )
        page = self._free.pop()
        self._readers[page] = 1
        return page

    def _let_go(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._readers[page] -= 1
            if not self._readers[page]:
                self._free.append(page)

    def _pool(self, pages: int) -> Tensor:
        sizes = self.sizes
        shape = sizes.layers, 2, pages, PAGE, sizes.heads, sizes.head_dim
        return torch.zeros(shape, dtype=sizes.dtype, device=sizes.device)

    def _numbers(self, own: Sequence[Sequence[int]]) -> Tensor:
        """Copy pages of some rows to the device: int32 (rows, columns)."""
        empty = [_NO_PAGE] * self._columns
        flat = [page for pages in own for page in (*pages, *empty[len(pages) :])]
        return self.sizes.integers(flat, torch.int32).view(len(own), self._columns)
