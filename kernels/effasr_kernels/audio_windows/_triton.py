"""`audio_windows` in Triton: audio is read once and windows are written once.

Neighbouring windows overlap, but what they share is in the cache of a program. 67,584 rows of 512
points are 138 MB, which takes an H200 (4.8 TB/s) 29 us; the audio is 43 MB.
"""

import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.audio_windows import WindowArguments
from effasr_kernels.runtime.launch import launch

_LARGEST = 4096


def unsupported_reason(a: WindowArguments) -> str | None:
    if a.n_fft > _LARGEST:
        return f"holds a window of at most {_LARGEST} points in registers"
    return None


def run(a: WindowArguments) -> Tensor:
    y = a.audio.new_empty(a.rows, a.n_fft)
    points = 1 << (a.n_fft - 1).bit_length()
    launch(
        cut_windows,
        (a.end_slot - a.first_slot, max(1, a.rows_per_slot * points // _LARGEST)),
        *(a.audio.contiguous(), a.window.contiguous()),
        *(a.cu_audio, a.layout_slots.cu_seqlens, y),
        *(a.layout_slots.num_sequences, a.first_slot, a.preemphasis),
        EMPHASIZED=a.preemphasis != 0,
        HOP=a.hop,
        BEFORE=a.before,
        WIDTH=a.window.shape[0],
        POINTS=a.n_fft,
        SLOT=a.rows_per_slot,
        BLOCK_R=max(1, min(a.rows_per_slot, _LARGEST // points)),
        BLOCK_N=points,
    )
    return y


@triton.jit(do_not_specialize=["sequences", "first_slot"])
def cut_windows(
    audio,  # (samples,), contiguous
    window,  # (W,), contiguous
    cu_audio,  # int32 (N + 1,), of samples
    cu_slots,  # int32 (N + 1,), of slots
    y,  # (rows, F), written
    sequences,  # N
    first_slot,  # slot of the first program
    preemphasis,  # p
    EMPHASIZED: tl.constexpr,  # whether p is not 0
    HOP: tl.constexpr,  # h
    BEFORE: tl.constexpr,  # samples of a window before its centre
    WIDTH: tl.constexpr,  # W
    POINTS: tl.constexpr,  # F
    SLOT: tl.constexpr,  # s
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write windows of a slot: program (slot, block of its rows)."""
    slot = first_slot + tl.program_id(0)
    # The number of sequences that end before the slot is its sequence, N in the tail.
    index = tl.arange(0, 128)
    ended = tl.zeros((128,), dtype=tl.int32)
    for first in range(0, sequences, 128):
        n = first + index
        end = tl.load(cu_slots + n + 1, mask=n < sequences, other=slot + 1)
        ended += (end <= slot).to(tl.int32)
    sequence = tl.sum(ended)
    is_real = sequence < sequences
    samples = tl.load(cu_audio + sequence)
    length = tl.load(cu_audio + sequence + 1, mask=is_real, other=samples) - samples
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    j = tl.arange(0, BLOCK_N)[None, :]
    row = (slot - tl.load(cu_slots + sequence)) * SLOT + r
    sample = row * HOP + j - BEFORE
    inside = is_real & (sample >= 0) & (sample < length) & (j < WIDTH)
    audio += samples + sample
    value = tl.load(audio, mask=inside, other=0.0)
    if EMPHASIZED:
        value -= preemphasis * tl.load(audio - 1, mask=inside & (sample > 0), other=0.0)
    value *= tl.load(window + j, mask=j < WIDTH, other=0.0)
    target = (tl.program_id(0).to(tl.int64) * SLOT + r) * POINTS + j
    tl.store(y + target, value.to(y.dtype.element_ty), mask=j < POINTS)
