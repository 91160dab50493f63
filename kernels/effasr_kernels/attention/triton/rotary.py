"""Rotary positions: the table of angles, and the rotation of queries, keys and their gradients.

Keys are rotated once, into a new tensor: inside the loop over keys each key would be rotated again
for every tile of queries, and could not be copied to shared memory asynchronously. If all channels
rotate and no channel is padded, the attention kernels rotate queries as they load them and rotate
gradients back as they store them; otherwise the kernel `rotate` does so.
"""

# pyright: reportGeneralTypeIssues=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.attention.position import Rotary
from effasr_kernels.attention.triton.config import next_power_of_two
from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.launch import ceil_div, launch
from effasr_kernels.runtime.tiles import kept_tile_table, locate_tile, tile_programs

_ELEMENTS = 4096
"""Elements of a tile of `rotate`."""


@triton.jit
def _load_angles(cos, sin, start, in_rows, HALF: tl.constexpr, BLOCK_M: tl.constexpr):
    m = tl.arange(0, BLOCK_M)
    c = tl.arange(0, HALF)
    offset = (start + m[:, None]) * HALF + c[None, :]
    mask = in_rows[:, None]
    return tl.load(cos + offset, mask=mask, other=0.0), tl.load(sin + offset, mask=mask, other=0.0)


@triton.jit
def load_rotated(x, cos, sin, start, row, in_rows, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr):
    """Load a tile of rows and rotate it: (BLOCK_M, WIDTH), in the dtype of ``x``."""
    HALF: tl.constexpr = WIDTH // 2
    m = tl.arange(0, BLOCK_M)
    c = tl.arange(0, HALF)
    offset = m[:, None] * row + c[None, :]
    first = tl.load(x + offset, mask=in_rows[:, None], other=0.0).to(tl.float32)
    second = tl.load(x + HALF + offset, mask=in_rows[:, None], other=0.0).to(tl.float32)
    cos_tile, sin_tile = _load_angles(cos, sin, start, in_rows, HALF, BLOCK_M)
    halves = tl.join(
        (first * cos_tile - second * sin_tile).to(x.dtype.element_ty),
        (second * cos_tile + first * sin_tile).to(x.dtype.element_ty),
    )
    return tl.reshape(tl.permute(halves, (0, 2, 1)), (BLOCK_M, WIDTH))


@triton.jit
def store_rotated_back(
    out, x, cos, sin, start, row, in_rows, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Rotate a tile of gradients back and store it; see `load_rotated`."""
    HALF: tl.constexpr = WIDTH // 2
    m = tl.arange(0, BLOCK_M)
    c = tl.arange(0, HALF)
    first, second = tl.split(tl.permute(tl.reshape(x, (BLOCK_M, 2, HALF)), (0, 2, 1)))
    cos_tile, sin_tile = _load_angles(cos, sin, start, in_rows, HALF, BLOCK_M)
    offset = m[:, None] * row + c[None, :]
    dtype = out.dtype.element_ty
    back = first * cos_tile + second * sin_tile
    tl.store(out + offset, back.to(dtype), mask=in_rows[:, None])
    back = second * cos_tile - first * sin_tile
    tl.store(out + HALF + offset, back.to(dtype), mask=in_rows[:, None])


@triton.jit(do_not_specialize=["sequences", "rows"])
def rotate(
    x,  # (T, H, D), a pointer, like all up to `out`
    cos,  # float32 (positions, HALF), contiguous
    sin,  # same shape as `cos`
    cu_seqlens,  # int32 (N + 1,)
    tiles,  # int32 (1 + tiles, 4); see `effasr_kernels.runtime.tiles.locate_tile`
    out,  # (T, H, D), contiguous, written
    sequences,  # N
    rows,  # T
    heads,  # H
    x_row,
    x_head,
    WIDTH: tl.constexpr,  # D
    HALF: tl.constexpr,  # R / 2, the pairs of channels that rotate
    BLOCK_D: tl.constexpr,  # a power of two, at least D / 2 and HALF
    BLOCK_M: tl.constexpr,
    BACK: tl.constexpr,  # whether to apply the inverse rotation
):
    """Rotate every head of a tile of rows: program (tile, head); zeros in the tail."""
    sequence, first_row, length, start = locate_tile(
        tiles, cu_seqlens, sequences, rows, tl.program_id(0), BLOCK_M
    )
    if start >= length:
        return
    head = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)[:, None]
    c = tl.arange(0, BLOCK_D)[None, :]
    first_row += start
    real = (start + m < length) & (sequence < sequences)
    x += first_row * x_row + head.to(tl.int64) * x_head + m * x_row
    out += (first_row * heads + head) * WIDTH + m * (heads * WIDTH)
    # In the tail nothing is loaded and zeros are stored.
    stored = start + m < length
    pairs = c < HALF
    first = tl.load(x + c, mask=real & pairs, other=0.0).to(tl.float32)
    second = tl.load(x + HALF + c, mask=real & pairs, other=0.0).to(tl.float32)
    offset = (start + m) * HALF + c
    cos_tile = tl.load(cos + offset, mask=real & pairs, other=0.0)
    sin_tile = tl.load(sin + offset, mask=real & pairs, other=0.0)
    if BACK:
        sin_tile = -sin_tile
    dtype = out.dtype.element_ty
    result = first * cos_tile - second * sin_tile
    tl.store(out + c, result.to(dtype), mask=stored & pairs)
    result = second * cos_tile + first * sin_tile
    tl.store(out + HALF + c, result.to(dtype), mask=stored & pairs)
    for begin in tl.static_range(2 * HALF, WIDTH, BLOCK_D):
        in_width = begin + c < WIDTH
        unrotated = tl.load(x + begin + c, mask=real & in_width, other=0.0)
        tl.store(out + begin + c, unrotated.to(dtype), mask=stored & in_width)


def rotated(
    x: Tensor,  # (T, H, D), with a last stride of 1
    layout: PackedLayout,  # layout of `x`
    angles: tuple[Tensor, Tensor],  # cosines and sines, from `angle_table`
    dtype: torch.dtype,  # dtype of the copy
    *,
    back: bool = False,  # whether to apply the inverse rotation
) -> Tensor:
    """Copy packed heads and rotate their first channels by each row's position."""
    # Returns (T, H, D), contiguous, zero in the tail.
    rows, heads, width = x.shape
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    half = angles[0].shape[1]
    block_d = next_power_of_two(max(ceil_div(width, 2), half))
    block_m = max(1, _ELEMENTS // block_d // 2)
    launch(
        rotate,
        (tile_programs(layout, block_m, listed=True), heads),
        *(x, *angles, layout.cu_seqlens, kept_tile_table(layout, block_m), out),
        *(layout.num_sequences, rows, heads, *x.stride()[:2]),
        WIDTH=width,
        HALF=half,
        BLOCK_D=block_d,
        BLOCK_M=block_m,
        BACK=back,
    )
    return out


def angle_table(
    rotary: Rotary, head_width: int, rows: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions that a row can have, rounded from float64 to float32."""
    # Returns two of float32 (positions, R / 2). The first call for a size waits for the device, so
    # that a call on any stream may use the same table.
    size, width = next_power_of_two(max(1, rows)), rotary.rotated(head_width)
    key = size, rotary.base, width, device
    table = _TABLES.get(key)
    if table is None:
        table = _make_table(*key)
        is_cuda = device.type == "cuda"
        # A tensor that is computed during CUDA graph capture has no values until the graph runs.
        if not (is_cuda and torch.cuda.is_current_stream_capturing()):
            if is_cuda:
                # Later calls may be on another stream, which must find the values.
                torch.cuda.current_stream(device).synchronize()
            _TABLES[key] = table
    return table


# Never evicted, as a CUDA graph may use a table until the process ends. There are few sizes.
_TABLES: dict[tuple[int, float, int, torch.device], tuple[Tensor, Tensor]] = {}


def _make_table(size: int, base: float, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    exponents = torch.arange(0, width, 2, device=device, dtype=torch.float64) / width
    positions = torch.arange(size, device=device, dtype=torch.float64)
    angles = positions[:, None] * base**-exponents
    return angles.cos().float(), angles.sin().float()
