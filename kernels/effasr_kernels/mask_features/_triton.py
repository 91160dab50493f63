"""`mask_features` in Triton: one read and one write of the rows, instead of fifty small kernels."""

# pyright: reportGeneralTypeIssues=false
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.mask_features import MaskArguments
from effasr_kernels.runtime.launch import launch
from effasr_kernels.runtime.tiles import find_tile, tile_programs

_ELEMENTS = 4096
"""Elements of a tile: 32 for each thread of 4 warps."""


def unsupported_reason(a: MaskArguments) -> str | None:
    if a.x.shape[1] > _ELEMENTS:
        return f"holds a row of at most {_ELEMENTS} channels in registers"
    return None


def run(a: MaskArguments) -> Tensor:
    layout, channels = a.layout, a.x.shape[1]
    block_c = 1 << max(channels - 1, 0).bit_length()
    block_t = max(1, min(8, _ELEMENTS // block_c // a.rows_per_slot))
    y = a.x.new_empty(a.x.shape)
    tiles = tile_programs(layout, block_t) if channels else 0
    freq, time = (None if x is None else x.contiguous() for x in (a.freq_shares, a.time_shares))
    launch(
        mask_rows,
        (tiles,),
        *(a.x.contiguous(), a.lengths.contiguous(), freq, time, layout.cu_seqlens, y),
        *(min(a.freq_width, channels), float(a.time_width), layout.num_sequences, layout.rows),
        FREQ_MASKS=0 if freq is None else freq.shape[2],
        TIME_MASKS=0 if time is None else time.shape[2],
        CHANNELS=channels,
        SLOT=a.rows_per_slot,
        BLOCK_T=block_t,
        BLOCK_C=block_c,
    )
    return y


@triton.jit
def find_mask(shares, entry, entries, extent, widest):
    """Return the begin and end of the mask of two shares, numbers ``entry`` and that many later."""
    width = (tl.load(shares + entry) * (widest + 1).to(tl.float32)).to(tl.int32)
    width = tl.minimum(width, widest)
    last = extent - width
    begin = (tl.load(shares + entries + entry) * (last + 1).to(tl.float32)).to(tl.int32)
    begin = tl.minimum(begin, last)
    return begin, begin + width


@triton.jit(do_not_specialize=["freq_width", "sequences", "slots"])
def mask_rows(
    x,  # (s T, C), contiguous
    lengths,  # int32 or int64 (N,), contiguous
    freq_shares,  # float32 (2, N, F), contiguous, or None
    time_shares,  # float32 (2, N, M), contiguous, or None
    cu_seqlens,  # int32 (N + 1,), of slots
    y,  # (s T, C), written
    freq_width,  # channels of the widest band, at most C
    time_width,  # share of the longest stretch
    sequences,  # N
    slots,  # T
    FREQ_MASKS: tl.constexpr,  # F
    TIME_MASKS: tl.constexpr,  # M
    CHANNELS: tl.constexpr,  # C
    SLOT: tl.constexpr,  # s
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Mask a tile of slots: program (tile)."""
    sequence, begin, length, start = find_tile(
        cu_seqlens, sequences, slots, tl.program_id(0), BLOCK_T
    )
    if start < length:
        row = start * SLOT + tl.arange(0, SLOT * BLOCK_T)
        c = tl.arange(0, BLOCK_C)
        inside = (row < length * SLOT)[:, None] & (c < CHANNELS)[None, :]
        in_band, in_stretch = c < 0, row < 0
        if sequence < sequences:
            for i in tl.static_range(FREQ_MASKS):
                first, end = find_mask(
                    freq_shares,
                    sequence * FREQ_MASKS + i,
                    sequences * FREQ_MASKS,
                    CHANNELS,
                    freq_width,
                )
                in_band |= (c >= first) & (c < end)
            extent = tl.load(lengths + sequence).to(tl.int32)
            widest = (extent.to(tl.float32) * time_width).to(tl.int32)
            for i in tl.static_range(TIME_MASKS):
                first, end = find_mask(
                    time_shares, sequence * TIME_MASKS + i, sequences * TIME_MASKS, extent, widest
                )
                in_stretch |= (row >= first) & (row < end)
        else:
            in_band |= c >= 0
        hidden = in_band[None, :] | in_stretch[:, None]
        index = (begin * SLOT + row)[:, None] * CHANNELS + c[None, :]
        # Loading only what stays visible would be a separate load for each element.
        value = tl.load(x + index, mask=inside, other=0.0)
        tl.store(y + index, tl.where(hidden, 0.0, value), mask=inside)
