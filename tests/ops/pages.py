"""Random keys and values in pages, for the tests of what reads and writes them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Paged:
    """Arguments of `decode_attention` for one batch.

    Attributes:
        q: (N, H, D).
        k_pages: (P, B, Hk, D), NaN wherever no key is.
        v_pages: Likewise.
        page_table: (S, M), with numbers of no page where none is needed.
        lengths: (S,).
    """

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    lengths: Tensor

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """In order."""
        return self.q, self.k_pages, self.v_pages, self.page_table, self.lengths

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Paged":
        """The same elsewhere, floating tensors in another dtype."""
        floating, integers = self.arguments[:3], self.arguments[3:]
        return Paged(*(x.to(device, dtype) for x in floating), *(x.to(device) for x in integers))

    def choose(self, sequences: list[int]) -> "Paged":
        """A batch of some of its sequences, in another order."""
        width = self.q.shape[0] // len(self.lengths)
        q = self.q.unflatten(0, (-1, width))[sequences].flatten(0, 1)
        return replace(
            self, q=q, page_table=self.page_table[sequences], lengths=self.lengths[sequences]
        )


def draw(
    lengths: tuple[int, ...],
    *,
    size: int = 4,
    columns: int | None = None,
    hypotheses: int = 1,
    heads: int = 2,
    share: int = 1,
    width: int = 8,
    spare: int = 2,
) -> Paged:
    """Draw a batch whose sequences have these lengths, their pages in no order.

    Args:
        lengths: Keys of each sequence.
        size: B.
        columns: M; by default as many as the longest needs.
        hypotheses: Of each sequence.
        heads: Hk.
        share: H / Hk.
        width: D.
        spare: Pages that nobody uses.
    """
    needed = [-(-length // size) for length in lengths]
    columns = max([1, *needed]) if columns is None else columns
    pages = sum(needed) + spare
    numbers = iter(torch.randperm(pages).tolist())
    table = torch.full((len(lengths), columns), -(2**31), dtype=torch.int32)
    k, v = torch.randn(2, pages, size, heads, width, dtype=torch.float64)
    holes = torch.ones(pages, size, dtype=torch.bool)
    for s, length in enumerate(lengths):
        for column in range(needed[s]):
            table[s, column] = page = next(numbers)
            holes[page, : length - column * size] = False
    q = torch.randn(len(lengths) * hypotheses, heads * share, width, dtype=torch.float64)
    k[holes], v[holes] = torch.nan, torch.nan
    return Paged(q, k, v, table, torch.tensor(lengths, dtype=torch.int32))


def keys_of(pages: Tensor, table: Tensor, length: int) -> Tensor:
    """The rows of a sequence one by one, (length, Hk, D)."""
    size = pages.shape[1]
    rows = [pages[int(table[j // size]), j % size] for j in range(length)]
    return torch.stack(rows) if rows else pages.new_zeros(0, *pages.shape[2:])


def brute_force(batch: Paged, scale: float | None = None) -> Tensor:
    """Query by query, head by head, with nothing in common with the reference but the formula."""
    scale = batch.q.shape[2] ** -0.5 if scale is None else scale
    per_sequence = batch.q.shape[0] // max(1, len(batch.lengths))
    share = batch.q.shape[1] // max(1, batch.k_pages.shape[2])
    out = torch.zeros_like(batch.q)
    for n in range(batch.q.shape[0]):
        s = n // per_sequence
        table, length = batch.page_table[s], int(batch.lengths[s])
        k, v = (keys_of(x, table, length) for x in (batch.k_pages, batch.v_pages))
        for h in range(batch.q.shape[1]):
            weights = (k[:, h // share] * batch.q[n, h]).sum(1).mul(scale).exp()
            if length:
                out[n, h] = (weights[:, None] * v[:, h // share]).sum(0) / weights.sum()
    return out
