"""`attention` in Triton: packed flash attention with rotary or relative positions and dropout.

The forward is one kernel. The backward has one kernel for keys and values and one for queries; both
recompute the scores, so no tensor of size T_q x T_k is stored. With `RelativeBias` the relative
part of the scores is a new buffer in each pass: the kernel of keys and values overwrites it with
the gradient of the scores, from which the other gradients are computed.

`effasr_kernels.attention.triton.guided` is `guided_attention`, by the same kernels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from effasr_kernels.attention import AttentionArguments
from effasr_kernels.attention.triton.backward import attention_backward_kv, attention_backward_q
from effasr_kernels.attention.triton.config import WIDEST, Config, Configs, configs, padded_width
from effasr_kernels.attention.triton.delta import row_delta
from effasr_kernels.attention.triton.forward import attention_forward
from effasr_kernels.attention.triton.relative import bounds, relative_backward, relative_scores
from effasr_kernels.attention.triton.rotary import angle_table, rotated
from effasr_kernels.runtime.launch import capability, launch, unit_stride
from effasr_kernels.runtime.tiles import kept_tile_table, tile_programs
from effasr_kernels.shared.dropout import seed_tensor
from effasr_kernels.shared.joined import empty_gradients

_LOG2_E = math.log2(math.e)


@dataclass(slots=True)
class _Call:
    """The kernel arguments of a call."""

    arguments: AttentionArguments  # arguments of the call
    # (T_q, H, D). In the backward rotated, or with the content bias added; in the forward rotated
    # unless ``rotates_in_kernel``.
    q: Tensor
    k: Tensor  # (T_k, H_k, D); rotated for rotary positions
    v: Tensor  # (T_k, H_k, D)
    angles: tuple[Tensor, Tensor] | None  # cosines and sines of rotary positions, or None
    rotates_in_kernel: bool  # whether the attention kernels rotate queries (forward) and gradients
    # Cosines, sines, offsets and seed, which follow queries, keys, values and bias in all kernels
    pointers: tuple[Tensor | None, ...]
    sizes: tuple[int, ...]  # heads and strides, the last integers of all kernels
    bias: Tensor | None  # the relative part of the scores, (T_q, H, W), a new buffer; or None
    bias_eighths: int  # W / 8
    narrowness: float | None  # ``1 / (2 sigma^2)`` of `guided_attention`; None for `attention`
    configs: Configs  # tile sizes of the kernels

    def options(self, config: Config) -> dict[str, Any]:
        """Constants and compiler options of a launch, except for ``BIAS``."""
        width = self.q.shape[2]
        return {
            "num_warps": config.warps,
            "num_stages": config.stages,
            "WIDTH": width,
            "BLOCK_D": padded_width(width),
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "GROUP": self.arguments.group,
            "CAUSAL": self.arguments.causal,
            "ROTARY": self.rotates_in_kernel,
            "DROPOUT": self.arguments.dropout > 0,
            "GUIDED": self.narrowness is not None,
        }

    @property
    def context(self) -> tuple[int, int, int] | tuple[None, None, None]:
        """The context's numbers, or None; they follow strides in all kernels."""
        return bounds(self.arguments.context, self.arguments.layout_k)

    @property
    def numbers(self) -> tuple[float, float]:
        """Probability to drop a weight, and narrowness: the last numbers of all kernels."""
        return self.arguments.dropout, self.narrowness or 0.0


def unsupported_reason(a: AttentionArguments) -> str | None:
    if a.q.shape[2] > WIDEST:
        return f"heads of more than {WIDEST} channels do not fit a tile"
    return None


def forward(
    a: AttentionArguments, narrowness: float | None = None
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Compute the output; save each row's log-sum-exp to base 2, float32 (H, T_q)."""
    # With ``narrowness``, 1 / (2 sigma^2), a second result is the penalty of `guided_attention`.
    call = _prepare(a, narrowness)
    rows, heads = a.layout_q.rows, a.q.shape[1]
    out = a.q.new_empty(a.q.shape)
    (lse,) = saved_like(a)
    penalty = None if narrowness is None else lse.new_empty(rows, heads)
    config = call.configs.forward
    sequences = a.layout_q.num_sequences
    launch(
        attention_forward,
        (tile_programs(a.layout_q, config.block_m, listed=True), heads),
        None if a.content_bias is None else a.content_bias.contiguous(),
        *(call.q, call.k, call.v, call.bias, *call.pointers),
        *(kept_tile_table(a.layout_q, config.block_m), out, lse, penalty),
        *(sequences, rows, call.bias_eighths, *call.sizes, *call.context),
        *(a.scale * _LOG2_E, *call.numbers),
        **call.options(config),
        BIAS=a.content_bias is not None,
    )
    return (out,) if penalty is None else (out, penalty), (lse,)


def saved_like(a: AttentionArguments) -> tuple[Tensor, ...]:
    return (a.q.new_empty(a.q.shape[1], a.q.shape[0], dtype=torch.float32),)


def backward(
    a: AttentionArguments,
    grads: Sequence[Tensor],
    results: Sequence[Tensor],
    saved: Sequence[Tensor],
    narrowness: float | None = None,
) -> dict[str, Tensor | None]:
    grad_out, (lse,) = grads[0], saved
    if a.relative is None:
        guided = None if narrowness is None else (grads[1], results[1])
        delta = row_delta(grad_out, results[0], guided)
    else:
        delta = torch.empty_like(lse)
    call = _prepare(a, narrowness, _Rows(results[0], grad_out, delta))
    grad_q, grad_k, grad_v = _empty_gradients(call)
    # Overwrites the bias with the gradient of the scores.
    _backward_kv(call, lse, delta, grad_out, grad_k, grad_v)
    gradients: dict[str, Tensor | None] = {"k": grad_k, "v": grad_v, "q": grad_q}
    if call.bias is None or a.relative is None:
        _backward_q(call, lse, delta, grad_out, grad_q)
        if call.angles is not None and not call.rotates_in_kernel:
            for name, x, layout in (("q", grad_q, a.layout_q), ("k", grad_k, a.layout_k)):
                gradients[name] = rotated(x, layout, call.angles, call.q.dtype, back=True)
        return gradients
    names = "q", "content_bias", "position_bias", "position_table"
    gradients_of_position = relative_backward(
        call.bias, a.q, call.k, a.relative, a.layout_q, a.layout_k, a.scale, grad_q, a.context
    )
    return gradients | dict(zip(names, gradients_of_position, strict=True))


@dataclass(frozen=True, slots=True)
class _Rows:
    """What the backward needs of each query: the result, its gradient, and their `row_delta`.

    With relative positions `_prepare` writes the last.
    """

    result: Tensor
    grad: Tensor
    delta: Tensor


def _prepare(a: AttentionArguments, narrowness: float | None, rows: _Rows | None = None) -> _Call:
    """Make the arguments of the kernels: of the backward with ``rows``, of the forward without."""
    q, k, v = map(unit_stride, (a.q, a.k, a.v))
    heads, width = q.shape[1:]
    angles, in_kernel = None, False
    if a.rotary is not None and (channels := a.rotary.rotated(width)):
        longest = max(a.layout_q.rows, a.layout_k.rows)
        angles = angle_table(a.rotary, width, longest, q.device)
        in_kernel = channels == padded_width(width)
        k = rotated(k, a.layout_k, angles, k.dtype)
        # The backward reads each query once for every tile of keys, so they are rotated before.
        if rows is not None or not in_kernel:
            q = rotated(q, a.layout_q, angles, q.dtype)
    bias = None
    if a.position_bias is not None and a.position_table is not None:
        relative = a.q, a.position_bias, a.position_table, a.layout_q, a.layout_k, a.context
        if rows is None:
            bias = relative_scores(*relative)
        else:
            # Biased before the loop over queries, where an addition would prevent prefetching.
            q = q.new_empty(q.shape)
            bias = relative_scores(
                *relative,
                content_bias=a.content_bias,
                biased=q,
                result=rows.result,
                grad_result=rows.grad,
                delta=rows.delta,
            )
    cos, sin = angles if angles is not None and in_kernel else (None, None)
    return _Call(
        *(a, q, k, v, angles, in_kernel),
        (
            *(cos, sin, a.layout_q.cu_seqlens, a.layout_k.cu_seqlens),
            seed_tensor(a.seed, q.device) if a.dropout else None,
        ),
        (heads, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
        bias,
        0 if bias is None else bias.shape[2] // 8,
        narrowness,
        configs(
            *(q.dtype, width, capability(q.device)[0]),
            plain=a.rotary is None and a.content_bias is None and not a.dropout,
            guided=narrowness is not None,
            context=a.context is not None,
            grouped=a.group > 1,
        ),
    )


def _empty_gradients(call: _Call) -> list[Tensor]:
    """Empty gradients of queries, keys and values, in one tensor where these are of one product."""
    a = call.arguments
    if call.angles is not None and not call.rotates_in_kernel:
        # Rotated back, and then rounded, afterwards.
        wide = [torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (a.q, a.k)]
        return [*wide, a.v.new_empty(a.v.shape)]
    if a.q.shape == a.k.shape:
        return empty_gradients(a.q, a.k, a.v)
    return [a.q.new_empty(a.q.shape), *empty_gradients(a.k, a.v)]


def _backward_kv(
    call: _Call, lse: Tensor, delta: Tensor, grad_out: Tensor, grad_k: Tensor, grad_v: Tensor
) -> None:
    a, config = call.arguments, call.configs.backward_kv
    rows, sequences = a.layout_k.rows, a.layout_k.num_sequences
    launch(
        attention_backward_kv,
        (tile_programs(a.layout_k, config.block_n, listed=True), call.k.shape[1]),
        *(call.q, call.k, call.v, call.bias, *call.pointers),
        *(kept_tile_table(a.layout_k, config.block_n), lse, delta, grad_out, grad_k, grad_v),
        *(sequences, a.layout_q.rows, rows, call.bias_eighths, *call.sizes, grad_k.stride(0)),
        *(*call.context, a.scale, *call.numbers),
        **call.options(config),
        BIAS=call.bias is not None,
    )


def _backward_q(call: _Call, lse: Tensor, delta: Tensor, grad_out: Tensor, grad_q: Tensor) -> None:
    a, config = call.arguments, call.configs.backward_q
    rows, sequences = a.layout_q.rows, a.layout_q.num_sequences
    launch(
        attention_backward_q,
        (tile_programs(a.layout_q, config.block_m, listed=True), call.q.shape[1]),
        *(call.q, call.k, call.v, *call.pointers),
        *(kept_tile_table(a.layout_q, config.block_m), lse, delta, grad_out, grad_q),
        *(sequences, rows, *call.sizes, grad_q.stride(0), *call.context, a.scale),
        *call.numbers,
        **call.options(config),
    )
