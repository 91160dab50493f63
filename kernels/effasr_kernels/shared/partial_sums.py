"""Sums of the partial sums that the programs of a kernel write, rounded in the same launch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.runtime.counters import program_counters
from effasr_kernels.runtime.deferred_sums import PartialSums, keep_with, wait
from effasr_kernels.runtime.launch import ceil_div, launch
from effasr_kernels.shared.last_program import is_last_program

_ELEMENTS = 2_048
"""Elements of a step: 16 for each thread."""

_ROWS = 64
"""Partial sums that a program adds at a time."""

_WIDE, _NARROW = 10, 3
"""Partial sums of several kernels that one launch adds at most, and tensors with a row for each
frame: the sums of a Conformer layer, or of a decoder layer."""

_CHUNK = 1_056
"""Partial sums that one program adds in that launch. Of more, each adds a chunk, and the last one
the chunks."""

_ROW_CHUNK = 256
"""The same of the rows of a tensor: for 8,448 rows of 1,536 channels there are 792 programs, six
for each of the 132 multiprocessors of an H200, that read 32 kB each."""

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def summed(partials: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``partials.sum(0).to(dtype)``, added in a fixed order, in one launch."""
    # ``partials`` is float32 (P, ...), contiguous. In a backward, the launch may wait for
    # `sums_of_layer`: only return the result.
    out = partials.new_empty(partials.shape[1:], dtype=dtype)
    _launch(partials, out, None)
    return out


def keep_sums(gradient: Tensor, partials: Tensor) -> None:
    """Keep the sums of a gradient's rows with it: partial sums, float32 (P, C)."""
    out = gradient.new_empty(partials.shape[1])
    keep_with(gradient, PartialSums(partials, out, None, _addition(partials, out, None)))


def summed_parts(
    partials: Tensor, dtype: torch.dtype, last_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Sum float32 (P, S, C) to (S - 1, C) and (C,); the last may have another dtype."""
    # In a backward, the launch may wait as in `summed`.
    _, count, channels = partials.shape
    out = partials.new_empty(count - 1, channels, dtype=dtype)
    last = partials.new_empty(channels, dtype=last_dtype)
    _launch(partials, out, last)
    return out, last


def sums_of_layer(sums: Sequence[PartialSums]) -> list[Tensor]:
    """Add up partial sums of several kernels, in one launch for a layer."""
    # Returns the sums of each, float32 (C,), rounded to the dtype that `summed` would have given
    # them. Up to `_CHUNK` partial sums are added in the same order as there; of more, chunks are
    # added first.
    sizes = [x.columns for x in sums]
    # Every sum begins at a multiple of 16 bytes.
    padded_sizes = [ceil_div(size, 4) * 4 for size in sizes]
    buffer = sums[0].partials.new_empty(sum(padded_sizes), dtype=torch.float32)
    pieces = buffer.split(padded_sizes)
    launches: list[_Segments] = []
    for x, out in zip(sums, pieces, strict=True):
        chosen = next((segments for segments in launches if segments.takes(x)), None)
        if chosen is None:
            launches.append(chosen := _Segments())
        chosen.add(x, out)
    for segments in launches:
        segments.run()
    return [piece[:size] for piece, size in zip(pieces, sizes, strict=True)]


@dataclass(slots=True)
class _Segments:
    """The partial sums that one launch of `sum_segments` adds, each with where its result goes."""

    narrow: list[tuple[PartialSums, Tensor]] = field(default_factory=list)  # results of 16 bits
    wide: list[tuple[PartialSums, Tensor]] = field(default_factory=list)  # results of float32

    def takes(self, x: PartialSums) -> bool:
        """Return whether there is room, and all that has 16 bits is of one dtype."""
        has_room = len(self.wide) < _WIDE if _is_wide(x) else len(self.narrow) < _NARROW
        return has_room and len(self._dtypes() | _dtypes(x)) <= 1

    def add(self, x: PartialSums, out: Tensor) -> None:
        """Add the rows of ``x`` into ``out``, float32 (C,)."""
        (self.wide if _is_wide(x) else self.narrow).append((x, out))

    def run(self) -> None:
        columns = _ELEMENTS // _ROWS
        segments = [*self.narrow, *self.wide]
        chunks = [
            -(-len(x.partials) // (_CHUNK if _is_wide(x) else _ROW_CHUNK)) for x, _ in segments
        ]
        programs = sum(
            max(1, count) * -(-x.columns // (columns if _is_wide(x) else 2 * columns))
            for count, (x, _) in zip(chunks, segments, strict=True)
        )
        parts = counters = None
        if max(chunks) > 1:
            parts = segments[0][1].new_empty(programs, 2 * columns)
            counters = program_counters(parts, programs)
        launch(
            sum_segments,
            (programs,),
            *_arguments(self.narrow, _NARROW),
            *_arguments(self.wide, _WIDE),
            *(parts, counters),
            num_warps=4,
            num_stages=1,
            NARROW=_NAMES[next(iter(self._dtypes()), torch.bfloat16)],
            BLOCK=_ROWS,
            BLOCK_C=columns,
            CHUNK=_CHUNK,
            ROW_CHUNK=_ROW_CHUNK,
        )

    def _dtypes(self) -> set[torch.dtype]:
        return {dtype for x, _ in (*self.narrow, *self.wide) for dtype in _dtypes(x)}


def _dtypes(x: PartialSums) -> set[torch.dtype]:
    """Return the dtypes of 16 bits that partial sums or their results have."""
    dtypes = {x.partials.dtype, x.narrow or torch.float32}
    return dtypes - {torch.float32}


def _is_wide(x: PartialSums) -> bool:
    return x.partials.dtype == torch.float32


def _arguments(
    segments: Sequence[tuple[PartialSums, Tensor]], capacity: int
) -> Iterator[Tensor | int | None]:
    """Yield the arguments of `sum_segments` for up to ``capacity`` tensors."""
    spare = capacity - len(segments)
    yield from (*(out for _, out in segments), *[None] * spare)
    yield from (*(x.partials for x, _ in segments), *[None] * spare)
    yield from (*(len(x.partials) for x, _ in segments), *[0] * spare)
    yield from (*(x.columns for x, _ in segments), *[0] * spare)
    yield from (*(x.exact for x, _ in segments), *[0] * spare)


def _addition(partials: Tensor, out: Tensor, last: Tensor | None) -> partial[None]:
    split = out.numel()
    channels = split + (0 if last is None else last.numel())
    columns = _ELEMENTS // _ROWS
    return partial(
        launch,
        sum_rows,
        (ceil_div(channels, columns),),
        *(partials, out, last, partials.shape[0], channels, split),
        num_warps=4,
        num_stages=1,
        BLOCK=_ROWS,
        BLOCK_C=columns,
    )


def _launch(partials: Tensor, out: Tensor, last: Tensor | None) -> None:
    run = _addition(partials, out, last)
    if not wait(PartialSums(partials, out, last, run)):
        run()


@triton.jit
def sum_of_columns(partials, c, count, channels, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the sums over the rows of (count, channels) in columns c, float32 (BLOCK_C,)."""
    # The rows may be from other programs of the launch; see `effasr_kernels.shared.last_program`.
    index = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK_C), tl.float32)
    for first in range(0, count, BLOCK):
        row = first + index
        at = row.to(tl.int64)[:, None] * channels + c[None, :]
        mask = (row < count)[:, None] & (c < channels)[None, :]
        value = tl.load(partials + at, mask=mask, other=0.0, cache_modifier=".cg")
        total += value.to(tl.float32)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["count", "split"])
def sum_rows(
    partials, out, last, count, channels, split, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Write the sums of BLOCK_C columns of float32 (count, channels)."""
    # Those of the first `split` columns go to `out`, the others to `last`, which is None if there
    # are none.
    c = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    sums = sum_of_columns(partials, c, count, channels, BLOCK, BLOCK_C)
    tl.store(out + c, sums.to(out.dtype.element_ty), mask=c < split)
    if last is not None:
        of_last = (c >= split) & (c < channels)
        tl.store(last + (c - split), sums.to(last.dtype.element_ty), mask=of_last)


@triton.jit
def _sum_chunk(
    program, segment, parts, counters, NARROW: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add up the rows of a chunk, or of all chunks if this program is the last of its columns."""
    first, out, x, count, channels, exact = segment
    blocks, chunks = tl.cdiv(channels, BLOCK_C), tl.maximum(tl.cdiv(count, CHUNK), 1)
    block, chunk = (program - first) % blocks, (program - first) // blocks
    c = block.to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    x += (chunk * CHUNK).to(tl.int64) * channels
    rows = tl.minimum(count - chunk * CHUNK, CHUNK)
    sums = sum_of_columns(x, c, rows, channels, BLOCK, BLOCK_C)
    is_last = chunks == 1
    if parts is not None:  # noqa: SIM102 (the first is decided when the kernel is compiled)
        if chunks > 1:
            # A matrix with a row for each chunk.
            part, padded = parts + first * WIDTH, blocks * BLOCK_C
            tl.store(part + chunk.to(tl.int64) * padded + c, sums)
            is_last = is_last_program(counters, first + block, chunks)
            if is_last:
                sums = sum_of_columns(part, c, chunks, padded, BLOCK, BLOCK_C)
    if is_last:
        if NARROW == "bf16":
            rounded = sums.to(tl.bfloat16).to(tl.float32)
        else:
            rounded = sums.to(tl.float16).to(tl.float32)
        tl.store(out + c, tl.where(c < exact, sums, rounded), mask=c < channels)


@triton.jit
def _programs(count, channels, BLOCK_C: tl.constexpr, CHUNK: tl.constexpr):
    return tl.maximum(tl.cdiv(count, CHUNK), 1) * tl.cdiv(channels, BLOCK_C)


@triton.jit
def _choose(program, begin, new, segment):
    """Return a segment that begins at ``begin`` if the program is not before it, else the other."""
    first, out, x, count, channels, exact = segment
    new_out, new_x, new_count, new_channels, new_exact = new
    is_here = program >= begin
    return (
        tl.where(is_here, begin, first),
        tl.where(is_here, new_out, out),
        tl.where(is_here, new_x, x),
        tl.where(is_here, new_count, count),
        tl.where(is_here, new_channels, channels),
        tl.where(is_here, new_exact, exact),
    )


@triton.jit(
    do_not_specialize=[
        *("row_count0", "row_count1", "row_count2"),
        *("row_exact0", "row_exact1", "row_exact2"),
        *("count0", "count1", "count2", "count3", "count4"),
        *("count5", "count6", "count7", "count8", "count9"),
        *("exact0", "exact1", "exact2", "exact3", "exact4"),
        *("exact5", "exact6", "exact7", "exact8", "exact9"),
    ]
)
def sum_segments(
    row_out0, row_out1, row_out2, rows0, rows1, rows2,
    row_count0, row_count1, row_count2, width0, width1, width2, row_exact0, row_exact1, row_exact2,
    out0, out1, out2, out3, out4, out5, out6, out7, out8, out9,
    partials0, partials1, partials2, partials3, partials4, partials5, partials6, partials7,
    partials8, partials9,
    count0, count1, count2, count3, count4, count5, count6, count7, count8, count9,
    channels0, channels1, channels2, channels3, channels4, channels5, channels6, channels7,
    channels8, channels9,
    exact0, exact1, exact2, exact3, exact4, exact5, exact6, exact7, exact8, exact9,
    parts, counters,
    NARROW: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr, CHUNK: tl.constexpr,
    ROW_CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the sums of a block of columns of one of several segments."""
    # The first programs are for tensors of 16 bits: ``rowsn``, (P, C), with P ``row_countn`` and C
    # ``widthn``. A program adds ROW_CHUNK rows of 2 BLOCK_C columns. The others are for partial
    # sums: ``partialsn``, float32 (P, C), with P ``countn`` and C ``channelsn``. A program adds
    # CHUNK rows of BLOCK_C columns. BLOCK is the number of rows of a step.
    # With more rows, programs write what they add to ``parts``, float32 (programs, 2 BLOCK_C), and
    # the last one of the columns adds up these; ``counters`` are for `is_last_program`, one
    # for each program. Both may be None if no segment has more rows.
    # The sums are written to ``row_outn`` or ``outn``, float32 (C,). Those of columns from
    # ``row_exactn`` or ``exactn`` on are rounded to NARROW, bf16 or fp16. If there are fewer
    # segments, the last are None and their numbers 0.
    program, begin = tl.program_id(0), 0
    WIDTH: tl.constexpr = 2 * BLOCK_C
    if rows0 is not None:
        row_out, row_exact = (row_out1, row_out2), (row_exact1, row_exact2)
        rows, row_count, width = (rows1, rows2), (row_count1, row_count2), (width1, width2)
        segment = begin, row_out0, rows0, row_count0, width0, row_exact0
        begin += _programs(row_count0, width0, WIDTH, ROW_CHUNK)
        for i in tl.static_range(2):
            if rows[i] is not None:
                new = row_out[i], rows[i], row_count[i], width[i], row_exact[i]
                segment = _choose(program, begin, new, segment)
                begin += _programs(row_count[i], width[i], WIDTH, ROW_CHUNK)
        if program < begin:
            _sum_chunk(program, segment, parts, counters, NARROW, BLOCK, WIDTH, ROW_CHUNK, WIDTH)
    if partials0 is not None:
        behind = begin
        out = out1, out2, out3, out4, out5, out6, out7, out8, out9
        x = (
            partials1, partials2, partials3, partials4, partials5, partials6, partials7, partials8,
            partials9,
        )  # fmt: skip
        count = count1, count2, count3, count4, count5, count6, count7, count8, count9
        c = (
            channels1, channels2, channels3, channels4, channels5, channels6, channels7, channels8,
            channels9,
        )  # fmt: skip
        exact = exact1, exact2, exact3, exact4, exact5, exact6, exact7, exact8, exact9
        segment = begin, out0, partials0, count0, channels0, exact0
        begin += _programs(count0, channels0, BLOCK_C, CHUNK)
        for i in tl.static_range(9):
            if x[i] is not None:
                new = out[i], x[i], count[i], c[i], exact[i]
                segment = _choose(program, begin, new, segment)
                begin += _programs(count[i], c[i], BLOCK_C, CHUNK)
        if program >= behind:
            _sum_chunk(program, segment, parts, counters, NARROW, BLOCK, BLOCK_C, CHUNK, WIDTH)
