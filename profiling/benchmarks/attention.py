"""Cases of attention at real lengths, with their peers."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import effasr_kernels as kernels
from benchmarks.contender import Case, Contender, Form, Padding, case_of, converted, without_tail
from benchmarks.workload import Workload
from effasr_kernels import PackedLayout

Peers = dict[str, Callable[[], Contender]]
_FLASH = {
    "flash_attn_2": "flash_attn",
    "flash_attn_3": "flash_attn_interface",
    "flash_attn_4": "flash_attn.cute",
}


def attention(workload: Workload) -> list[Case]:
    """Self-attention of a Conformer, of the encoder and of the decoder, and cross-attention."""
    frames, tokens = workload.frame_layout, workload.token_layout
    return [
        _relative(workload),
        _attention(workload, "", frames, frames),
        _attention(workload, "rotary", frames, frames),
        _attention(workload, "causal", tokens, tokens),
        _attention(workload, "cross", tokens, frames),
    ]


def _qkv(workload: Workload, layout_q: PackedLayout, layout_k: PackedLayout) -> list[Tensor]:
    """Return q, k and v, (rows, H, D), and the gradient of the result."""
    shape = workload.widths.heads, workload.head_width
    upstream = workload.rows_of(layout_q, *shape).detach().roll(1, 0)
    upstream[layout_q.total :] = 0
    keys = workload.rows_of(layout_k, *shape).detach()
    k, v = (keys.flip(dim).requires_grad_() for dim in (-1, -2))
    return [workload.rows_of(layout_q, *shape), k, v, upstream]


def _attention(
    workload: Workload, kind: str, layout_q: PackedLayout, layout_k: PackedLayout
) -> Case:
    q, k, v, upstream = _qkv(workload, layout_q, layout_k)
    leaves = {"q": q, "k": k, "v": v}
    causal, turn = kind == "causal", rotate if kind == "rotary" else None
    arguments = {
        **leaves,
        **{"layout_q": layout_q, "layout_k": layout_k, "causal": causal},
        "position": kernels.Rotary() if turn else None,
    }
    # Peers get sequences without a tail and without empty ones, as their callers make them.
    exact = [
        PackedLayout.from_lengths([n for n in layout.lengths if n], layout.device)
        for layout in (layout_q, layout_k)
    ]
    places = exact[0].positions()[:, None]

    def packed(attend: Callable[..., Tensor]) -> Contender:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if turn is not None:
                q, k = turn(q, places), turn(k, places)
            return attend(q, k, v)

        tail_q, tail_k = without_tail(layout_q), without_tail(layout_k)
        forms = {"q": tail_q, "k": tail_k, "v": tail_k, "result 0": tail_q}
        return converted(leaves, [upstream], call, forms)

    def varlen() -> Contender:
        """Torch's own, which sums gradients of queries in any order."""
        from torch.nn.attention.varlen import varlen_attn

        # torch 2.10 has a flag in the place of a window.
        options: dict[str, Any] = {"is_causal": causal}
        if "window_size" in inspect.signature(varlen_attn).parameters:
            options = {"window_size": (-1, 0) if causal else (-1, -1)}
        sizes = (*(x.cu_seqlens for x in exact), *(x.max_seqlen for x in exact))
        return packed(lambda q, k, v: varlen_attn(q, k, v, *sizes, **options))  # type: ignore[arg-type, return-value]

    def flash(module: str) -> Contender:
        function = importlib.import_module(module).flash_attn_varlen_func
        sizes = {
            f"cu_seqlens_{x}": layout.cu_seqlens for x, layout in zip("qk", exact, strict=True)
        }
        sizes |= {
            f"max_seqlen_{x}": layout.max_seqlen for x, layout in zip("qk", exact, strict=True)
        }

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            result = function(q=q, k=k, v=v, causal=causal, **sizes)
            return result[0] if isinstance(result, tuple) else result

        return packed(attend)

    def sdpa() -> Contender:
        """With a causal mask it needs no padding mask."""
        mask = Padding(layout_k).mask[:, None, None]

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if turn is not None:
                column = torch.arange(q.shape[2], device=q.device)
                q, k = turn(q, column), turn(k, column)
            if causal:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        return converted(leaves, [upstream], call, _padded_heads(layout_q, layout_k))

    def flex() -> Contender:
        """With a mask of documents, which is made outside of what is timed."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        total, documents = exact[0].total, exact[0].sequence_ids()
        same = lambda b, h, i, j: documents[i] == documents[j]
        gpu = workload.device.type == "cuda"
        device = workload.device
        mask = create_block_mask(same, None, None, total, total, device=device, _compile=gpu)
        # Uncompiled it stores all scores; that is for tests alone.
        attend = torch.compile(flex_attention, dynamic=False) if gpu else flex_attention
        there, back = without_tail(layout_q)
        form = lambda x: there(x).transpose(0, 1)[None], lambda x: back(x[0].transpose(0, 1))
        call = lambda q, k, v: attend(q, k, v, block_mask=mask)
        return converted(leaves, [upstream], call, dict.fromkeys((*leaves, "result 0"), form))

    peers: Peers = {"torch varlen_attn": varlen, "torch sdpa padded": sdpa}
    if turn is None:
        peers |= {name: lambda module=module: flash(module) for name, module in _FLASH.items()}
    if kind == "":
        peers["torch flex_attention"] = flex
    return case_of("attention", kind, workload.describe(), arguments, [upstream], peers)


def _padded_heads(layout_q: PackedLayout, layout_k: PackedLayout) -> dict[str, Form]:
    """Return padded queries, keys, values and results, (B, H, T, D)."""
    queries, keys = (Padding(layout).form(0, 2, 1, 3) for layout in (layout_q, layout_k))
    return {"q": queries, "k": keys, "v": keys, "result 0": queries}


def rotate(x: Tensor, places: Tensor) -> Tensor:
    """Rotary positions as models compute them before attention: (..., D) at ``places`` (...)."""
    half = x.shape[-1] // 2
    wavelengths = 10000.0 ** (torch.arange(half, device=x.device) / -half)
    angles = places[..., None] * wavelengths
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().split(half, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def _relative(workload: Workload) -> Case:
    layout, shape = workload.frame_layout, (workload.widths.heads, workload.head_width)
    q, k, v, upstream = _qkv(workload, layout, layout)
    content = workload.draw(*shape)
    position = workload.draw(*shape).detach().flip(0).requires_grad_()
    longest, reach = layout.max_seqlen, layout.max_seqlen_bound
    table = workload.draw(2 * reach - 1, *shape)
    leaves = {"q": q, "k": k, "v": v}
    leaves |= {"content_bias": content, "position_bias": position, "table": table}
    # Peers get as many rows as the batch needs, from the largest distance to the smallest.
    window = slice(reach - longest, reach + longest - 1)

    def whole(x: Tensor) -> Tensor:
        rows = x.new_zeros(table.shape)
        rows[window] = x.flip(0)
        return rows

    def peer(fused: bool) -> Contender:
        # NeMo's RelPositionMultiHeadAttention with `use_pytorch_sdpa`, or Hugging Face's eager
        # ParakeetEncoderAttention, both without their projections.
        mask, scale = Padding(layout).mask[:, None, None], workload.head_width**-0.5
        lowest = float("-inf") if fused else torch.finfo(q.dtype).min

        def call(
            q: Tensor, k: Tensor, v: Tensor, content: Tensor, position: Tensor, table: Tensor
        ) -> Tensor:
            bias = (_by_position(q + position[:, None], table) * scale).masked_fill(~mask, lowest)
            q = q + content[:, None]
            if fused:
                return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
            scores = q @ k.mT * scale + bias
            return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v

        forms = _padded_heads(layout, layout) | {"table": (lambda x: x[window].flip(0), whole)}
        return converted(leaves, [upstream], call, forms)

    biases = kernels.RelativeBias(content, position, table)
    arguments = {"q": q, "k": k, "v": v, "layout_q": layout, "position": biases}
    peers: Peers = {
        "NeMo (sdpa with bias)": lambda: peer(True),
        "Hugging Face Parakeet": lambda: peer(False),
    }
    text = workload.describe()
    return case_of("attention", "relative", text, arguments, [upstream], peers, leaves=leaves)


def _by_position(q: Tensor, table: Tensor) -> Tensor:
    """Return scores by distance, turned into columns of keys: (B, H, T, T)."""
    scores = q @ table.permute(1, 2, 0)
    batch, heads, rows, columns = scores.shape
    shifted = F.pad(scores, (1, 0)).view(batch, heads, columns + 1, rows)[:, :, 1:]
    return shifted.reshape(batch, heads, rows, columns)[..., :rows]


def guided(workload: Workload) -> list[Case]:
    """Cross-attention with the guided-attention penalty."""
    tokens, frames, sigma = workload.token_layout, workload.frame_layout, 0.2
    q, _, v, upstream = _qkv(workload, tokens, frames)
    k = workload.rows_of(frames, workload.widths.heads, workload.head_width)
    leaves = {"q": q, "k": k, "v": v}
    weight = workload.rows_of(tokens, workload.widths.heads).detach().float()

    def eager() -> Contender:
        paddings = Padding(tokens), Padding(frames)
        i, j = (
            torch.arange(p.mask.shape[1], device=p.mask.device) / p.lengths[:, None]
            for p in paddings
        )
        far = -torch.expm1((i[:, :, None] - j[:, None]).square() / (-2 * sigma**2))
        hidden = ~paddings[1].mask[:, None, None]

        def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            scores = (q @ k.mT).float() * workload.head_width**-0.5
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            return weights.to(v.dtype) @ v, (weights * far[:, None]).sum(-1)

        forms = _padded_heads(tokens, frames) | {"result 1": paddings[0].form(0, 2, 1)}
        return converted(leaves, [upstream, weight], call, forms)

    arguments = {**leaves, "layout_q": tokens, "layout_k": frames, "sigma": sigma}
    grads, peers = [upstream, weight], {"eager padded": eager}
    return [case_of("guided_attention", "", workload.describe(), arguments, grads, peers)]
