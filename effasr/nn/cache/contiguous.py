"""Decoder cache with the keys and values of each row contiguous: fastest on a CPU."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from effasr_kernels import PackedLayout

_BLOCK = 16
"""Lengths are rounded up to a multiple of this, so that the order of a row's sums does not
depend on its neighbours: what is past the end adds zeros."""

_ALIGNMENT = 64  # bytes of a vector

_WIDTH = 32
"""Narrower heads are padded to this many channels: with fewer columns, MKL sums over the keys in
an order that depends on their number."""

GROUP = 4
"""Rows that are multiplied together, up to the longest of them: fewer rows read less padding,
more need fewer calls. MKL changes its routine, and the order of sums, for fewer rows, and with
several threads for numbers of rows that this does not divide."""


@dataclass(frozen=True, slots=True)
class CacheSizes:
    layers: int
    heads: int  # H
    head_dim: int  # D
    dtype: torch.dtype
    device: torch.device

    def integers(self, values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        """Copy numbers to the device, without waiting for it."""
        pinned = self.device.type == "cuda"
        host = torch.tensor(values, dtype=dtype, pin_memory=pinned)
        return host.to(self.device, non_blocking=pinned)

    def layout(self, lengths: Sequence[int]) -> PackedLayout:
        """Return a layout of packed sequences on the device; a tail completes the last group."""
        host = tuple(accumulate(lengths, initial=0))
        rows = -(-host[-1] // GROUP) * GROUP
        return PackedLayout(self.integers(host, torch.int32), host, rows)


@dataclass(frozen=True, slots=True)
class _Group:
    """Neighbouring rows, up to the length of the longest."""

    keys: list[Tensor]  # Keys of each layer, (rows H, D, length)
    values: list[Tensor]  # Values of each layer, (rows H, length, D)
    mask: Tensor  # (rows H, 1, length), added to scores


class ContiguousCache:
    """Keys and values of N rows, (N, H, room, D) per layer; the room grows as needed."""

    def __init__(self, sizes: CacheSizes, rows: int, *, ahead: bool = False) -> None:
        """Start empty; ``ahead`` doubles the room whenever it is too small."""
        self.sizes, self.rows, self._ahead = sizes, rows, ahead
        self._scale = sizes.head_dim**-0.5
        self._width = max(_WIDTH, sizes.head_dim)
        self._longest = 0
        self._unread: tuple[tuple[int, ...], bool] | None = None
        self._hold(self._empty(rows, 0))

    def loader(
        self, rows: Sequence[int], lengths: Sequence[int]
    ) -> Callable[[int, Tensor, Tensor], None]:
        """A function that writes packed keys and values of a layer from position 0 on."""
        longest = max(lengths, default=1)
        self._grow(longest)
        self._longest = max(self._longest, longest)
        total, width = sum(lengths), self.sizes.head_dim

        def write(layer: int, keys: Tensor, values: Tensor) -> None:
            for part, packed in zip(self._held[layer], (keys, values), strict=True):
                pieces = packed[:total].split(list(lengths))
                for row, piece in zip(rows, pieces, strict=True):
                    part[row, :, : len(piece), :width] = piece.transpose(0, 1)
                    if not len(piece):
                        # Attention to nothing is zero, which it then reads.
                        part[row, :, 0] = 0

        return write

    @property
    def held(self) -> Tensor:
        """All keys and values, (layers, 2, at least N, H, room, at least D), until it grows.

        The room is a multiple of 16, and what is past the end of a row is finite.
        """
        return self._held

    def reserve(self, longest: int) -> None:
        self._longest = longest
        self._grow(longest)

    def look(self, lengths: Sequence[int], *, grouped: bool = True) -> None:
        """Make `attend` read these lengths; ``grouped`` rows of similar length are read apart."""
        self.reserve(max(lengths, default=0))
        self._unread = tuple(lengths), grouped

    def _read(self, lengths: Sequence[int], grouped: bool) -> None:
        """Build views and masks for `look`, when the first layer attends."""
        heads, count, device = self.sizes.heads, len(lengths), self.sizes.device
        size = GROUP if grouped else max(1, count)
        bounds = [
            (begin, min(begin + size, count), _rounded(max(lengths[begin : begin + size])))
            for begin in range(0, count, size)
        ]
        if bounds != self._bounds:
            self._bounds = bounds
            self._views = [self._view(*bound) for bound in bounds]
        seen = torch.tensor(lengths, dtype=torch.int64, device=device).clamp(min=1)
        seen = seen.repeat_interleave(heads)
        self._groups = []
        for (begin, end, length), (keys, values) in zip(bounds, self._views, strict=True):
            past = torch.arange(length, device=device) >= seen[begin * heads : end * heads, None]
            mask = torch.zeros((), dtype=self.sizes.dtype, device=device)
            self._groups.append(_Group(keys, values, mask.masked_fill(past, -torch.inf)[:, None]))
        # Addresses of the last place of each row, in the order (N, keys or values, H).
        room = self._held.shape[4]
        last = torch.arange(count * heads, device=device) * room + seen - 1
        offset = self._held[0, 0].numel() // self._width
        last = torch.stack([last.view(count, heads), last.view(count, heads) + offset], 1)
        self._places = last.flatten()

    def attend(self, layer: int, q: Tensor, new: Tensor | None = None) -> Tensor:
        # q: (N K, H, D), K queries of each row -> (N K, H, D)
        if self._unread is not None:
            self._read(*self._unread)
            self._unread = None
        heads, width, missing = self.sizes.heads, self._width, self._width - q.shape[2]
        if new is not None:
            new = F.pad(new, (0, missing)) if missing else new
            self._flat[layer].index_copy_(0, self._places, new.reshape(-1, width))
        # Rows and heads form one dimension of a batched product: (N H, K, D).
        queries = F.pad(q, (0, missing)) if missing else q
        several = len(q) // max(1, self.rows)
        if several == 1:
            queries = queries.reshape(-1, 1, width)
        else:
            queries = queries.view(-1, several, heads, width).transpose(1, 2).flatten(0, 1)
        parts = [queries]
        if len(self._groups) > 1:
            parts = queries.split(GROUP * heads)
        outputs = []
        for group, part in zip(self._groups, parts, strict=True):
            scores = torch.baddbmm(group.mask, part, group.keys[layer], alpha=self._scale)
            outputs.append(torch.bmm(scores.softmax(-1), group.values[layer]))
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if several == 1 and not missing:
            return y.view(q.shape)
        y = y.view(-1, heads, several, width)[..., : q.shape[2]]
        return y.transpose(1, 2).reshape(q.shape)

    def keys(self, layer: int) -> Tensor:
        """Keys of a layer: (N, H, room, D), anything finite past the end of a row."""
        return self._held[layer, 0, : self.rows, ..., : self.sizes.head_dim]

    def reorder(self, rows: Tensor) -> None:
        """Continue each row from another one, which several rows may share."""
        # rows: int64 (M,), those others; M is the new number of rows
        held, self.rows = self._held, len(rows)
        if self.rows > held.shape[2]:
            self._hold(self._empty(self.rows, held.shape[4]))
        for old, new in zip(held, self._held, strict=True):
            # Places that have not been written need not be copied.
            new[:, : self.rows, :, : self._longest] = old[:, :, :, : self._longest].index_select(
                1, rows
            )

    def keep(self, rows: Sequence[int]) -> None:
        """Drop all rows but these; no row moves to a later place."""
        for target, row in enumerate(rows):
            if row != target:
                self._held[:, :, target] = self._held[:, :, row]
        self.rows = len(rows)

    def _grow(self, length: int) -> None:
        held = self._held
        length = max(1, length)
        if length <= held.shape[4]:
            return
        room = max(length, 2 * held.shape[4]) if self._ahead else length
        self._hold(self._empty(held.shape[2], room))
        if written := min(self._longest, held.shape[4]):
            self._held[..., :written, :] = held[..., :written, :]

    def _empty(self, rows: int, room: int) -> Tensor:
        # Zeros: masked values are multiplied by zero, which keeps NaN.
        sizes = self.sizes
        room = _rounded(room) if room else 0
        shape = sizes.layers, 2, rows, sizes.heads, room, self._width
        if sizes.device.type != "cpu":
            return torch.zeros(shape, dtype=sizes.dtype, device=sizes.device)
        # torch writes its zeros: 1 GB for 32 slots of Whisper base, of which a few files use a few.
        # NumPy's are pages that the system makes when they are first written.
        size = math.prod(shape) * sizes.dtype.itemsize
        memory = np.zeros(size + _ALIGNMENT, np.uint8)
        begin = -memory.ctypes.data % _ALIGNMENT
        return torch.from_numpy(memory[begin : begin + size]).view(sizes.dtype).view(*shape)

    def _hold(self, held: Tensor) -> None:
        """Use (layers, 2, rows, H, room, D) as keys and values."""
        self._held = held
        self._flat = [layer.view(-1, self._width) for layer in held]
        self._bounds: list[tuple[int, int, int]] = []

    def _view(self, begin: int, end: int, length: int) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of rows in the layout of the matrix products, of each layer."""
        near = self._held[:, :, begin:end, :, :length].unbind(0)
        keys = [part[0].flatten(0, 1).transpose(1, 2) for part in near]
        return keys, [part[1].flatten(0, 1) for part in near]


def _rounded(length: int) -> int:
    return max(1, -(-length // _BLOCK)) * _BLOCK
