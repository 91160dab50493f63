"""Keys and values that a decoder keeps from one token to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from effasr_kernels import PackedLayout

KEPT_SHARE = 7 / 8
"""Finished sequences are worth dropping once no more than this share stays: it is copied."""


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

    def keep(self, indices: Sequence[int] | Tensor) -> None:
        """Drop all sequences but these, which take this order; one may come twice.

        Args:
            indices: Into the sequences; int64 on their device, or on the host.
        """
        if self._held is None:
            return
        kept = torch.as_tensor(indices, dtype=torch.int64, device=self._held.device)
        # What has not been written yet need not be copied.
        used = self._held[:, :, :, : self.length].index_select(1, kept)
        if len(kept) != self._held.shape[1]:
            _, _, heads, room, width = self._held.shape
            self._held = self._held.new_empty(2, len(kept), heads, room, width)
        self._held[:, :, :, : self.length] = used


@dataclass(frozen=True, slots=True)
class CrossCache:
    """Keys and values of the encoded speech, for one new token of each hypothesis.

    Attributes:
        keys: (T, H, D).
        values: (T, H, D).
        layout_encoded: Their sequences.
        layout_step: N sequences, with one row for each of their hypotheses.
    """

    keys: Tensor
    values: Tensor
    layout_encoded: PackedLayout
    layout_step: PackedLayout


class DecoderState:
    """What a decoder carries from one token to the next, for N sequences in step.

    Each sequence has one hypothesis, or after `widen` several, which share the keys and values of
    its speech. The hypotheses of a sequence are neighbours among the rows that a step reads.

    Attributes:
        hypotheses: Of each sequence.
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
        self.hypotheses = 1
        self.self_caches = [SelfCache(max_tokens) for _ in keys_values]
        self._set_cross_caches(keys_values, layout_encoded)

    @property
    def num_sequences(self) -> int:
        """N, the sequences that are still decoded."""
        return self._layout.num_sequences

    @property
    def num_rows(self) -> int:
        """Hypotheses of all sequences: what a step reads one token of each for."""
        return self.num_sequences * self.hypotheses

    def widen(self, hypotheses: int) -> None:
        """Give each sequence this many hypotheses, copies of the only one that it has."""
        if self.hypotheses != 1:
            raise ValueError(
                f"`hypotheses` must be 1 before a state is widened, but is {self.hypotheses}."
            )
        self.hypotheses = hypotheses
        self.reorder(torch.arange(self.num_sequences).repeat_interleave(hypotheses))
        kept = [(cache.keys, cache.values) for cache in self.cross_caches]
        self._set_cross_caches(kept, self._layout)

    def reorder(self, rows: Tensor) -> None:
        """Let each hypothesis go on from what another of its sequence has read.

        Args:
            rows: int64 (``num_rows``,), the row of that other.
        """
        for cache in self.self_caches:
            cache.keep(rows)

    def keep(self, indices: Sequence[int]) -> None:
        """Drop all sequences but these, which take this order; one may come twice.

        Args:
            indices: Into the sequences that are left now, on the host. All hypotheses of a sequence
                go with it.
        """
        rows, layout = _keep_rows(self._layout, indices)
        kept = [(cache.keys[rows], cache.values[rows]) for cache in self.cross_caches]
        self._set_cross_caches(kept, layout)
        width = self.hypotheses
        self.reorder(
            torch.tensor([n * width + k for n in indices for k in range(width)], dtype=torch.int64)
        )

    def _set_cross_caches(
        self, keys_values: Sequence[tuple[Tensor, ...]], layout: PackedLayout
    ) -> None:
        step = PackedLayout.from_lengths([self.hypotheses] * layout.num_sequences, layout.device)
        self._layout = layout
        self.cross_caches = [CrossCache(k, v, layout, step) for k, v in keys_values]


def _keep_rows(layout: PackedLayout, indices: Sequence[int]) -> tuple[Tensor, PackedLayout]:
    """The rows of these sequences, int64, and the layout that they have afterwards."""
    starts, lengths = layout.cu_seqlens_host, layout.lengths
    rows = [torch.arange(starts[n], starts[n] + lengths[n]) for n in indices]
    kept = PackedLayout.from_lengths([lengths[n] for n in indices], layout.device)
    return torch.cat([torch.arange(0), *rows]).to(layout.device), kept
