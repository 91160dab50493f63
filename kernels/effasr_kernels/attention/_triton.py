"""`attention` in Triton: packed flash attention, with any of the positions and with dropout.

One pass forward; backward one kernel for keys and values and one for queries, each of which
computes the scores again: nothing of T_q x T_k is stored, but for the bias of `RelativeBias`.
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
from effasr_kernels.attention.registration import call
from effasr_kernels.dropout import seed_tensor
from effasr_kernels.launch import capability, launch, refusal
from effasr_kernels.packed import PackedLayout
from effasr_kernels.tiles import count_tiles

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
        return relative_scores(
            q,
            self.relative.position_bias,
            self.relative.table,
            self.layout_q,
            self.layout_k,
            self.scale,
        )

    def pointers(self, bias: Tensor | None) -> tuple[Tensor | None, ...]:
        """The arguments that all kernels begin with."""
        turns = self.turns if self.turns is not None and self.turns_in_kernel else (None, None)
        offsets = self.layout_q.cu_seqlens, self.layout_k.cu_seqlens
        return self.q, self.k, self.v, bias, *turns, *offsets, self.seed

    def sizes(self) -> tuple[int, ...]:
        """W / 8, heads and strides: the integers that all kernels end with."""
        eighths = bias_width(self.layout_k.bound) // 8 if self.relative is not None else 0
        strides = (x.stride(axis) for x in (self.q, self.k, self.v) for axis in (0, 1))
        return eighths, self.q.shape[1], *strides

    def options(self, config: Config) -> dict[str, Any]:
        """Constants and compiler options of a launch."""
        width = self.q.shape[2]
        return {
            "num_warps": config.warps,
            "num_stages": config.stages,
            "WIDTH": width,
            "BLOCK_D": padded_width(width),
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "CAUSAL": self.causal,
            "BIAS": self.relative is not None,
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
        *this.pointers(this.bias(q)),
        out,
        lse,
        layout_q.num_sequences,
        layout_q.rows,
        *this.sizes(),
        scale * math.log2(math.e),
        dropout,
        **this.options(config),
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
    # This reads the bias; the gradient of queries then writes over it.
    grad_k, found["v"] = _backward_kv(this, bias, lse, delta, grad_out)
    grad_q, grad_content = _backward_q(this, bias, lse, delta, grad_out)
    found["q"] = _turned_back(this, grad_q, layout_q, q.dtype)
    found["k"] = _turned_back(this, grad_k, layout_k, q.dtype)
    if this.relative is not None and bias is not None and grad_content is not None:
        grad_v, found["position_bias"], found["position_table"] = relative_backward(
            bias,
            q,
            this.relative.position_bias,
            this.relative.table,
            layout_q,
            layout_k,
            scale,
        )
        found["q"] = grad_q + grad_v
        found["position_content_bias"] = grad_content.sum(0).to(q.dtype)
    return found


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
        *this.pointers(bias),
        lse,
        delta,
        grad_out,
        grad_k,
        grad_v,
        layout.num_sequences,
        this.layout_q.rows,
        layout.rows,
        *this.sizes(),
        this.scale,
        this.dropout,
        **this.options(config),
    )
    return grad_k, grad_v


def _backward_q(
    this: _Call, bias: Tensor | None, lse: Tensor, delta: Tensor, grad_out: Tensor
) -> tuple[Tensor, Tensor | None]:
    layout, config = this.layout_q, this.configs.backward_q
    _, heads, width = this.q.shape
    tiles = count_tiles(layout.rows, layout.num_sequences, config.block_m)
    grad_q, grad_content = _gradient_like(this, this.q), None
    if this.relative is not None:
        grad_content = lse.new_empty(tiles, heads, width)
    launch(
        attention_backward_q,
        (tiles, heads),
        *this.pointers(bias),
        lse,
        delta,
        grad_out,
        grad_q,
        grad_content,
        layout.num_sequences,
        layout.rows,
        *this.sizes(),
        this.scale,
        this.dropout,
        **this.options(config),
    )
    return grad_q, grad_content


run = call.kernel(__name__, forward, backward)
