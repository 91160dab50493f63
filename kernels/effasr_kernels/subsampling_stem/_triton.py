"""`subsampling_stem` in Triton, with the first convolution's activation only in registers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from effasr_kernels.runtime.launch import capability, launch, refusal
from effasr_kernels.runtime.tiles import count_tiles
from effasr_kernels.shared.partial_sums import summed
from effasr_kernels.subsampling_stem._kernels import stem_backward, stem_forward, stem_patches
from effasr_kernels.subsampling_stem.definition import StemArguments

_PROGRAMS = 198
"""Rows of the backward's partial sums. With 256 channels and 64 per program, an H200 runs them in
two waves: three programs at a time fit into the registers of each of its 132 multiprocessors."""

_PATCH_SPAN = 128

_INT32_MAX = torch.iinfo(torch.int32).max


@dataclass(frozen=True, slots=True)
class Config:
    """Places and channels of a tile, places of a program and number of warps of one kernel."""

    block_p: int
    block_c: int
    span: int
    warps: int


def configs(dtype: torch.dtype, channels: int, major: int) -> tuple[Config, Config]:
    """Return the configurations of the forward and the backward.

    Args:
        dtype: Dtype of the mel values.
        channels: C.
        major: Major version of the compute capability.
    """
    padded = max(16, 1 << (channels - 1).bit_length())
    if dtype == torch.float32:
        # Products without tensor cores need both factors in registers, so tiles are small.
        return Config(32, 32, 256, 4), Config(32, 32, 256, 4)
    wide = min(padded, 128)
    return Config(32, wide, 256, 8 if wide == 128 else 4), Config(32, min(padded, 64), 256, 4)


def unsupported_reason(a: StemArguments) -> str | None:
    """Return why this backend does not support these arguments, or None if it does."""
    # Independent of grad mode: torch.library calls this without it and needs gradients later.
    if a.x.requires_grad:
        return "gives no gradient to x, which are features"
    if a.x.shape[0] // 4 * (a.x.shape[1] // 4) > _INT32_MAX:
        return "counts places of the result in int32"
    return refusal(a.x)


def forward(a: StemArguments) -> tuple[tuple[Tensor], tuple[()]]:
    """See `effasr_kernels.subsampling_stem.subsampling_stem`; saves nothing."""
    x, bins = a.x, a.x.shape[1]
    channels, sequences = a.weight.shape[0], a.layout.num_sequences
    cut, _ = configs(x.dtype, channels, capability(x.device)[0])
    y = x.new_empty(x.shape[0] // 4, bins // 4, channels)
    cu_places, places = _places(a)
    lengths = a.lengths.contiguous()
    launch(
        stem_forward,
        (count_tiles(places, sequences, cut.span), -(-channels // cut.block_c)),
        _patches(x, cu_places, lengths),
        *(t.contiguous() for t in (a.weight, a.bias, a.depthwise_weight, a.depthwise_bias)),
        *(cu_places, lengths, y, sequences, places),
        num_warps=cut.warps,
        BINS=bins,
        CHANNELS=channels,
        BLOCK_P=cut.block_p,
        BLOCK_C=cut.block_c,
        SPAN=cut.span,
    )
    return (y,), ()


def saved_like(a: StemArguments) -> tuple[()]:
    """Return no tensors, because the backward recomputes the first convolution."""
    return ()


def backward(
    a: StemArguments,
    grads: Sequence[Tensor],
    results: Sequence[Tensor],
    saved: Sequence[Tensor],
) -> dict[str, Tensor | None]:
    """Return the gradients of both weights and both biases."""
    x, bins = a.x, a.x.shape[1]
    channels, sequences = a.weight.shape[0], a.layout.num_sequences
    _, cut = configs(x.dtype, channels, capability(x.device)[0])
    cu_places, places = _places(a)
    spans = count_tiles(places, sequences, cut.span)
    partials = x.new_empty(min(spans, _PROGRAMS), 20 * channels, dtype=torch.float32)
    lengths = a.lengths.contiguous()
    launch(
        stem_backward,
        (partials.shape[0], -(-channels // cut.block_c)),
        _patches(x, cu_places, lengths),
        *(t.contiguous() for t in (a.weight, a.bias, a.depthwise_weight)),
        *(cu_places, lengths, grads[0], partials, sequences, places, spans),
        num_warps=cut.warps,
        BINS=bins,
        CHANNELS=channels,
        BLOCK_P=cut.block_p,
        BLOCK_C=cut.block_c,
        SPAN=cut.span,
    )
    parts = summed(partials, x.dtype).split([9 * channels, channels] * 2)
    return {
        "weight": parts[0].view(channels, 9),
        "bias": parts[1],
        "depthwise_weight": parts[2].view(channels, 9),
        "depthwise_bias": parts[3],
    }


def _places(a: StemArguments) -> tuple[Tensor, int]:
    """Return the offsets of the places of each utterance, int32 (N + 1,), and their total."""
    per_slot = a.rows_per_slot // 4 * (a.x.shape[1] // 4)
    return a.layout.cu_seqlens * per_slot, a.layout.rows * per_slot


def _patches(x: Tensor, cu_places: Tensor, lengths: Tensor) -> Tensor:
    """Return the input patches of the first convolution, (s T / 2, F / 2, 16)."""
    rows, bins = x.shape
    patches = x.new_empty(rows // 2, bins // 2, 16)
    sequences, places = lengths.shape[0], rows * bins // 16
    launch(
        stem_patches,
        (count_tiles(places, sequences, _PATCH_SPAN),),
        *(x.contiguous(), cu_places, lengths, patches, sequences, places),
        BINS=bins,
        BLOCK_Q=64,
        SPAN=_PATCH_SPAN,
    )
    return patches
