"""Benchmarks of attention with relative positions against other implementations."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import effasr_kernels as kernels
from bench.contender import Case, Contender, leaf
from bench.operations.attention import heads, padded
from bench.workload import Workload


def cases(workload: Workload) -> list[Case]:
    """Self-attention of a Conformer."""
    layout = workload.frame_layout
    q, upstream = heads(workload, layout), heads(workload, layout).detach().roll(1, 0)
    upstream[layout.total :] = 0
    k = heads(workload, layout).detach().flip(-1).requires_grad_()
    v = heads(workload, layout).detach().flip(-2).requires_grad_()
    shape = workload.widths.heads, workload.head_width
    content, position = workload.draw(*shape), workload.draw(*shape).detach().flip(0)
    position.requires_grad_()
    table = workload.draw(2 * layout.max_seqlen_bound - 1, *shape)
    relative = kernels.RelativeBias(content, position, table)
    leaves = {"q": q, "k": k, "v": v}
    leaves |= {"content_bias": content, "position_bias": position, "table": table}

    def ours(backend: str) -> Contender:
        return Contender(
            leaves,
            lambda: kernels.attention(q, k, v, layout, position=relative, backend=backend),
            [upstream],
        )

    def peer(attend: Callable[..., Tensor]) -> Contender:
        return _padded(workload, leaves, upstream, attend)

    peers = {
        "NeMo (sdpa with bias)": lambda: peer(nemo),
        "Hugging Face Parakeet": lambda: peer(parakeet),
    }
    return [Case("attention", "relative", workload.describe(), ours, peers)]


def _padded(
    workload: Workload,
    leaves: dict[str, Tensor],
    upstream: Tensor,
    attend: Callable[..., Tensor],
) -> Contender:
    layout = workload.frame_layout
    longest, reach = layout.max_seqlen, layout.max_seqlen_bound
    biases = {name: leaf(leaves[name]) for name in ("content_bias", "position_bias")}
    # As many rows as the batch needs, from the largest distance to the smallest.
    window = slice(reach - longest, reach + longest - 1)
    table = leaf(leaves["table"][window].flip(0))
    scale = workload.head_width**-0.5
    inputs = leaves["q"], leaves["k"], leaves["v"], upstream
    base = padded(
        inputs,
        (layout, layout),
        lambda q, k, v, mask: attend(q, k, v, mask, *biases.values(), table, scale),
    )

    def packed(name: str, x: Tensor) -> Tensor:
        if name in biases:
            return x
        if name != "table":
            return base.packed(name, x)
        whole = x.new_zeros(leaves["table"].shape)
        whole[window] = x.flip(0)
        return whole

    return Contender({**base.leaves, **biases, "table": table}, base.call, base.upstream, packed)


def _by_position(q: Tensor, bias: Tensor, table: Tensor) -> Tensor:
    """Return scores by distance, turned into columns of keys: (B, H, T, T)."""
    scores = (q + bias[:, None]) @ table.permute(1, 2, 0)
    batch, heads, rows, columns = scores.shape
    shifted = F.pad(scores, (1, 0)).view(batch, heads, columns + 1, rows)[:, :, 1:]
    return shifted.reshape(batch, heads, rows, columns)[..., :rows]


def nemo(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    content_bias: Tensor,
    position_bias: Tensor,
    table: Tensor,
    scale: float,
) -> Tensor:
    """NeMo's RelPositionMultiHeadAttention with ``use_pytorch_sdpa``, without its projections."""
    bias = _by_position(q, position_bias, table) * scale
    bias = bias.masked_fill(~mask[:, None, None], float("-inf"))
    return F.scaled_dot_product_attention(
        q + content_bias[:, None], k, v, attn_mask=bias, scale=scale
    )


def parakeet(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    content_bias: Tensor,
    position_bias: Tensor,
    table: Tensor,
    scale: float,
) -> Tensor:
    """Hugging Face's ParakeetEncoderAttention, eager, without its projections."""
    bias = _by_position(q, position_bias, table) * scale
    bias = bias.masked_fill(~mask[:, None, None], torch.finfo(bias.dtype).min)
    scores = (q + content_bias[:, None]) @ k.mT * scale + bias
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v
