"""Keys and values that a decoder keeps from one token to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from effasr_kernels import PackedLayout


class SelfCache:
    """Keys and values of the tokens so far, with room for more.

    All sequences have equally many tokens, so this needs no layout.
    """

    def __init__(self, room: int):
        """Start empty.

        Args:
            room: Most tokens that it can hold.
        """
        self.room = room
        self.length = 0
        self._held: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Add a token of each sequence.

        Args:
            k: (N, H, D).
            v: (N, H, D).

        Returns:
            All keys and all values so far, (N, H, length, D) each.

        Raises:
            ValueError: There is no room left.
        """
        if self.length == self.room:
            raise ValueError(
                f"SelfCache: at most {self.room} tokens can be decoded: raise `max_tokens`."
            )
        if self._held is None:
            count, heads, width = k.shape
            self._held = k.new_empty(2, count, heads, self.room, width)
        self._held[0, :, :, self.length] = k
        self._held[1, :, :, self.length] = v
        self.length += 1
        return self._held[:, :, :, : self.length].unbind(0)

    def keep(self, indices: Sequence[int]) -> None:
        """Drop all sequences but these, which take this order."""
        if self._held is not None:
            kept = torch.tensor(indices, dtype=torch.int64, device=self._held.device)
            self._held = self._held.index_select(1, kept)


@dataclass(frozen=True, slots=True)
class CrossCache:
    """Keys and values of the encoded speech, for one new token of each sequence.

    Attributes:
        keys: (T, H, D).
        values: (T, H, D).
        layout_encoded: Their sequences.
        layout_step: N sequences of one row.
    """

    keys: Tensor
    values: Tensor
    layout_encoded: PackedLayout
    layout_step: PackedLayout


class DecoderState:
    """What a decoder carries from one token to the next, for N sequences in step.

    Attributes:
        self_caches: One per layer.
        cross_caches: One per layer.
        max_tokens: Most tokens that it can hold.
        length: Tokens so far, the same for every sequence.
    """

    def __init__(
        self,
        keys_values: Sequence[tuple[Tensor, ...]],
        layout_encoded: PackedLayout,
        max_tokens: int,
    ):
        """Start before the first token.

        Args:
            keys_values: Of the encoded speech, for each layer: (T, H, D) each.
            layout_encoded: Their sequences.
            max_tokens: Most tokens that will be decoded.
        """
        self.max_tokens = max_tokens
        self.length = 0
        self.self_caches = [SelfCache(max_tokens) for _ in keys_values]
        self._set_cross_caches(keys_values, layout_encoded)

    @property
    def num_sequences(self) -> int:
        """N, the sequences that are still decoded."""
        return self._layout.num_sequences

    def keep(self, indices: Sequence[int]) -> None:
        """Drop all sequences but these, which take this order; one may come twice.

        Args:
            indices: Into the sequences that are left now, on the host.
        """
        rows, layout = _keep_rows(self._layout, indices)
        kept = [(cache.keys[rows], cache.values[rows]) for cache in self.cross_caches]
        self._set_cross_caches(kept, layout)
        for cache in self.self_caches:
            cache.keep(indices)

    def _set_cross_caches(
        self, keys_values: Sequence[tuple[Tensor, ...]], layout: PackedLayout
    ) -> None:
        step = PackedLayout.from_lengths([1] * layout.num_sequences, layout.device)
        self._layout = layout
        self.cross_caches = [CrossCache(k, v, layout, step) for k, v in keys_values]


def _keep_rows(layout: PackedLayout, indices: Sequence[int]) -> tuple[Tensor, PackedLayout]:
    """The rows of these sequences, int64, and the layout that they have afterwards."""
    starts, lengths = layout.cu_seqlens_host, layout.lengths
    rows = [torch.arange(starts[n], starts[n] + lengths[n]) for n in indices]
    kept = PackedLayout.from_lengths([lengths[n] for n in indices], layout.device)
    return torch.cat([torch.arange(0), *rows]).to(layout.device), kept
