"""Decoder caches in pages, for a GPU: with shapes that never change, and with shared pages."""

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
    return -(-length // PAGE)


def page_writer(
    sizes: CacheSizes, pages: Tensor, table: Tensor, rows: Sequence[int], lengths: Sequence[int]
) -> Callable[[int, Tensor, Tensor], None]:
    """A function that writes whole sequences to pages; see `ContiguousCache.loader`."""
    # pages: (layers, 2, P, PAGE, H, D), keys and values; table: int32 (N, M), the pages of each row
    # in order; copied
    total = sum(lengths)
    owners = [row for row, length in zip(rows, lengths, strict=True) for _ in range(length)]
    places = [position for length in lengths for position in range(length)]
    positions = sizes.integers(places, torch.int32)
    tables = table[sizes.integers(owners)]

    def write(layer: int, keys: Tensor, values: Tensor) -> None:
        k_pages, v_pages = pages[layer]
        k, v = (x[:total].to(k_pages.dtype) for x in (keys, values))
        append_to_pages(k, v, k_pages, v_pages, tables, positions)

    return write


class PagedCache:
    """Keys and values of N rows in a pool of pages, at fixed addresses for CUDA graphs."""

    def __init__(self, sizes: CacheSizes, rows: int, longest: int, pages: int) -> None:
        self.sizes, self.rows = sizes, rows
        shape = sizes.layers, 2, pages + 1, PAGE, sizes.heads, sizes.head_dim
        # Zeros: idle rows read them without effect, but NaN would fail checks.
        self.pages = torch.zeros(shape, dtype=sizes.dtype, device=sizes.device)
        integers = {"dtype": torch.int32, "device": sizes.device}
        # int32 (N, M), the pages of each row in order; the other entries are the unread page.
        self.table = torch.full((rows, max(1, pages_of(longest))), _UNREAD_PAGE, **integers)
        self.lengths = torch.zeros(rows, **integers)
        self.most = pages
        self._free = list(range(pages, 0, -1))
        self._row_pages: list[list[int]] = [[] for _ in range(rows)]
        self._beginning: Tensor | None = None

    @property
    def free(self) -> int:
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
            self._row_pages[row] = [self._free.pop() for _ in range(count)]
        self._copy_table(rows)

    def release(self, rows: Sequence[int]) -> None:
        """Take all pages from rows; what they still write goes to the unread page."""
        for row in rows:
            self._free += reversed(self._row_pages[row])
            self._row_pages[row] = []
        self._copy_table(rows)
        self.lengths.index_fill_(0, self.sizes.integers(rows), 0)

    def loader(
        self, rows: Sequence[int], lengths: Sequence[int]
    ) -> Callable[[int, Tensor, Tensor], None]:
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
        """A copy of the keys of a layer: (N, H, places, D), anything finite past the end."""
        return self.pages[layer, 0, self.table.long()].flatten(1, 2).transpose(1, 2)

    def reorder(self, rows: Tensor, length: int) -> None:
        """Continue each row from another one; all rows have the same length.

        Full pages are never written again, so rows share them, and only the last page is copied. A
        page is released only after all rows that may share it.
        """
        # rows: int64 (N,), those others
        full = length // PAGE
        table = self.table[rows]
        # The table before rows shared pages.
        if self._beginning is None:
            self._beginning = self._numbers(self._row_pages)
        first = self._beginning
        if length % PAGE:
            begun = self.pages[:, :, table[:, full].long(), : length % PAGE]
            self.pages[:, :, first[:, full].long(), : length % PAGE] = begun
        table[:, full:] = first[:, full:]
        self.table.copy_(table)

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these; the pages of the others are lost."""
        index = self.sizes.integers(rows)
        self.table, self.lengths = self.table[index], self.lengths[index]
        self._beginning = None
        self._row_pages = [self._row_pages[row] for row in rows]
        self.rows = len(rows)

    def widened(self, times: int, length: int) -> "PagedCache":
        """A cache with each row's first ``length`` positions ``times`` times."""
        longest = self.table.shape[1] * PAGE
        count = self.rows * times
        wide = PagedCache(self.sizes, count, longest, count * self.table.shape[1])
        wide.take(range(count), [longest] * count)
        used = pages_of(length)
        source = self.table[:, :used].repeat_interleave(times, 0).long()
        wide.pages[:, :, wide.table[:, :used].long()] = self.pages[:, :, source]
        return wide

    def _copy_table(self, rows: Sequence[int]) -> None:
        if rows:
            entries = self._numbers([self._row_pages[row] for row in rows])
            self.table.index_copy_(0, self.sizes.integers(rows), entries)
        self._beginning = None

    def _numbers(self, pages_by_row: Sequence[Sequence[int]]) -> Tensor:
        width = self.table.shape[1]
        padded = [[*pages, *[_UNREAD_PAGE] * (width - len(pages))] for pages in pages_by_row]
        return self.sizes.integers(padded, torch.int32).view(len(pages_by_row), width)


_NO_PAGE = 0
"""Fills the page table past the pages of a row, where it is not read."""


def most_pages(length: int, more: int, hypotheses: int = 1) -> int:
    """Most pages of the hypotheses of a sequence: ``length`` shared places, ``more`` for each."""
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
        self.sizes = sizes
        self.pages = self._pool(0)
        self._free: list[int] = []
        # Of each page: rows that read it.
        self._readers: list[int] = []
        # Of each row: its pages in order.
        self._row_pages: list[list[int]] = [[] for _ in range(rows)]
        self._columns = 1
        self._table: Tensor | None = None
        self._lengths: Tensor | None = None

    @property
    def page_bytes(self) -> int:
        sizes = self.sizes
        return 2 * sizes.layers * PAGE * sizes.heads * sizes.head_dim * sizes.dtype.itemsize

    @property
    def used(self) -> int:
        return len(self._readers) - len(self._free)

    def reserve(self, pages: int, longest: int, most: int | None = None) -> None:
        """Make room, if possible twice as much as before if there is too little.

        The page table grows here alone: the order of the sums in `decode_attention` may depend on
        its width. ``most`` limits the reserve for later; more than half of it is made all at once,
        as the pool is copied when it grows.
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
        self.release(rows)
        for row, length in zip(rows, lengths, strict=True):
            self._row_pages[row] = [self._take() for _ in range(pages_of(length))]
        owners = self._numbers([self._row_pages[row] for row in rows])
        return page_writer(self.sizes, self.pages, owners, range(len(rows)), lengths)

    def release(self, rows: Sequence[int]) -> None:
        """Make rows idle; pages that no other row reads become free."""
        for row in rows:
            pages, self._row_pages[row] = self._row_pages[row], []
            self._let_go(pages)
        if rows:
            self._table = None

    def select(self, rows: Sequence[int]) -> None:
        """Continue with these rows, which may repeat and take any order."""
        before, self._row_pages = self._row_pages, [list(self._row_pages[row]) for row in rows]
        for pages in self._row_pages:
            for page in pages:
                self._readers[page] += 1
        for pages in before:
            self._let_go(pages)
        self._table = None

    def look(self, lengths: Sequence[int]) -> None:
        """Make `attend` read these places of each row, 0 if idle; it writes the last one first."""
        sources, copies = [], []
        for pages, length in zip(self._row_pages, lengths, strict=True):
            if pages_of(length) > len(pages):
                pages.append(self._take())
                self._table = None
            elif length and self._readers[pages[-1]] > 1:
                sources.append(pages[-1])
                copies.append(self._take())
                self._readers[pages[-1]] -= 1
                pages[-1] = copies[-1]
                self._table = None
        if copies:
            copied = self.pages.index_select(2, self.sizes.integers(sources))
            self.pages.index_copy_(2, self.sizes.integers(copies), copied)
        self._lengths = self.sizes.integers(lengths, torch.int32)
        if self._table is None:
            self._table = self._numbers(self._row_pages)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """Write keys and values of a new place of each row, and attend to all of its places."""
        # q: (N, heads, D), a multiple of H heads -> (N, heads, D)
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

    def _numbers(self, pages_by_row: Sequence[Sequence[int]]) -> Tensor:
        """Copy pages of some rows to the device: int32 (rows, columns)."""
        empty = [_NO_PAGE] * self._columns
        flat = [page for pages in pages_by_row for page in (*pages, *empty[len(pages) :])]
        return self.sizes.integers(flat, torch.int32).view(len(pages_by_row), self._columns)
