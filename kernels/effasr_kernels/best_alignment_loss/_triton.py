"""The best alignment by one program per sequence, and its gradient.

A program computes the scores of 32 frames for all tokens with tensor cores into a buffer of as many
rows, and takes one step of the recursion per frame. Where the best alignment of a pair comes from
is one bit: 32 frames of a token share a word. The loss is summed along the alignment, from
differences of rows, as the scores cancel where rows are close.
"""

# pyright: reportGeneralTypeIssues=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.best_alignment_loss import AlignmentArguments
from effasr_kernels.runtime.dispatch import Gradients, Tensors
from effasr_kernels.runtime.launch import ceil_div, launch, unit_stride

_FRAMES = tl.constexpr(32)
"""Frames of a tile, and bits of a word."""


def forward(a: AlignmentArguments) -> tuple[tuple[Tensor], tuple[Tensor]]:
    # Saves the row of ``text`` of each frame.
    speech, text = unit_stride(a.speech), unit_stride(a.text)
    rows, sequences = a.layout_speech.rows, a.layout_speech.num_sequences
    columns = max(1, a.layout_text.max_seqlen_bound)
    scores = speech.new_empty(sequences, 32, columns, dtype=torch.float32)
    words = speech.new_empty(rows // 32 + sequences + 1, columns, dtype=torch.int32)
    (chosen,) = saved_like(a)
    loss = speech.new_empty(sequences, dtype=torch.float32)
    launch(
        align,
        (sequences,),
        *(speech, text, text.float().square().sum(1)),
        *(a.layout_speech.cu_seqlens, a.layout_text.cu_seqlens, scores, words, chosen, loss),
        *(speech.stride(0), text.stride(0), speech.shape[1], columns),
        num_warps=8,
        num_stages=1,
        # As one program per sequence leaves multiprocessors free, nothing is spilled to fit more.
        maxnreg=255,
        BLOCK=max(64, 1 << (columns - 1).bit_length()),
        BLOCK_U=64,
        BLOCK_C=32 if speech.dtype == torch.float32 else 64,
    )
    return (loss,), (chosen,)


def saved_like(a: AlignmentArguments) -> tuple[Tensor]:
    return (a.speech.new_empty(a.layout_speech.rows, dtype=torch.int32),)


def backward(a: AlignmentArguments, grads: Tensors, results: Tensors, saved: Tensors) -> Gradients:
    speech, text = unit_stride(a.speech), unit_stride(a.text)
    # Neither the tail nor tokens without a frame are written.
    d_speech, d_text = speech.new_zeros(speech.shape), text.new_zeros(text.shape)
    width, block = speech.shape[1], 128
    launch(
        spread,
        (a.layout_speech.num_sequences, ceil_div(width, block)),
        *(speech, text, saved[0], grads[0]),
        *(a.layout_speech.cu_seqlens, a.layout_text.cu_seqlens, d_speech, d_text),
        *(speech.stride(0), text.stride(0), width),
        num_warps=1,
        num_stages=4,
        BLOCK_C=block,
    )
    return {"speech": d_speech, "text": d_text}


@triton.jit
def _least(x, y):
    return tl.minimum(x, y)


@triton.jit
def _extents(cu_frames, cu_tokens, n):
    """The first frame and token, their counts, and the frames that are aligned."""
    frame, token = tl.load(cu_frames + n), tl.load(cu_tokens + n)
    frames, tokens = tl.load(cu_frames + n + 1) - frame, tl.load(cu_tokens + n + 1) - token
    return frame.to(tl.int64), token.to(tl.int64), frames, tokens, tl.where(tokens > 0, frames, 0)


@triton.jit(do_not_specialize=["columns"])
def align(
    speech,  # (T, C)
    text,  # (U, C)
    norms,  # float32 (U,), sums of squares of the rows of ``text``
    cu_frames,  # int32 (N + 1,)
    cu_tokens,  # int32 (N + 1,)
    scores,  # float32 (N, 32, columns), a buffer
    words,  # int32 (words, columns), a buffer
    chosen,  # int32 (T,), written: the row of ``text`` of each frame
    loss,  # float32 (N,), written
    speech_stride,
    text_stride,
    width,  # C
    columns,  # at least the tokens of any sequence
    BLOCK: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    n = tl.program_id(0)
    frame, token, frames, tokens, steps = _extents(cu_frames, cu_tokens, n)
    scores += n.to(tl.int64) * _FRAMES * columns
    # A sequence begins with a word of its own; no more than these are needed before it.
    words += (frame // _FRAMES + n) * columns
    row, channel = tl.arange(0, _FRAMES), tl.arange(0, BLOCK_C)
    j = tl.arange(0, BLOCK)
    is_token = j < tokens
    best = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, steps, _FRAMES):
        is_frame = start + row < steps
        x_rows = speech + (frame + start + row)[:, None] * speech_stride
        for first in range(0, tokens, BLOCK_U):
            u = first + tl.arange(0, BLOCK_U)
            y_rows = text + (token + u)[None, :] * text_stride
            z = tl.zeros((_FRAMES, BLOCK_U), tl.float32)
            for c in range(0, width, BLOCK_C):
                inside = c + channel < width
                x_mask, y_mask = is_frame[:, None] & inside[None, :], (u < tokens)[None, :]
                x = tl.load(x_rows + (c + channel)[None, :], mask=x_mask, other=0.0)
                y_mask = y_mask & inside[:, None]
                y = tl.load(y_rows + (c + channel)[:, None], mask=y_mask, other=0.0)
                z = tl.dot(x, y, z, input_precision="ieee")
            norm = tl.load(norms + token + u, mask=u < tokens, other=0.0)
            # The square of the frame is left out, as all alignments have it in common.
            target = scores + row[:, None] * columns + u[None, :]
            tl.store(target, norm[None, :] - 2.0 * z, mask=(u < tokens)[None, :])
        # Other threads read the scores.
        tl.debug_barrier()
        word = tl.zeros((BLOCK,), tl.int32)
        for r in range(0, tl.minimum(_FRAMES, steps - start)):
            score = tl.load(scores + r * columns + j, mask=is_token, other=float("inf"))
            reached = best + score.to(tl.float64)
            best = tl.associative_scan(reached, 0, _least)
            word = word | ((best < reached).to(tl.int32) << r)
        tl.store(words + start // _FRAMES * columns + j, word, mask=is_token)
        tl.debug_barrier()
    last = tokens - 1
    for step in range(0, steps):
        t = steps - 1 - step
        word = tl.load(words + t // _FRAMES * columns + j, mask=is_token, other=-1)
        stays = ((word >> (t % _FRAMES)) & 1) == 0
        last = tl.max(tl.where(stays & (j <= last), j, -1), axis=0)
        tl.store(chosen + frame + t, (token + last).to(tl.int32))
    tl.debug_barrier()
    squares = tl.zeros((_FRAMES, BLOCK_C), tl.float32)
    for start in range(0, steps, _FRAMES):
        is_frame = start + row < steps
        y_row = tl.load(chosen + frame + start + row, mask=is_frame, other=0).to(tl.int64)
        x_rows = speech + (frame + start + row)[:, None] * speech_stride
        for c in range(0, width, BLOCK_C):
            mask = is_frame[:, None] & (c + channel < width)[None, :]
            x = tl.load(x_rows + (c + channel)[None, :], mask=mask, other=0.0).to(tl.float32)
            y = tl.load(
                text + y_row[:, None] * text_stride + (c + channel)[None, :], mask=mask, other=0.0
            )
            squares += (x - y.to(tl.float32)) * (x - y.to(tl.float32))
    total = tl.sum(tl.sum(squares, axis=1), axis=0)
    mean = tl.where(steps < frames, float("inf"), total / (tl.maximum(frames, 1) * width))
    tl.store(loss + n, mean)


@triton.jit
def spread(
    speech,  # (T, C)
    text,  # (U, C)
    chosen,  # int32 (T,), output of `align`
    grad_loss,  # float32 (N,)
    cu_frames,  # int32 (N + 1,)
    cu_tokens,  # int32 (N + 1,)
    d_speech,  # (T, C), contiguous, written where there are frames
    d_text,  # (U, C), contiguous, written where a token has frames
    speech_stride,
    text_stride,
    width,  # C
    BLOCK_C: tl.constexpr,
):
    """Write the gradients of some channels of a sequence."""
    n = tl.program_id(0)
    frame, _, frames, _, steps = _extents(cu_frames, cu_tokens, n)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < width
    factor = 2.0 * tl.load(grad_loss + n) / (tl.maximum(frames, 1) * width)
    # The frames of a token follow each other, so that a thread adds them up in order.
    current = tl.full((), -1, tl.int64)
    total = tl.zeros((BLOCK_C,), tl.float32)
    for t in range(0, steps):
        row = frame + t
        y_row = tl.load(chosen + row).to(tl.int64)
        x = tl.load(speech + row * speech_stride + channel, mask=inside, other=0.0)
        y = tl.load(text + y_row * text_stride + channel, mask=inside, other=0.0)
        difference = factor * (x.to(tl.float32) - y.to(tl.float32))
        tl.store(d_speech + row * width + channel, difference, mask=inside)
        total = tl.where(y_row == current, total, 0.0) - difference
        tl.store(d_text + y_row * width + channel, total, mask=inside)
        current = y_row
