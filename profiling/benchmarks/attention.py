"""Cases of attention at real lengths, with their peers."""

import importlib
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import effasr_kernels as kernels
from benchmarks.contender import Case, Form, Padding, Peer, case_of, without_tail
from benchmarks.workload import Workload
from effasr_kernels import PackedLayout

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
    causal, turned = kind == "causal", kind == "rotary"
    arguments = {"q": q, "k": k, "v": v, "layout_q": layout_q, "layout_k": layout_k}
    arguments |= {"causal": causal, "position": kernels.Rotary() if turned else None}
    # Peers get sequences without a tail and without empty ones, as their callers make them.
    exact = [
        PackedLayout.from_lengths([n for n in layout.lengths if n], layout.device)
        for layout in (layout_q, layout_k)
    ]
    tail_q, tail_k = without_tail(layout_q), without_tail(layout_k)
    packed = {"q": tail_q, "k": tail_k, "v": tail_k, "result 0": tail_q}

    def turn(q: Tensor, k: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        return (_rotate(q, places), _rotate(k, places)) if turned else (q, k)

    def varlen() -> Any:
        """Torch's own, which sums gradients of queries in any order."""
        from torch.nn.attention.varlen import varlen_attn

        # torch 2.10 has a flag in the place of a window.
        options: dict[str, Any] = {"is_causal": causal}
        if "window_size" in inspect.signature(varlen_attn).parameters:
            options = {"window_size": (-1, 0) if causal else (-1, -1)}
        sizes = (*(x.cu_seqlens for x in exact), *(x.max_seqlen for x in exact))
        places = exact[0].positions()[:, None]
        return lambda q, k, v: varlen_attn(*turn(q, k, places), v, *sizes, **options), packed

    def flash(module: str) -> Any:
        function = importlib.import_module(module).flash_attn_varlen_func
        sides = list(zip("qk", exact, strict=True))
        sizes = {f"cu_seqlens_{side}": layout.cu_seqlens for side, layout in sides}
        sizes |= {f"max_seqlen_{side}": layout.max_seqlen for side, layout in sides}

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            result = function(q=q, k=k, v=v, causal=causal, **sizes)
            return result[0] if isinstance(result, tuple) else result

        return call, packed

    def sdpa() -> Any:
        # With a causal mask it needs no padding mask.
        mask = Padding(layout_k).mask[:, None, None]
        options = {"is_causal": True} if causal else {"attn_mask": mask}

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = turn(q, k, torch.arange(q.shape[2], device=q.device))
            return F.scaled_dot_product_attention(q, k, v, **options)

        return call, _padded_heads(layout_q, layout_k)

    def flex() -> Any:
        """With a mask of documents, which is made outside of what is timed."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        total, documents, device = exact[0].total, exact[0].sequence_ids(), q.device
        same = lambda b, h, i, j: documents[i] == documents[j]
        options = {"device": device, "_compile": q.is_cuda}
        mask = create_block_mask(same, None, None, total, total, **options)
        # Uncompiled it stores all scores; that is for tests alone.
        attend = torch.compile(flex_attention, dynamic=False) if q.is_cuda else flex_attention
        there, back = tail_q
        form = lambda x: there(x).transpose(0, 1)[None], lambda x: back(x[0].transpose(0, 1))
        return lambda q, k, v: attend(q, k, v, block_mask=mask), dict.fromkeys(packed, form)

    peers: dict[str, Peer] = {"torch varlen_attn": varlen, "torch sdpa padded": sdpa}
    if not turned:
        peers |= {name: lambda module=module: flash(module) for name, module in _FLASH.items()}
    if kind == "":
        peers["torch flex_attention"] = flex
    return case_of("attention", kind, workload.describe(), arguments, [upstream], peers)


def _padded_heads(layout_q: PackedLayout, layout_k: PackedLayout) -> dict[str, Form]:
    """Return padded queries, keys, values and results, (B, H, T, D)."""
    queries, keys = (Padding(layout).form(0, 2, 1, 3) for layout in (layout_q, layout_k))
    return {"q": queries, "k": keys, "v": keys, "result 0": queries}


def _rotate(x: Tensor, places: Tensor) -> Tensor:
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
    leaves = {"q": q, "k": k, "v": v, "content": content, "position": position, "table": table}
    # Peers get as many rows as the batch needs, from the largest distance to the smallest.
    window = slice(reach - longest, reach + longest - 1)

    def whole(x: Tensor) -> Tensor:
        rows = x.new_zeros(table.shape)
        rows[window] = x.flip(0)
        return rows

    def peer(fused: bool) -> Any:
        # NeMo's RelPositionMultiHeadAttention with `use_pytorch_sdpa`, or Hugging Face's eager
        # ParakeetEncoderAttention, both without their projections.
        mask, scale = Padding(layout).mask[:, None, None], workload.head_width**-0.5
        lowest = float("-inf") if fused else torch.finfo(q.dtype).min

        def call(q: Tensor, k: Tensor, v: Tensor, *biases: Tensor) -> Tensor:
            content, position, table = biases
            bias = (_by_position(q + position[:, None], table) * scale).masked_fill(~mask, lowest)
            q = q + content[:, None]
            if fused:
                return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)
            scores = q @ k.mT * scale + bias
            return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v

        rows = {"table": (lambda x: x[window].flip(0), whole)}
        return call, _padded_heads(layout, layout) | rows

    biases = kernels.RelativeBias(content, position, table)
    arguments = {"q": q, "k": k, "v": v, "layout_q": layout, "position": biases}
    names = {"NeMo (sdpa with bias)": True, "Hugging Face Parakeet": False}
    peers = {name: lambda fused=fused: peer(fused) for name, fused in names.items()}
    text = workload.describe()
    return case_of("attention", "relative", text, arguments, [upstream], peers, leaves=leaves)


def _by_position(q: Tensor, table: Tensor) -> Tensor:
    """Return scores by distance, turned into columns of keys: (B, H, T, T)."""
    scores = q @ table.permute(1, 2, 0)
    batch, heads, rows, columns = scores.shape
    shifted = F.pad(scores, (1, 0)).view(batch, heads, columns + 1, rows)[:, :, 1:]
    return shifted.reshape(batch, heads, rows, columns)[..., :rows]


def guided(workload: Workload) -> list[Case]:
    tokens, frames, sigma = workload.token_layout, workload.frame_layout, 0.2
    q, _, v, upstream = _qkv(workload, tokens, frames)
    k = workload.rows_of(frames, workload.widths.heads, workload.head_width)
    weight = workload.rows_of(tokens, workload.widths.heads).detach().float()

    def eager() -> Any:
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

        return call, _padded_heads(tokens, frames) | {"result 1": paddings[0].form(0, 2, 1)}

    arguments = {"q": q, "k": k, "v": v, "layout_q": tokens, "layout_k": frames, "sigma": sigma}
    grads, peers = [upstream, weight], {"eager padded": eager}
    return [case_of("guided_attention", "", workload.describe(), arguments, grads, peers)]
