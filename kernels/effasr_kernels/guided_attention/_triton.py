"""`guided_attention` in Triton: one kernel forward, two backward, no tensor of size U x T."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from effasr_kernels.guided_attention._backward import guided_backward_kv, guided_backward_q
from effasr_kernels.guided_attention._forward import guided_forward
from effasr_kernels.guided_attention.definition import GuidedArguments
from effasr_kernels.runtime.launch import capability, launch, refusal
from effasr_kernels.runtime.tiles import count_tiles
from effasr_kernels.shared.dropout import seed_tensor

_WIDEST = 256


@dataclass(frozen=True, slots=True)
class Config:
    """Queries and keys of a tile, warps, and pipeline stages of the loads of a kernel."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def configs(dtype: torch.dtype, block_d: int, major: int) -> tuple[Config, Config, Config]:
    """The configurations of the forward, the gradient of queries, and that of keys and values.

    They are chosen to compile without spills. Transcripts have few tokens, so the kernel that loops
    over tokens has small steps.

    Args:
        dtype: Dtype of the queries.
        block_d: The padded width of a head, a power of two.
        major: Major compute capability.
    """
    if dtype == torch.float32:
        # Without tensor cores, products take many registers.
        if block_d <= 64:
            return Config(16, 16, 4, 2), Config(16, 32, 4, 1), Config(16, 32, 4, 1)
        if block_d <= 128:
            return Config(16, 16, 4, 1), Config(16, 16, 8, 1), Config(16, 16, 4, 1)
        return Config(16, 16, 4, 2), Config(16, 16, 4, 2), Config(16, 16, 8, 1)
    if block_d <= 64:
        return Config(64, 32, 4, 3), Config(64, 32, 4, 2), Config(16, 64, 4, 2)
    if block_d <= 128 and major == 9:
        # Eight warps would compute each score twice; four spill on Ampere.
        return Config(64, 32, 4, 2), Config(64, 32, 4, 2), Config(16, 64, 4, 2)
    if block_d <= 128:
        # Eight warps spill on Blackwell, four on Ampere.
        warps = 4 if major >= 10 else 8
        return Config(64, 32, 8, 2), Config(64, 32, warps, 2), Config(16, 64, 8, 2)
    return Config(64, 32, 8, 2), Config(64, 32, 8, 2), Config(16, 32, 8, 2)


def unsupported_reason(a: GuidedArguments) -> str | None:
    """The reason why this backend does not support these arguments, or None."""
    if a.q.shape[-1] > _WIDEST:
        return f"supports head widths up to {_WIDEST}, not {a.q.shape[-1]}"
    return refusal(a.q)


def forward(a: GuidedArguments) -> tuple[tuple[Tensor, Tensor], tuple[Tensor]]:
    """See `effasr_kernels.guided_attention.guided_attention`; saves the rows' log-sum-exp."""
    this = _Call(a)
    (rows, heads, width), sequences = a.q.shape, a.layout_q.num_sequences
    cut = this.configs[0]
    out = a.q.new_empty(this.q.shape)
    penalty = a.q.new_empty(rows, heads, dtype=torch.float32)
    (lse,) = saved_like(a)
    launch(
        guided_forward,
        (count_tiles(rows, sequences, cut.block_m), heads),
        *this.inputs,
        *(out, penalty, lse),
        *(sequences, rows, heads, *this.strides),
        *this.numbers[1:],
        **this.constants(cut),
    )
    return (_narrowed(out, width), penalty), (lse,)


def saved_like(a: GuidedArguments) -> tuple[Tensor]:
    """An empty tensor like what `forward` saves: float32 (H, U)."""
    return (a.q.new_empty(a.q.shape[1], a.q.shape[0], dtype=torch.float32),)


def backward(
    a: GuidedArguments,
    grads: Sequence[Tensor],
    results: Sequence[Tensor],
    saved: Sequence[Tensor],
) -> dict[str, Tensor | None]:
    """Compute the gradients of ``q``, ``k`` and ``v``."""
    this = _Call(a)
    _, cut_q, cut_kv = this.configs
    (rows_q, heads, width), rows_k = a.q.shape, a.k.shape[0]
    sequences = a.layout_q.num_sequences
    (out, penalty), (lse,), (grad_out, grad_penalty) = results, saved, grads
    out, grad_out = _aligned(out), _aligned(grad_out)
    gradients = [x.new_empty(x.shape) for x in (this.q, this.k, this.v)]
    per_query = lse.new_empty(2, heads, rows_q)
    launch(
        guided_backward_q,
        (count_tiles(rows_q, sequences, cut_q.block_m), heads),
        *this.inputs,
        *(out, penalty, lse, grad_out, grad_penalty, per_query, gradients[0]),
        *(sequences, rows_q, heads, *this.strides),
        *this.numbers,
        **this.constants(cut_q),
    )
    # Launched second, as the first kernel writes `per_query`.
    launch(
        guided_backward_kv,
        (count_tiles(rows_k, sequences, cut_kv.block_n), heads),
        *this.inputs,
        *(lse, grad_out, per_query, *gradients[1:]),
        *(sequences, rows_q, rows_k, heads, *this.strides),
        *this.numbers,
        **this.constants(cut_kv),
    )
    return {name: _narrowed(x, width) for name, x in zip("qkv", gradients, strict=True)}


class _Call:
    """The arguments that all three kernels share.

    Attributes:
        q: (U, H, D), aligned by `_aligned`.
        k: (T, H, D), aligned by `_aligned`.
        v: (T, H, D), aligned by `_aligned`.
        configs: The configuration of each kernel.
        inputs: The first pointers of the kernels.
        strides: Row and head strides, divided by 8.
        numbers: The floating-point arguments.
    """

    def __init__(self, a: GuidedArguments):
        self.q, self.k, self.v = _aligned(a.q), _aligned(a.k), _aligned(a.v)
        self._width = self.q.shape[-1]
        self._block_d = max(16, 1 << (self._width - 1).bit_length())
        self._dropped = a.dropout > 0
        self.configs = configs(a.q.dtype, self._block_d, capability(a.q.device)[0])
        drawn = seed_tensor(a.seed, a.q.device) if a.dropout else None
        offsets = a.layout_q.cu_seqlens, a.layout_k.cu_seqlens
        self.inputs = (self.q, self.k, self.v, *offsets, drawn)
        self.strides = tuple(x.stride(axis) // 8 for x in self.inputs[:3] for axis in (0, 1))
        self.numbers = (a.scale, a.scale * math.log2(math.e), 0.5 / a.sigma**2, a.dropout)

    def constants(self, cut: Config) -> dict[str, Any]:
        """Constants and compiler options of a kernel."""
        return {
            "num_warps": cut.warps,
            "num_stages": cut.stages,
            "WIDTH": self._width,
            "BLOCK_D": self._block_d,
            "BLOCK_M": cut.block_m,
            "BLOCK_N": cut.block_n,
            "DROPOUT": self._dropped,
        }


def _aligned(x: Tensor) -> Tensor:
    """The tensor or a copy whose width and strides are multiples of 8, with a last stride of 1.

    Kernels then load whole vectors. For an odd width, a padded copy costs less time and registers
    than loads of single elements.
    """
    if x.shape[-1] % 8:
        return functional.pad(x, (0, -x.shape[-1] % 8))
    whole = x.stride(-1) == 1 and all(stride % 8 == 0 for stride in x.stride()[:-1])
    return x if whole else x.contiguous()


def _narrowed(x: Tensor, width: int) -> Tensor:
    """The first ``width`` channels, without the padding of `_aligned`."""
    return x if x.shape[-1] == width else x[..., :width].contiguous()
