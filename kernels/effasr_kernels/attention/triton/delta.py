"""The term delta of the softmax's backward: the sum over results of result times gradient."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.attention.triton.config import padded_width
from effasr_kernels.runtime.launch import ceil_div, launch

_ELEMENTS = 4096
"""Elements of a block of rows."""


@triton.jit
def sum_of_products(out, grad_out, offset, mask):
    """The sums over channels of ``out * grad_out``, float32 (M,), for a tile of rows."""
    out_tile = tl.load(out + offset, mask=mask, other=0.0).to(tl.float32)
    grad_tile = tl.load(grad_out + offset, mask=mask, other=0.0).to(tl.float32)
    return tl.sum(out_tile * grad_tile, 1)


@triton.jit(do_not_specialize=["rows"])
def attention_delta(
    grad_out,  # (T_q, H, D), contiguous, a pointer, like all up to `grad_penalty`
    out,  # (T_q, H, D), contiguous
    # float32, (H, T_q), written: the sum over channels of ``out * grad_out``. With ``GUIDED`` it is
    # (2, H, T_q): the sum includes ``penalty * grad_penalty``, which follows with its axes swapped.
    delta,
    penalty,  # float32 (T_q, H), contiguous; None without `GUIDED`
    grad_penalty,  # float32 (T_q, H), contiguous; None without `GUIDED`
    rows,  # T_q
    heads,  # H
    WIDTH: tl.constexpr,  # D
    BLOCK_D: tl.constexpr,  # the power of two that D is padded to
    BLOCK_M: tl.constexpr,
    GUIDED: tl.constexpr,  # whether there is a penalty
):
    """Compute `row_delta` for a block of rows and a head: program (block, head)."""
    head = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_M
    in_rows = first_row + m < rows
    mask = in_rows[:, None] & (d < WIDTH)[None, :]
    begin = (first_row * heads + head) * WIDTH
    offset = m[:, None] * (heads * WIDTH) + d[None, :]
    sums = sum_of_products(out + begin, grad_out + begin, offset, mask)
    delta += head.to(tl.int64) * rows + first_row + m
    if GUIDED:
        index = (first_row + m) * heads + head
        row_grad = tl.load(grad_penalty + index, mask=in_rows, other=0.0)
        sums += row_grad * tl.load(penalty + index, mask=in_rows, other=0.0)
        tl.store(delta + rows.to(tl.int64) * heads, row_grad, mask=in_rows)
    tl.store(delta, sums, mask=in_rows)


def rows_of_block(width: int) -> int:
    return _ELEMENTS // padded_width(width)


def row_delta(grad_out: Tensor, out: Tensor, guided: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """The sum over channels of output times gradient, computed once for all tiles of keys."""
    # With relative positions `effasr_kernels.attention.triton.relative.relative_scores` computes
    # it. Returns float32 (H, T), undefined in the tail; with ``guided`` (2, H, T), of which the
    # second part is the gradient of the penalty.
    rows, heads, width = out.shape
    parts = (heads, rows) if guided is None else (2, heads, rows)
    delta = out.new_empty(parts, dtype=torch.float32)
    grad_penalty, penalty = guided or (None, None)
    block = rows_of_block(width)
    launch(
        attention_delta,
        (ceil_div(rows, block), heads),
        grad_out,
        out,
        delta,
        penalty,
        grad_penalty,
        rows,
        heads,
        WIDTH=width,
        BLOCK_D=padded_width(width),
        BLOCK_M=block,
        GUIDED=guided is not None,
    )
    return delta
