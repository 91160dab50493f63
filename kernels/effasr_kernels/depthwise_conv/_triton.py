"""`depthwise_conv` in Triton.

Loading 2C values and storing C for every frame takes only slightly longer than the arithmetic.
Threads therefore iterate over the rows and keep the last K inputs in registers. Each input is
loaded and gated once by a group of threads; the adjacent group repeats that only at the border.
Gating again for every tap would cost K exponentials and divisions for each value, which take longer
than a second pass over memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from effasr_kernels.depthwise_conv._backward import convolve_backward
from effasr_kernels.depthwise_conv._forward import convolve
from effasr_kernels.depthwise_conv.definition import ConvArguments
from effasr_kernels.runtime.counters import program_counters
from effasr_kernels.runtime.launch import launch, refusal
from effasr_kernels.runtime.tiles import count_tiles
from effasr_kernels.shared.partial_sums import summed, summed_parts

_MOST_TAPS = 32
_GROUPS, _STEP = 4, 4
# The gradients of the taps are written once for each tile, so the backward takes larger ones.
_BLOCK, _BLOCK_BACKWARD = 128, 256
_MERGED = 16
"""Statistics of tiles that a thread loads at a time. More would cost the convolution threads."""


def unsupported_reason(a: ConvArguments) -> str | None:
    """Return why this backend does not support these arguments, or None if it does."""
    if a.weight.shape[1] > _MOST_TAPS:
        return f"more than {_MOST_TAPS} taps do not fit in registers"
    return refusal(a.x)


def forward(a: ConvArguments) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[()]]:
    """See `effasr_kernels.depthwise_conv.depthwise_conv`; saves nothing."""
    x, layout = _with_unit_stride(a.x), a.layout
    channels, width = a.weight.shape
    tiles = count_tiles(layout.rows, layout.num_sequences, _BLOCK)
    config, options = _configuration(width, channels)
    blocks_c = _cover(channels, config["BLOCK_C"])
    y = x.new_empty(layout.rows, channels)
    # Without a row nothing is launched.
    make = x.new_empty if tiles else x.new_zeros
    size = channels if a.statistics else 0
    mean, variance = (make(size, dtype=torch.float32) for _ in range(2))
    partials: tuple[Tensor | None, ...] = (None,) * 6
    if a.statistics:
        partials = (
            *(_wide(x, blocks_c, tiles), _wide(x, tiles, channels), _wide(x, tiles, channels)),
            *(mean, variance, program_counters(x, blocks_c)),
        )
    launch(
        convolve,
        (tiles, blocks_c),
        *(x, a.weight.contiguous(), None if a.bias is None else a.bias.contiguous(), y, *partials),
        *(layout.cu_seqlens, layout.num_sequences, layout.rows, x.stride(0), channels),
        **options,
        **config,
        maxnreg=_most_registers(x.dtype, width, options["num_warps"]),
        TAPS=width,
        LEFT=_left(width, a.causal),
        GATED=a.gated,
        STATISTICS=a.statistics,
        MERGED=_MERGED * 32 * options["num_warps"] // config["BLOCK_C"],
        BLOCK=_BLOCK,
    )
    return (y, mean, variance), ()


def saved_like(a: ConvArguments) -> tuple[()]:
    """Return no tensors, because the backward only uses the arguments."""
    return ()


def backward(
    a: ConvArguments,
    grads: tuple[Tensor, ...],
    results: tuple[Tensor, ...],
    saved: tuple[Tensor, ...],
) -> dict[str, Tensor | None]:
    """Return the gradients of x, weight and bias; gradients of the statistics are not used."""
    x, layout = _with_unit_stride(a.x), a.layout
    channels, width = a.weight.shape
    tiles = count_tiles(layout.rows, layout.num_sequences, _BLOCK_BACKWARD)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    # The gradient of the weight in its order, then that of the bias.
    partials = _wide(x, tiles, width if a.bias is None else width + 1, channels)
    config, options = _configuration(width, channels)
    launch(
        convolve_backward,
        (tiles, _cover(channels, config["BLOCK_C"])),
        *(grads[0], x, a.weight.contiguous(), dx, partials),
        *(layout.cu_seqlens, layout.num_sequences, layout.rows, x.stride(0), channels),
        **options,
        **config,
        TAPS=width,
        LEFT=_left(width, a.causal),
        GATED=a.gated,
        BIASED=a.bias is not None,
        BLOCK=_BLOCK_BACKWARD,
    )
    if a.bias is None:
        dweight, dbias = summed(partials, a.weight.dtype), None
    else:
        dweight, dbias = summed_parts(partials, a.weight.dtype, a.bias.dtype)
    return {"x": dx, "weight": dweight.view(channels, width), "bias": dbias}


def _configuration(taps: int, channels: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return constants and launch options, with as many channels per thread as registers allow."""
    per_thread = 4 if taps <= 11 else 2 if taps <= 17 else 1
    # The largest of the block sizes with the fewest surplus channels.
    blocks = (128, 64, 32) if per_thread > 1 else (64, 32)
    block = min(blocks, key=lambda size: _cover(channels, size) * size)
    warps = _GROUPS * block // (32 * per_thread)
    return {"BLOCK_C": block, "GROUPS": _GROUPS, "STEP": _STEP}, {"num_warps": warps}


def _most_registers(dtype: torch.dtype, taps: int, warps: int) -> int | None:
    """Return the most registers of a thread in the forward; None lets the compiler choose.

    A multiprocessor then runs four programs of four warps. In float32 and with more taps, the
    compiler would spill.
    """
    return 128 if dtype != torch.float32 and taps <= 9 and warps == 4 else None


def _cover(count: int, block: int) -> int:
    return -(-count // block)


def _left(taps: int, causal: bool) -> int:
    return taps - 1 if causal else taps // 2


def _wide(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def _with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
