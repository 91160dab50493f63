"""Language model that reads conversations whole, and then row by row from a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from effasr.model.cost import language_model_sizes
from effasr.model.language_model.model import LanguageModel
from effasr.model.language_model.packed_attention import AttentionContext, PackedContext
from effasr.nn.cache.contiguous import CacheSizes, ContiguousCache
from effasr.nn.cache.paged import SharedPageCache
from effasr_kernels import PackedSequence


@dataclass(frozen=True, slots=True)
class _ContiguousContext:
    """Each new row attends to itself and to the cached rows of its conversation."""

    cache: ContiguousCache
    longest: int

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        sizes, group = self.cache.sizes, q.shape[1] // k.shape[1]
        new = torch.stack([k, v], 1).to(sizes.dtype)
        if scale is not None:
            # The cache multiplies scores by its own factor.
            q = q * (scale * sizes.head_dim**0.5)
        # To the cache, heads that share keys are several queries of a row.
        queries = q.unflatten(1, (-1, group)).transpose(1, 2).flatten(0, 1).to(sizes.dtype)
        y = self.cache.attend(layer, queries, new)
        return y.unflatten(0, (-1, group)).transpose(1, 2).flatten(1, 2).to(v.dtype)


@dataclass(frozen=True, slots=True)
class _PagedContext:
    """Each new row attends to itself and to the rows of its conversation in pages."""

    cache: SharedPageCache
    longest: int

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        return self.cache.attend(layer, q, k, v, scale).to(v.dtype)


class CachedConversations:
    """Conversations that a language model has read; rows are hypotheses, or idle, each alone."""

    def __init__(
        self, model: LanguageModel, rows: int, dtype: torch.dtype, *, paged: bool | None = None
    ) -> None:
        sizes, device = language_model_sizes(model.config), model.output_weight.device
        self._model = model
        shape = CacheSizes(sizes.layers, sizes.key_heads, sizes.head_dim, dtype, device)
        self._cache: ContiguousCache | SharedPageCache
        if device.type != "cpu" if paged is None else paged:
            self._cache = SharedPageCache(shape, rows)
        else:
            self._cache = ContiguousCache(shape, rows, ahead=True)
        # Of idle rows 0.
        self._lengths = [0] * rows
        self._hidden = torch.zeros(rows, sizes.width, device=device)

    @property
    def lengths(self) -> Sequence[int]:
        """Rows of the language model that each hypothesis has read; 0 for idle rows."""
        return self._lengths

    @property
    def page_bytes(self) -> int:
        """Bytes of a page; 0 if the cache has none."""
        if not isinstance(self._cache, SharedPageCache):
            return 0
        return self._cache.page_bytes

    def reserve(self, pages: int, longest: int, most: int | None = None) -> None:
        """Make room for conversations; a cache without pages makes it when they are read."""
        if isinstance(self._cache, SharedPageCache):
            self._cache.reserve(pages, longest, most)

    def admit(self, rows: Sequence[int], x: PackedSequence) -> None:
        """Read whole conversations (U, width) in place of what these rows held; there is room."""
        lengths = x.layout.lengths
        write = self._cache.loader(rows, lengths)
        context = PackedContext(x.layout, observe=write)
        hidden = self._model.run(x.values, x.layout.positions(), context)
        last = hidden[x.layout.cu_seqlens[1:].long() - 1]
        index = self._cache.sizes.integers(rows)
        self._hidden = self._hidden.to(last.dtype).index_copy(0, index, last)
        for row, length in zip(rows, lengths, strict=True):
            self._lengths[row] = length

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._lengths[row] = 0
        if isinstance(self._cache, SharedPageCache):
            self._cache.release(rows)

    def logits(self) -> Tensor:
        """Return the logits of the next token of each hypothesis: (N, V) float32."""
        return self._model.logits(self._hidden).float()

    def read(self, tokens: Sequence[int]) -> None:
        """Read one more token of each hypothesis; those of idle rows are not used."""
        integers = self._cache.sizes.integers
        positions = integers(self._lengths)
        self._lengths = [length and length + 1 for length in self._lengths]
        longest = max(self._lengths)
        context: AttentionContext
        if isinstance(self._cache, SharedPageCache):
            self._cache.look(self._lengths)
            context = _PagedContext(self._cache, longest)
        else:
            self._cache.look(self._lengths, grouped=False)
            context = _ContiguousContext(self._cache, longest)
        x = self._model.embed_tokens(integers(tokens))
        self._hidden = self._model.run(x, positions, context)

    def select(self, rows: Sequence[int]) -> None:
        """Continue with these hypotheses, which may repeat and take any order; at least one."""
        index = self._cache.sizes.integers(rows)
        if isinstance(self._cache, SharedPageCache):
            self._cache.select(rows)
        else:
            self._cache.reorder(index)
        self._hidden = self._hidden[index]
        self._lengths = [self._lengths[row] for row in rows]

    def extend(self, rows: int) -> list[int]:
        before = len(self._lengths)
        self.select([*range(before), *[0] * rows])
        added = list(range(before, before + rows))
        self.release(added)
        return added
