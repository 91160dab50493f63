"""Sums of the partial sums that the programs of a kernel write, rounded in the same launch."""

from __future__ import annotations

# pyright: reportGeneralTypeIssues=false
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.runtime.deferred_sums import PartialSums, wait
from effasr_kernels.runtime.launch import launch

_ELEMENTS = 2_048
"""Elements of a step: 16 for each thread."""

_ROWS = 64
"""Partial sums that a program adds at a time, unless told otherwise."""

_SEGMENTS = 8
"""Partial sums of several kernels that one launch adds at most: those of a Conformer layer."""

_NARROW = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def summed(partials: Tensor, dtype: torch.dtype, *, rows: int = _ROWS) -> Tensor:
    """Return ``partials.sum(0).to(dtype)``, added in a fixed order, in one launch.

    In a backward, the launch may wait for that of `sums_of_layer`: only return the result.

    Args:
        partials: float32 (P, ...), contiguous.
        dtype: Dtype of the result.
        rows: Partial sums that a program adds at a time, a power of two up to 64: few if P is
            small, because masked loads fill the rest.

    Returns:
        (...), contiguous; zeros if P is 0.
    """
    out = partials.new_empty(partials.shape[1:], dtype=dtype)
    _launch(partials, out, None, rows)
    return out


def summed_parts(
    partials: Tensor, dtype: torch.dtype, last_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the sums of S numbers per channel, of which the last has a dtype of its own.

    In a backward, the launch may wait as in `summed`.

    Args:
        partials: float32 (P, S, C), contiguous.
        dtype: Dtype of the first S - 1.
        last_dtype: Dtype of the last.

    Returns:
        (S - 1, C) and (C,), contiguous.
    """
    _, count, channels = partials.shape
    out = partials.new_empty(count - 1, channels, dtype=dtype)
    last = partials.new_empty(channels, dtype=last_dtype)
    _launch(partials, out, last, _ROWS)
    return out, last


def sums_of_layer(found: Sequence[PartialSums]) -> list[Tensor]:
    """Add up partial sums of several kernels, in one launch for each `_SEGMENTS` of them.

    Args:
        found: Not empty, on one device. Additions are in the same order as in `summed`.

    Returns:
        The sums of each, float32 (C,), rounded to the dtype that `summed` would have given them.
    """
    sizes = [x.columns for x in found]
    # Every sum begins at a multiple of 16 bytes.
    places = [-(-size // 4) * 4 for size in sizes]
    buffer = found[0].partials.new_empty(sum(places))
    pieces = buffer.split(places)
    by_narrow: dict[torch.dtype, list[int]] = {}
    narrow = next((x.narrow for x in found if x.narrow is not None), torch.bfloat16)
    for number, x in enumerate(found):
        by_narrow.setdefault(x.narrow or narrow, []).append(number)
    for dtype, numbers in by_narrow.items():
        for begin in range(0, len(numbers), _SEGMENTS):
            chosen = numbers[begin : begin + _SEGMENTS]
            _launch_segments([found[n] for n in chosen], [pieces[n] for n in chosen], dtype)
    return [piece[:size] for piece, size in zip(pieces, sizes, strict=True)]


def _launch_segments(
    found: Sequence[PartialSums], pieces: Sequence[Tensor], narrow: torch.dtype
) -> None:
    columns = _ELEMENTS // _ROWS
    spare = _SEGMENTS - len(found)
    segments: list[Any] = [x.partials for x in found] + [None] * spare
    for numbers in (
        [x.partials.shape[0] for x in found],
        [x.columns for x in found],
        [x.exact for x in found],
    ):
        segments += [*numbers, *([0] * spare)]
    launch(
        sum_segments,
        (sum(-(-x.columns // columns) for x in found),),
        *(*pieces, *[None] * spare, *segments),
        num_warps=4,
        num_stages=1,
        NARROW=_NARROW[narrow],
        BLOCK=_ROWS,
        BLOCK_C=columns,
    )


def _launch(partials: Tensor, out: Tensor, last: Tensor | None, rows: int) -> None:
    split = out.numel()
    channels = split + (0 if last is None else last.numel())
    columns = _ELEMENTS // rows
    run = partial(
        launch,
        sum_rows,
        (-(-channels // columns),),
        *(partials, out, last, partials.shape[0], channels, split),
        num_warps=4,
        num_stages=1,
        BLOCK=rows,
        BLOCK_C=columns,
    )
    # Few rows at a time are for many columns, a gradient that a matrix product reads at once.
    if rows != _ROWS or not wait(PartialSums(partials, out, last, run)):
        run()


@triton.jit
def sum_of_columns(partials, c, count, channels, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the sums over the rows of float32 (count, channels) in columns c, (BLOCK_C,).

    The rows may be from other programs of the launch; see `effasr_kernels.shared.last_program`.
    """
    index = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK_C), tl.float32)
    for first in range(0, count, BLOCK):
        row = first + index
        at = row.to(tl.int64)[:, None] * channels + c[None, :]
        mask = (row < count)[:, None] & (c < channels)[None, :]
        total += tl.load(partials + at, mask=mask, other=0.0, cache_modifier=".cg")
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["count", "split"])
def sum_rows(
    partials, out, last, count, channels, split, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Write the sums of BLOCK_C columns.

    Args:
        partials: float32 (P, C).
        out: (``split``,), written: the sums of the first columns.
        last: (C - ``split``,), written: the sums of the others; None if there are none.
        count: P.
        channels: C.
        split: See ``out``.
        BLOCK: Rows of a step.
        BLOCK_C: Columns of a program.
    """
    c = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    found = sum_of_columns(partials, c, count, channels, BLOCK, BLOCK_C)
    tl.store(out + c, found.to(out.dtype.element_ty), mask=c < split)
    if last is not None:
        of_last = (c >= split) & (c < channels)
        tl.store(last + (c - split), found.to(last.dtype.element_ty), mask=of_last)


@triton.jit
def _sum_segment(
    out, partials, count, channels, exact, program,
    NARROW: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write a block of sums if it is this program's; return its number past the segment."""
    blocks = tl.cdiv(channels, BLOCK_C)
    if partials is not None:  # noqa: SIM102 (the first is decided when the kernel is compiled)
        if (program >= 0) & (program < blocks):
            c = program.to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
            found = sum_of_columns(partials, c, count, channels, BLOCK, BLOCK_C)
            if NARROW == "bf16":
                rounded = found.to(tl.bfloat16).to(tl.float32)
            else:
                rounded = found.to(tl.float16).to(tl.float32)
            tl.store(out + c, tl.where(c < exact, found, rounded), mask=c < channels)
    return program - blocks


@triton.jit(
    do_not_specialize=[
        *("count0", "count1", "count2", "count3", "count4", "count5", "count6", "count7"),
        *("exact0", "exact1", "exact2", "exact3", "exact4", "exact5", "exact6", "exact7"),
    ]
)
def sum_segments(
    out0, out1, out2, out3, out4, out5, out6, out7,
    partials0, partials1, partials2, partials3, partials4, partials5, partials6, partials7,
    count0, count1, count2, count3, count4, count5, count6, count7,
    channels0, channels1, channels2, channels3, channels4, channels5, channels6, channels7,
    exact0, exact1, exact2, exact3, exact4, exact5, exact6, exact7,
    NARROW: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write the sums of BLOCK_C columns of one of several segments; program i has the i-th block.

    Segment n has the sums ``outn``, float32 (C,), of ``partialsn``, float32 (P, C), with P
    ``countn`` and C ``channelsn``; those of columns from ``exactn`` on are rounded to ``NARROW``,
    bf16 or fp16. If there are fewer segments, both are None and the numbers 0. ``BLOCK`` is the
    number of rows of a step.
    """
    program = tl.program_id(0)
    program = _sum_segment(
        out0, partials0, count0, channels0, exact0, program, NARROW, BLOCK, BLOCK_C
    )
    program = _sum_segment(
        out1, partials1, count1, channels1, exact1, program, NARROW, BLOCK, BLOCK_C
    )
    program = _sum_segment(
        out2, partials2, count2, channels2, exact2, program, NARROW, BLOCK, BLOCK_C
    )
    program = _sum_segment(
        out3, partials3, count3, channels3, exact3, program, NARROW, BLOCK, BLOCK_C
    )
    program = _sum_segment(
        out4, partials4, count4, channels4, exact4, program, NARROW, BLOCK, BLOCK_C
    )
    program = _sum_segment(
        out5, partials5, count5, channels5, exact5, program, NARROW, BLOCK, BLOCK_C
    )
    program = _sum_segment(
        out6, partials6, count6, channels6, exact6, program, NARROW, BLOCK, BLOCK_C
    )
    program = _sum_segment(
        out7, partials7, count7, channels7, exact7, program, NARROW, BLOCK, BLOCK_C
    )
