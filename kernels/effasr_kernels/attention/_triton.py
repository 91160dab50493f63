"""`attention` in Triton: packed flash attention, with any of the positions and with dropout.

One pass forward; backward one kernel for keys and values and one for queries, each of which
computes the scores again: nothing of T_q x T_k is stored. With `RelativeBias` their bias is, a new
buffer each time; keys and values write the gradient of the scores over it, which the rest needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from effasr_kernels.attention._backward import attention_backward_kv, attention_backward_q
from effasr_kernels.attention._config import Config, Configs, configs, padded_width
from effasr_kernels.attention._delta import row_delta
from effasr_kernels.attention._forward import attention_forward
from effasr_kernels.attention._relative import bias_width, relative_backward, relative_scores
from effasr_kernels.attention._rotary import table, turned
from effasr_kernels.attention.position import RelativeBias, Rotary
from effasr_kernels.attention.torch_op import call
from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.launch import capability, launch, refusal
from effasr_kernels.runtime.tiles import count_tiles
from effasr_kernels.shared.dropout import seed_tensor

_WIDEST = 256


@dataclass(frozen=True, slots=True)
class _Call:
    """One call, as its kernels see it.

    Attributes:
        q: (T_q, H, D); turned, or with the content bias, in the backward; in the forward turned
            where ``turns_in_kernel`` does not hold.
        k: (T_k, H, D); turned where positions are rotary.
        v: (T_k, H, D).
        layout_q: The sequences of ``q``.
        layout_k: Those of ``k`` and ``v``.
        scale: Factor of the scores.
        dropout: Probability to drop a weight.
        causal: Whether query i sees only the keys 0 to i.
        seed: int64 (1,), or None.
        relative: Of the positions.
        turns: Cosines and sines of rotary positions, or None.
        turns_in_kernel: Whether the kernels of attention turn what is not turned yet.
        configs: How kernels are cut.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    layout_q: PackedLayout
    layout_k: PackedLayout
    scale: float
    dropout: float
    causal: bool
    seed: Tensor | None
    relative: RelativeBias | None
    turns: tuple[Tensor, Tensor] | None
    turns_in_kernel: bool
    configs: Configs

    def bias(self, q: Tensor) -> Tensor | None:
        """The relative part of the scores, a new buffer."""
        if self.relative is None:
            return None
        bias, table = self.relative.position_bias, self.relative.table
        return relative_scores(q, bias, table, self.layout_q, self.layout_k)

    def pointers(self) -> tuple[Tensor | None, ...]:
        """The arguments that follow queries, keys, values and bias in all kernels."""
        turns = self.turns if self.turns is not None and self.turns_in_kernel else (None, None)
        return *turns, self.layout_q.cu_seqlens, self.layout_k.cu_seqlens, self.seed

    def eighths(self) -> int:
        """W / 8."""
        return bias_width(self.layout_k.max_seqlen_bound) // 8 if self.relative is not None else 0

    def sizes(self) -> tuple[int, ...]:
        """Heads and strides: the integers that all kernels end with."""
        strides = (x.stride(axis) for x in (self.q, self.k, self.v) for axis in (0, 1))
        return self.q.shape[1], *strides

    def options(self, config: Config) -> dict[str, Any]:
        """Constants and compiler options of a launch, but whether there is a bias."""
        width = self.q.shape[2]
        return {
            "num_warps": config.warps,
            "num_stages": config.stages,
            "WIDTH": width,
            "BLOCK_D": padded_width(width),
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "CAUSAL": self.causal,
            "ROTARY": self.turns_in_kernel,
            "DROPOUT": self.dropout > 0,
        }


def why_not(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_q: PackedLayout,
    layout_k: PackedLayout,
    *,
    causal: bool,
    scale: float,
    position: Rotary | RelativeBias | None,
    dropout: float,
    seed: int | Tensor | None,
) -> str | None:
    """The reason for which this backend cannot serve a call, or None."""
    if q.shape[2] > _WIDEST:
        return f"heads of more than {_WIDEST} channels do not fit a tile"
    return refusal(q, k, v)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_q: PackedLayout,
    layout_k: PackedLayout,
    *,
    causal: bool,
    scale: float,
    position: Rotary | RelativeBias | None,
    dropout: float,
    seed: int | Tensor | None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Attend; the backward needs each row's logarithmic sum."""
    this = _prepare(
        q, k, v, layout_q, layout_k, causal, scale, position, dropout, seed, backward=False
    )
    heads = q.shape[1]
    out = q.new_empty(q.shape)
    lse = q.new_empty(heads, layout_q.rows, dtype=torch.float32)
    config = this.configs.forward
    launch(
        attention_forward,
        (count_tiles(layout_q.rows, layout_q.num_sequences, config.block_m), heads),
        None if this.relative is None else this.relative.content_bias.contiguous(),
        this.q,
        this.k,
        this.v,
        this.bias(q),
        *this.pointers(),
        out,
        lse,
        layout_q.num_sequences,
        layout_q.rows,
        this.eighths(),
        *this.sizes(),
        scale * math.log2(math.e),
        dropout,
        **this.options(config),
        BIAS=this.relative is not None,
    )
    return (out,), (lse,)


def saved_like(q: Tensor, **_: Any) -> tuple[Tensor, ...]:
    """Each row's logarithmic sum, float32 (H, T_q)."""
    return (q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32),)


def backward(
    grads: Sequence[Tensor],
    results: Sequence[Tensor],
    saved: Sequence[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_q: PackedLayout,
    layout_k: PackedLayout,
    *,
    causal: bool,
    scale: float,
    position: Rotary | RelativeBias | None,
    dropout: float,
    seed: int | Tensor | None,
) -> dict[str, Tensor | None]:
    """Gradients of queries, keys and values, and of the tensors of ``position``."""
    this = _prepare(
        q, k, v, layout_q, layout_k, causal, scale, position, dropout, seed, backward=True
    )
    (grad_out,), (lse,) = grads, saved
    delta = row_delta(grad_out, results[0])
    bias = this.bias(q)
    found: dict[str, Tensor | None] = {}
    # Over the bias this writes the gradient of the scores.
    grad_k, found["v"] = _backward_kv(this, bias, lse, delta, grad_out)
    found["k"] = _turned_back(this, grad_k, layout_k, q.dtype)
    if this.relative is None or bias is None:
        grad_q = _backward_q(this, lse, delta, grad_out)
        found["q"] = _turned_back(this, grad_q, layout_q, q.dtype)
        return found
    names = "q", "position_content_bias", "position_bias", "position_table"
    shared = relative_backward(bias, q, this.k, this.relative, layout_q, layout_k, scale)
    return found | dict(zip(names, shared, strict=True))


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_q: PackedLayout,
    layout_k: PackedLayout,
    causal: bool,
    scale: float,
    position: Rotary | RelativeBias | None,
    dropout: float,
    seed: int | Tensor | None,
    *,
    backward: bool,
) -> _Call:
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    width = q.shape[2]
    turns, in_kernel = None, False
    if isinstance(position, Rotary) and (turning := position.rotated(width)):
        turns = table(position, width, max(layout_q.rows, layout_k.rows), q.device)
        in_kernel = turning == padded_width(width)
        k = turned(k, layout_k, turns, k.dtype)
        # In the backward each is read once for every tile of keys.
        if backward or not in_kernel:
            q = turned(q, layout_q, turns, q.dtype)
    if isinstance(position, RelativeBias) and backward:
        # Once, not in the loop over queries: what comes from registers is not fetched ahead.
        q = q + position.content_bias
    return _Call(
        q=q,
        k=k,
        v=v,
        layout_q=layout_q,
        layout_k=layout_k,
        scale=scale,
        dropout=dropout,
        causal=causal,
        seed=seed_tensor(seed, q.device) if dropout else None,
        relative=position if isinstance(position, RelativeBias) else None,
        turns=turns,
        turns_in_kernel=in_kernel,
        configs=configs(
            q.dtype,
            width,
            capability(q.device),
            plain=position is None and not dropout,
        ),
    )


def _gradient_like(this: _Call, x: Tensor) -> Tensor:
    """Where a kernel writes what may still have to be turned back, and rounded after that."""
    late = this.turns is not None and not this.turns_in_kernel
    return torch.empty(x.shape, dtype=torch.float32 if late else x.dtype, device=x.device)


def _turned_back(this: _Call, x: Tensor, layout: PackedLayout, dtype: torch.dtype) -> Tensor:
    if this.turns is None or this.turns_in_kernel:
        return x
    return turned(x, layout, this.turns, dtype, back=True)


def _backward_kv(
    this: _Call, bias: Tensor | None, lse: Tensor, delta: Tensor, grad_out: Tensor
) -> tuple[Tensor, Tensor]:
    layout, config = this.layout_k, this.configs.backward_kv
    grad_k, grad_v = _gradient_like(this, this.k), this.v.new_empty(this.v.shape)
    launch(
        attention_backward_kv,
        (count_tiles(layout.rows, layout.num_sequences, config.block_n), this.q.shape[1]),
        this.q,
        this.k,
        this.v,
        bias,
        *this.pointers(),
        lse,
        delta,
        grad_out,
        grad_k,
        grad_v,
        layout.num_sequences,
        this.layout_q.rows,
        layout.rows,
        this.eighths(),
        *this.sizes(),
        this.scale,
        this.dropout,
        **this.options(config),
        BIAS=bias is not None,
    )
    return grad_k, grad_v


def _backward_q(this: _Call, lse: Tensor, delta: Tensor, grad_out: Tensor) -> Tensor:
    layout, config = this.layout_q, this.configs.backward_q
    grad_q = _gradient_like(this, this.q)
    launch(
        attention_backward_q,
        (count_tiles(layout.rows, layout.num_sequences, config.block_m), this.q.shape[1]),
        this.q,
        this.k,
        this.v,
        *this.pointers(),
        lse,
        delta,
        grad_out,
        grad_q,
        layout.num_sequences,
        layout.rows,
        *this.sizes(),
        this.scale,
        this.dropout,
        **this.options(config),
    )
    return grad_q


run = call.kernel(__name__, forward, backward)
