"""Sequences of unequal length stored end to end, without padding between them.

Shapes are written with these letters everywhere in this project:

    N  sequences in a batch        C  channels (model width)
    T  packed frames (audio)       H  attention heads
    U  packed tokens (text)        D  width of one head
    V  vocabulary                  J  width of a transducer's joint
    K  taps of a convolution

A batch of a static shape has more rows than its sequences fill: the rows from ``cu_seqlens[-1]`` on
are the *tail*. Every operation writes zeros to the tail of its result, and the gradient there is
zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

_INTEGERS: tuple[type, ...] = (int, torch.SymInt)
_INT32_MAX = torch.iinfo(torch.int32).max


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """The boundaries of the sequences in a packed tensor.

    Attributes:
        cu_seqlens: Offsets, int32 (N + 1,), on the device of the values. Sequence n is
            rows ``cu_seqlens[n]:cu_seqlens[n + 1]``.
        cu_seqlens_host: The same offsets as Python ints, so that the host computes the sizes of
            outputs without waiting for the device.
        rows: Rows of every tensor with this layout, including the tail.
        static_max_seqlen: Upper bound of all lengths, equal for every batch of a static shape;
            None if there is no such bound. See `max_seqlen_bound`.
    """

    cu_seqlens: Tensor
    cu_seqlens_host: Sequence[int]
    rows: int
    static_max_seqlen: int | None = None
    _max_seqlen: int | None = field(default=None, init=False, repr=False, compare=False)
    _tile_tables: dict[int, Tensor] | None = field(
        default=None, init=False, repr=False, compare=False
    )
    _tile_counts: TileCounts | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int],
        device: torch.device | str | None = None,
        *,
        rows: int | None = None,
        num_sequences: int | None = None,
        static_max_seqlen: int | None = None,
    ) -> PackedLayout:
        """Build the layout of sequences of these lengths; a length may be zero.

        Args:
            lengths: The length of each sequence, on the host.
            device: Device of ``cu_seqlens``.
            rows: Rows of the tensors, for a static shape; ``sum(lengths)`` by default.
            num_sequences: N, for a static shape; empty sequences are appended up to it.
            static_max_seqlen: Upper bound of all lengths, for a static shape.

        Raises:
            ValueError: A length is negative or above ``static_max_seqlen``, the total does not fit
                in int32, the sequences do not fit in ``rows`` or ``num_sequences``, or the
                lengths are on another device.
        """
        if isinstance(lengths, Tensor):
            if lengths.device.type != "cpu":
                raise ValueError(
                    f"`lengths` must be on the host, but is a tensor on {lengths.device}: pass "
                    "lengths.tolist(), which waits for the device, or use from_offsets."
                )
            lengths = lengths.tolist()
        # NumPy's integers are no arguments of kernels.
        lengths = [n if isinstance(n, _INTEGERS) else int(n) for n in lengths]
        for n, length in enumerate(lengths):
            if length < 0:
                raise ValueError(f"`lengths[{n}]` must be at least 0, but is {length}.")
            if static_max_seqlen is not None and length > static_max_seqlen:
                raise ValueError(
                    f"`lengths[{n}]` must be at most `static_max_seqlen` = {static_max_seqlen}, "
                    f"but is {length}."
                )
        host = tuple(accumulate(lengths, initial=0))
        rows = host[-1] if rows is None else rows
        rows = _fitting(rows)
        if rows < host[-1]:
            raise ValueError(f"`rows` must be at least sum(lengths) = {host[-1]}, but is {rows}.")
        if num_sequences is not None:
            if num_sequences < len(lengths):
                raise ValueError(
                    f"`num_sequences` must be at least len(lengths) = {len(lengths)}, "
                    f"but is {num_sequences}."
                )
            host += (host[-1],) * (num_sequences - len(lengths))
        return cls(
            torch.tensor(host, dtype=torch.int32, device=device), host, rows, static_max_seqlen
        )

    @classmethod
    def from_offsets(cls, cu_seqlens: Tensor, rows: int) -> PackedLayout:
        """Build a layout whose offsets a device has computed: the host does not read them.

        Args:
            cu_seqlens: Offsets, int32 (N + 1,), not decreasing from 0 to at most ``rows``.
            rows: Rows of the tensors. No length is known, so `max_seqlen_bound` is ``rows``.
        """
        host = () if torch.compiler.is_compiling() else OffsetsOnDemand(cu_seqlens)
        return cls(cu_seqlens, host, rows, rows)

    @property
    def num_sequences(self) -> int:
        """N, the number of sequences, including empty ones."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def known_on_host(self) -> bool:
        """Whether the host can read lengths without waiting for the device or tracing them."""
        if torch.compiler.is_compiling():
            return False
        return not isinstance(self.cu_seqlens_host, OffsetsOnDemand)

    @property
    def total(self) -> int:
        """Number of rows that belong to a sequence; the tail is ``total:rows``."""
        return self.cu_seqlens_host[-1]

    @property
    def lengths(self) -> tuple[int, ...]:
        """The length of each sequence."""
        return tuple(end - begin for begin, end in pairwise(self.cu_seqlens_host))

    @property
    def max_seqlen(self) -> int:
        """The largest length; 0 without sequences."""
        if torch.compiler.is_compiling() or not isinstance(self.cu_seqlens_host, tuple):
            return max(self.lengths, default=0)
        if self._max_seqlen is None:
            # Cached, as every call of every operation on this layout reads it.
            object.__setattr__(self, "_max_seqlen", max(self.lengths, default=0))
        return self._max_seqlen  # type: ignore[return-value]

    @property
    def max_seqlen_bound(self) -> int:
        """Upper bound of all lengths: ``static_max_seqlen`` if given, else `max_seqlen`."""
        return self.max_seqlen if self.static_max_seqlen is None else self.static_max_seqlen

    @property
    def has_tail(self) -> bool:
        """Whether rows may follow the last sequence; always True for a static shape."""
        return self.static_max_seqlen is not None or self.rows > self.total

    @property
    def device(self) -> torch.device:
        """Device of ``cu_seqlens``."""
        return self.cu_seqlens.device

    def sequence_ids(self) -> Tensor:
        """The sequence of each row: int64 (rows,), N in the tail; computed on the device."""
        row = torch.arange(self.rows, device=self.device, dtype=torch.int32)
        # Not in cu_seqlens[1:]: compiled for a GPU, a search in a slice begins at the first element
        # of the whole tensor (pytorch/pytorch 182343).
        return torch.bucketize(row, self.cu_seqlens, right=True) - 1

    def positions(self) -> Tensor:
        """The position of each row in its sequence or in the tail: int64 (rows,)."""
        row = torch.arange(self.rows, device=self.device)
        return row - self.cu_seqlens[self.sequence_ids()]

    def mask(self) -> Tensor:
        """Which rows belong to a sequence: bool (rows,), False in the tail."""
        return torch.arange(self.rows, device=self.device) < self.cu_seqlens[-1]

    def scaled(self, factor: int) -> PackedLayout:
        """The layout in which each row of this one becomes ``factor`` rows.

        Raises:
            ValueError: The rows do not fit in int32.
        """
        rows = _fitting(self.rows * factor)
        offsets = self.cu_seqlens * factor
        host = self._derived(offsets, lambda n, offset: offset * factor)
        bound = None if self.static_max_seqlen is None else self.static_max_seqlen * factor
        return PackedLayout(offsets, host, rows, bound)

    def lengthened(self, count: int) -> PackedLayout:
        """The layout in which each sequence has ``count`` more rows.

        Raises:
            ValueError: The rows do not fit in int32.
        """
        rows = _fitting(self.rows + self.num_sequences * count)
        index = torch.arange(self.cu_seqlens.shape[0], dtype=torch.int32, device=self.device)
        offsets = self.cu_seqlens + index * count
        host = self._derived(offsets, lambda n, offset: offset + n * count)
        bound = None if self.static_max_seqlen is None else self.static_max_seqlen + count
        return PackedLayout(offsets, host, rows, bound)

    def _derived(self, offsets: Tensor, change: Callable[[int, int], int]) -> Sequence[int]:
        """The host offsets, each changed; () in compiled code, which would guard on each offset."""
        if torch.compiler.is_compiling():
            return ()
        if not self.known_on_host:
            return OffsetsOnDemand(offsets)
        return tuple(change(n, offset) for n, offset in enumerate(self.cu_seqlens_host))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedLayout:
        """The same layout with ``cu_seqlens`` on another device."""
        moved = self.cu_seqlens.to(device, non_blocking=non_blocking)
        return PackedLayout(moved, self.cu_seqlens_host, self.rows, self.static_max_seqlen)

    def with_tile_tables(self) -> PackedLayout:
        """A copy that keeps the tables of tiles that kernels make of it, so that they share them.

        Without tables each program of a kernel searches the offsets for its rows. The copy is for
        the forward and backward of one batch: tables are not made again if the offsets are
        overwritten, and a CUDA graph contains the making of those that it uses only if the copy
        is made while it is captured. Compiled code keeps no tables.
        """
        if torch.compiler.is_compiling():
            return self
        copy = PackedLayout(
            self.cu_seqlens, self.cu_seqlens_host, self.rows, self.static_max_seqlen
        )
        object.__setattr__(copy, "_tile_tables", {})
        is_exact = self._tile_counts is None and self.known_on_host
        copy.keep_to(TileCounts(self) if is_exact else self._tile_counts)
        return copy

    @property
    def tile_tables(self) -> dict[int, Tensor] | None:
        """Tables by rows of a tile, see `runtime.tiles.tile_table`; None if none are kept."""
        return self._tile_tables

    @property
    def tile_counts(self) -> TileCounts | None:
        """Upper bounds of the tiles in a table, where there are tables and the host knows."""
        return None if self._tile_tables is None else self._tile_counts

    def keep_to(self, tile_counts: TileCounts | None) -> None:
        """Set `tile_counts` for whatever offsets are written to the layout, and for its copies."""
        object.__setattr__(self, "_tile_counts", tile_counts)

    def rewritable(self) -> PackedLayout:
        """A copy of the layout, to overwrite its ``cu_seqlens`` with other offsets."""
        offsets = self.cu_seqlens.clone()
        return PackedLayout(offsets, OffsetsOnDemand(offsets), self.rows, self.static_max_seqlen)

    def pin_memory(self) -> PackedLayout:
        """The same layout with ``cu_seqlens`` in pinned memory."""
        pinned = self.cu_seqlens.pin_memory()
        return PackedLayout(pinned, self.cu_seqlens_host, self.rows, self.static_max_seqlen)


class TileCounts(dict[int, int]):
    """By rows of a tile, as kernels ask for them: the most tiles with rows, those of the tail, too.

    These are the tiles of a layout that the host knows, and a share ``spare`` more.
    """

    def __init__(self, layout: PackedLayout, spare: float = 0.0):
        self._layout, self._spare = layout, spare

    def __missing__(self, block: int) -> int:
        count = self[block] = math.ceil((1 + self._spare) * self._exact(block))
        return count

    def admit(self, layout: PackedLayout) -> bool:
        """Raise the bounds to those of a layout; return whether one was too low for it."""
        self._layout = layout
        low = [block for block, count in self.items() if self._exact(block) > count]
        for block in low:
            del self[block]
        return bool(low)

    def _exact(self, block: int) -> int:
        lengths = *self._layout.lengths, self._layout.rows - self._layout.total
        return sum(-(-length // block) for length in lengths)


class OffsetsOnDemand(Sequence[int]):
    """``cu_seqlens_host`` of a layout with offsets only on the device.

    Reading an offset waits for the device, which is an error while a CUDA graph is captured.
    Kernels do not read the offsets, references do.
    """

    def __init__(self, cu_seqlens: Tensor):
        """Keep a reference to the tensor; its values may change."""
        self._cu_seqlens = cu_seqlens

    def __len__(self) -> int:
        return self._cu_seqlens.shape[0]

    def __iter__(self) -> Iterator[int]:
        return iter(self._cu_seqlens.tolist())

    def __getitem__(self, index: int | slice) -> Any:
        return self._cu_seqlens.tolist()[index]


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """Values of packed sequences together with their layout.

    Attributes:
        values: (rows, ...), row t belongs to the sequence whose range contains t.
        layout: The boundaries of the sequences; tensors of one batch share it.
    """

    values: Tensor
    layout: PackedLayout

    def __post_init__(self) -> None:
        if self.values.ndim == 0 or self.values.shape[0] != self.layout.rows:
            raise ValueError(
                f"`values` must have {self.layout.rows} rows, as its layout does, "
                f"but has shape {tuple(self.values.shape)}."
            )

    def with_values(self, values: Tensor) -> PackedSequence:
        """Return other values under the same layout."""
        return PackedSequence(values, self.layout)

    def unpack(self) -> list[Tensor]:
        """Return one view per sequence, in order, without the tail."""
        return list(self.values[: self.layout.total].split(self.layout.lengths))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedSequence:
        """The same sequences on another device."""
        return PackedSequence(
            self.values.to(device, non_blocking=non_blocking),
            self.layout.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> PackedSequence:
        """The same sequences in pinned memory."""
        return PackedSequence(self.values.pin_memory(), self.layout.pin_memory())


def pack(
    sequences: Sequence[Tensor], *, rows: int | None = None, num_sequences: int | None = None
) -> PackedSequence:
    """Store sequences, each (length, ...), end to end, with a tail of zeros up to ``rows``.

    Raises:
        ValueError: ``sequences`` is empty, or the sequences do not fit in the static shape.
    """
    if not sequences:
        raise ValueError("`sequences` must not be empty.")
    lengths = [sequence.shape[0] for sequence in sequences]
    first = sequences[0]
    layout = PackedLayout.from_lengths(
        lengths, first.device, rows=rows, num_sequences=num_sequences
    )
    tail = first.new_zeros(layout.rows - layout.total, *first.shape[1:])
    return PackedSequence(torch.cat([*sequences, tail]), layout)


def _fitting(rows: int) -> int:
    """Return the number of rows, checked to fit in int32 offsets."""
    if rows > _INT32_MAX:
        raise ValueError(f"`rows` must fit in int32, but is {rows}: use a smaller batch.")
    return rows
