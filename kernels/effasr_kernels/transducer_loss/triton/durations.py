"""Log-probabilities of a token-and-duration transducer's durations."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.runtime.launch import launch
from effasr_kernels.transducer_loss.triton.joint import load_number
from effasr_kernels.transducer_loss.triton.plan import Chunk

ROWS = 64
"""Rows of a program."""
_NARROWEST = 16
"""Minimum columns of a product."""


def score_durations(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    log_duration: Tensor,
    base: int,
    chunk: Chunk,
    count: int,
    block: int,
) -> None:
    """Write the log-softmax of the duration logits of a chunk's nodes.

    Args:
        hidden: (R, ...), rows of the joint's output, padded like those of ``weight``.
        weight: (V + D, ...), rows padded to whole blocks.
        bias: (V + D,).
        log_duration: float32 (nodes, D), contiguous, written.
        base: Node of the first element of ``log_duration``.
        chunk: The chunk.
        count: V.
        block: Columns per step.
    """
    durations = log_duration.shape[1]
    launch(
        score,
        (-(-chunk.room.nodes // ROWS),),
        *(hidden, weight, bias, log_duration, chunk.node_from(base), chunk.nodes, count),
        *(hidden.stride(0), weight.stride(0)),
        num_warps=4,
        num_stages=2,
        WIDTH=weight.shape[1],
        DURATIONS=durations,
        BLOCK_R=ROWS,
        BLOCK_D=max(_NARROWEST, 1 << (durations - 1).bit_length()),
        BLOCK_C=block,
    )


@triton.jit(do_not_specialize=["first_node", "nodes", "count"])
def score(
    hidden,
    weight,
    bias,
    log_duration,
    first_node,
    nodes,
    count,
    hidden_stride,
    weight_stride,
    WIDTH: tl.constexpr,
    DURATIONS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One tile of rows; see `score_durations`."""
    first_row = tl.program_id(0) * BLOCK_R
    nodes = load_number(nodes)
    if first_row >= nodes:
        return
    in_rows = tl.arange(0, BLOCK_R)
    in_width = tl.arange(0, BLOCK_C)
    d = tl.arange(0, BLOCK_D)
    # Rows and durations past the end load the last one, unmasked; their results are not stored.
    h_tile = hidden + first_row.to(tl.int64) * hidden_stride + in_width[None, :]
    h_tile += tl.minimum(in_rows, nodes - 1 - first_row)[:, None] * hidden_stride
    w_tile = weight + tl.cast(count, tl.int64) * weight_stride + in_width[None, :]
    w_tile += tl.minimum(d, DURATIONS - 1)[:, None] * weight_stride
    start = tl.load(bias + count + d, mask=d < DURATIONS, other=float("-inf")).to(tl.float32)
    z = tl.zeros((BLOCK_R, BLOCK_D), tl.float32) + start[None, :]
    for c in range(0, WIDTH, BLOCK_C):
        z = tl.dot(tl.load(h_tile + c), tl.trans(tl.load(w_tile + c)), z, input_precision="ieee")
    largest = tl.max(z, axis=1)
    # Where all logits are -inf, the difference to their maximum would be NaN.
    pivot = tl.where(largest == float("-inf"), 0.0, largest)
    normalizer = pivot + tl.log(tl.sum(tl.exp(z - pivot[:, None]), axis=1))
    row = first_row + in_rows
    node = tl.cast(load_number(first_node), tl.int64) + row
    stored = (row < nodes)[:, None] & (d < DURATIONS)[None, :]
    out = log_duration + node[:, None] * DURATIONS + d[None, :]
    tl.store(out, z - normalizer[:, None], mask=stored)
