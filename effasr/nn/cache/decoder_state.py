"""State of a decoder between tokens: caches and positions of its sequences."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from effasr.checks import check
from effasr.nn.cache.contiguous import CacheSizes, ContiguousCache
from effasr.nn.cache.paged import PagedCache, pages_of
from effasr_kernels import PackedLayout

KeysValues = tuple[Tensor, Tensor]
"""Keys and values of packed rows: (rows, H, D) each."""

KEPT_SHARE = 7 / 8
"""Finished sequences are dropped once at most this share remains, because the rest is copied."""


class DecoderState:
    """Keys and values of N sequences: of their tokens so far, and of their encoder output.

    Sequences may start and end at different times, each at its own position (`admit`, `release`).
    Or all start together and have several hypotheses each (`widen`, `reorder`, `keep`), which share
    the encoder output. The K = ``hypotheses`` of a sequence are neighbouring rows. ``length``
    counts steps; ``weights``, if a layer is ``watched``, is the attention of each row to each frame
    in the last step, averaged over the heads: float64 (N K, at least the longest), 0 past the end.
    """

    def __init__(
        self,
        sizes: CacheSizes,
        sequences: int,
        max_tokens: int,
        max_frames: int,
        *,
        paged: bool,
        pages: tuple[int, int] | None = None,
    ) -> None:
        """Start idle, with ``pages`` for tokens and for frames if ``paged``, by default enough."""
        self.sizes, self.max_tokens = sizes, max_tokens
        self.hypotheses, self.length, self._together = 1, 0, False
        self.watched: int | None = None
        self.weights: Tensor | None = None
        self.frames_each = [0] * sequences
        self._positions = torch.zeros(sequences, dtype=torch.int64, device=sizes.device)
        self._going = torch.zeros_like(self._positions)
        self._expert = torch.zeros_like(self._positions)
        self.self_cache: ContiguousCache | PagedCache
        self.cross_cache: ContiguousCache | PagedCache
        if paged:
            most = pages or [sequences * pages_of(longest) for longest in (max_tokens, max_frames)]
            self.self_cache = PagedCache(sizes, sequences, max_tokens, most[0])
            self.cross_cache = PagedCache(sizes, sequences, max_frames, most[1])
        else:
            self.self_cache = ContiguousCache(sizes, sequences, ahead=True)
            self.cross_cache = ContiguousCache(sizes, sequences)
        self._look_at_speech()

    @property
    def num_sequences(self) -> int:
        return len(self.frames_each)

    @property
    def num_rows(self) -> int:
        return self.num_sequences * self.hypotheses

    @property
    def frames(self) -> int:
        return sum(self.frames_each)

    @property
    def last_position(self) -> int:
        # A token that is read before the host sees the end of the sequence takes the last position.
        return self.max_tokens - 1 + self._together

    @property
    def paged(self) -> bool:
        return isinstance(self.self_cache, PagedCache)

    @property
    def positions(self) -> Tensor:
        """Number of tokens that each row has read: int64 (N K,), on the device."""
        return self._positions[: self.num_rows]

    @property
    def going(self) -> Tensor:
        """int64 (N K,), 1 for active rows, 0 for idle ones, which do not advance."""
        return self._going[: self.num_rows]

    @property
    def expert(self) -> Tensor:
        """Number of the expert of each row, int64 (N K,); 0 where no names choose it."""
        return self._expert[: self.num_rows]

    def fits(self, tokens: Sequence[int], frames: Sequence[int], *, empty: bool = False) -> bool:
        """Whether these sequences get pages: now, or with ``empty`` in empty caches."""
        return all(
            sum(map(pages_of, lengths)) <= (cache.most if empty else cache.free)
            for cache, lengths in ((self.self_cache, tokens), (self.cross_cache, frames))
            if isinstance(cache, PagedCache)
        )

    def admit(
        self,
        rows: Sequence[int],
        frames: Sequence[int],
        tokens: Sequence[int],
        keys_values: Iterable[Sequence[KeysValues]],
        read: Sequence[int] | None = None,
        expert: Tensor | None = None,
    ) -> None:
        """Start sequences in these rows, in place of what the rows held.

        ``keys_values`` are packed, of each layer: those of the encoder output, and where any token
        has been ``read`` those of the tokens. ``tokens``: the most that each sequence will read.
        """
        # expert: int64 (rows,), the expert of each; None where no names choose it
        read = [0] * len(rows) if read is None else read
        if isinstance(self.self_cache, PagedCache):
            self.self_cache.take(rows, tokens)
        if isinstance(self.cross_cache, PagedCache):
            self.cross_cache.take(rows, frames)
        loaders = [self.cross_cache.loader(rows, frames)]
        if any(read):
            loaders.append(self.self_cache.loader(rows, read))
        for layer, parts in zip(range(self.sizes.layers), keys_values, strict=True):
            for load, (keys, values) in zip(loaders, parts, strict=True):
                load(layer, keys, values)
        for row, length in zip(rows, frames, strict=True):
            self.frames_each[row] = length
        self._look_at_speech()
        self._set(rows, read, going=1)
        if expert is not None:
            self._expert.index_copy_(0, self.sizes.integers(rows), expert)

    def admit_all(
        self,
        layout: PackedLayout,
        keys_values: Iterable[Sequence[KeysValues]],
        read: int = 0,
        expert: Tensor | None = None,
    ) -> None:
        """Start all sequences together, with encoder output of this layout; see `admit`."""
        rows = range(self.num_sequences)
        count = len(rows)
        tokens = [self.max_tokens] * count
        self.admit(rows, layout.lengths, tokens, keys_values, [read] * count, expert)
        self.length, self._together = read, True

    def release(self, rows: Sequence[int]) -> None:
        """Make rows idle, without tokens or encoder output, and release their pages."""
        for cache in (self.self_cache, self.cross_cache):
            if isinstance(cache, PagedCache):
                cache.release(rows)
        for row in rows:
            self.frames_each[row] = 0
        self._look_at_speech()
        self._set(rows, [0] * len(rows), going=0)

    def watch(self) -> None:
        """Make steps compute the `weights` of the last layer, which slows them down."""
        self.watched = self.sizes.layers - 1

    def speech(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys of the encoder output, (N, H, places, D), and frames of each, int64 (N,)."""
        return self.cross_cache.keys(layer), self.sizes.integers(self.frames_each)

    def look(self) -> None:
        self._check_room()
        seen = self.positions + 1
        if isinstance(self.self_cache, PagedCache):
            self.self_cache.lengths.copy_(seen)
        else:
            self.self_cache.look(seen.tolist(), grouped=False)

    def reserve(self) -> tuple[ContiguousCache, ContiguousCache]:
        """Prepare a step that itself writes to the caches, of tokens and of encoder output."""
        self._check_room()
        tokens, speech = self.self_cache, self.cross_cache
        if isinstance(tokens, PagedCache) or isinstance(speech, PagedCache):
            raise ValueError("`paged` must be false for steps that write to contiguous caches.")
        tokens.reserve(max(self.positions.tolist(), default=0) + 1)
        return tokens, speech

    def advance(self) -> None:
        moved = self.positions + self.going
        self.positions.copy_(moved.clamp_(max=self.last_position))
        self.length += 1

    def widen(self, hypotheses: int) -> None:
        """Give each sequence this many hypotheses, copies of its only one."""
        check(self.hypotheses == 1, "hypotheses", "be 1 before a state is widened", self.hypotheses)
        self.hypotheses = hypotheses
        if isinstance(self.self_cache, PagedCache):
            self.self_cache = self.self_cache.widened(hypotheses, self.length)
        else:
            rows = torch.arange(self.num_sequences, device=self.sizes.device)
            self.self_cache.reorder(rows.repeat_interleave(hypotheses))
        self._positions = self._positions.repeat_interleave(hypotheses)
        self._going = self._going.repeat_interleave(hypotheses)
        self._expert = self._expert.repeat_interleave(hypotheses)

    def reorder(self, rows: Tensor) -> None:
        """Continue each hypothesis from another one of its sequence: int64 (``num_rows``,)."""
        if isinstance(self.self_cache, PagedCache):
            self.self_cache.reorder(rows, self.length)
        else:
            self.self_cache.reorder(rows)

    def keep(self, indices: Sequence[int]) -> None:
        """Drop all sequences but these, with their hypotheses; none may move to a later place."""
        wrong = next((target for target, index in enumerate(indices) if index < target), None)
        if wrong is not None:
            raise ValueError(
                f"`indices` must not be less than the places they get, but {indices[wrong]} gets "
                f"{wrong}."
            )
        width = self.hypotheses
        rows = [index * width + k for index in indices for k in range(width)]
        self.self_cache.keep(rows)
        self.cross_cache.keep(indices)
        index = self.sizes.integers(rows)
        self._positions[: len(rows)] = self._positions[index]
        self._going[: len(rows)] = self._going[index]
        self._expert[: len(rows)] = self._expert[index]
        self.frames_each = [self.frames_each[sequence] for sequence in indices]
        self._look_at_speech()

    def extend(self, sequences: int) -> None:
        """Add idle rows again after `keep`, up to the original number; not for pages."""
        added = range(self.num_sequences, sequences)
        self.frames_each += [0] * len(added)
        for cache in (self.self_cache, self.cross_cache):
            assert isinstance(cache, ContiguousCache)
            cache.rows = sequences
        self._look_at_speech()
        self._set(added, [0] * len(added), going=0)

    def _set(self, rows: Sequence[int], read: Sequence[int], *, going: int) -> None:
        index = self.sizes.integers(rows)
        self._positions.index_copy_(0, index, self.sizes.integers(read))
        self._going.index_fill_(0, index, going)

    def _look_at_speech(self) -> None:
        if isinstance(self.cross_cache, ContiguousCache):
            self.cross_cache.look(self.frames_each)

    def _check_room(self) -> None:
        if self._together and self.length == self.max_tokens:
            raise ValueError(
                f"DecoderState: at most {self.max_tokens} tokens can be decoded: raise "
                "`max_tokens`."
            )
