"""Benchmarks of self-attention and cross-attention against other implementations."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import effasr_kernels as kernels
from bench.contender import Case, Contender, Padding, leaf
from bench.workload import Workload
from effasr_kernels import PackedLayout, Rotary

_FLASH = {
    "flash_attn_2": "flash_attn",
    "flash_attn_3": "flash_attn_interface",
    "flash_attn_4": "flash_attn.cute",
}


def cases(workload: Workload) -> list[Case]:
    """Self-attention of the encoder and the decoder, and cross-attention."""
    frames, tokens = workload.frame_layout, workload.token_layout
    return [
        _case(workload, "", frames, frames),
        _case(workload, "rotary", frames, frames),
        _case(workload, "causal", tokens, tokens),
        _case(workload, "cross", tokens, frames),
    ]


def heads(workload: Workload, layout: PackedLayout) -> Tensor:
    """Return a leaf (rows, H, D)."""
    return workload.rows_of(layout, workload.widths.heads, workload.head_width)


def _case(workload: Workload, kind: str, layout_q: PackedLayout, layout_k: PackedLayout) -> Case:
    q, upstream = heads(workload, layout_q), heads(workload, layout_q).detach().roll(1, 0)
    upstream[layout_q.total :] = 0
    k = heads(workload, layout_k).detach().flip(-1).requires_grad_()
    v = heads(workload, layout_k).detach().flip(-2).requires_grad_()
    causal = kind == "causal"
    leaves = {"q": q, "k": k, "v": v}

    def ours(backend: str) -> Contender:
        position = Rotary() if kind == "rotary" else None
        return Contender(
            leaves,
            lambda: kernels.attention(
                q, k, v, layout_q, layout_k, causal=causal, position=position, backend=backend
            ),
            [upstream],
        )

    inputs = (q, k, v, upstream)
    layouts = (layout_q, layout_k)
    turn = rotate if kind == "rotary" else None
    peers: dict[str, Callable[[], Contender]] = {
        "torch varlen_attn": lambda: _varlen(inputs, layouts, causal, turn),
        "torch sdpa padded": lambda: padded_sdpa(inputs, layouts, causal, turn),
    }
    if turn is None:
        for name, module in _FLASH.items():
            peers[name] = lambda module=module: _flash(module, inputs, layouts, causal)
    if kind == "":
        peers["torch flex_attention"] = lambda: _flex(inputs, layout_q)
    return Case("attention", kind, workload.describe(), ours, peers)


def _without_tail(layout: PackedLayout) -> PackedLayout:
    """Return the sequences alone, as callers of these packages make them."""
    lengths = [length for length in layout.lengths if length]
    return PackedLayout.from_lengths(lengths, layout.device)


def _packed(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    layouts: tuple[PackedLayout, PackedLayout],
    attend: Callable[[Tensor, Tensor, Tensor, PackedLayout, PackedLayout], Tensor],
) -> Contender:
    """Return a contender on packed rows, without a tail and without empty sequences."""
    q, k, v, upstream = inputs
    layout_q, layout_k = map(_without_tail, layouts)
    q, k, v = (
        leaf(x[: layout.total]) for x, layout in ((q, layout_q), (k, layout_k), (v, layout_k))
    )
    rows = {"result 0": layouts[0].rows, "q": layouts[0].rows}
    return Contender(
        {"q": q, "k": k, "v": v},
        lambda: attend(q, k, v, layout_q, layout_k),
        [upstream[: layout_q.total]],
        lambda name, x: _with_tail(x, rows.get(name, layouts[1].rows)),
    )


def _with_tail(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x, x.new_zeros(rows - x.shape[0], *x.shape[1:])])


def rotate(x: Tensor, places: Tensor) -> Tensor:
    """Rotary positions as models compute them before attention: (..., D) at ``places`` (...)."""
    half = x.shape[-1] // 2
    wavelengths = 10000.0 ** (torch.arange(half, device=x.device) / -half)
    angles = places[..., None] * wavelengths
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().split(half, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def _varlen(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    layouts: tuple[PackedLayout, PackedLayout],
    causal: bool,
    turn: Callable[[Tensor, Tensor], Tensor] | None,
) -> Contender:
    """Return torch's variable-length attention; query gradients are summed in any order."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.10 has a flag in the place of a window.
    options: dict[str, Any] = {"is_causal": causal}
    if "window_size" in inspect.signature(varlen_attn).parameters:
        options = {"window_size": (-1, 0) if causal else (-1, -1)}
    places = _without_tail(layouts[0]).positions()[:, None]

    def attend(q: Tensor, k: Tensor, v: Tensor, a: PackedLayout, b: PackedLayout) -> Tensor:
        if turn is not None:
            q, k = turn(q, places), turn(k, places)
        y = varlen_attn(
            q,
            k,
            v,
            a.cu_seqlens,
            b.cu_seqlens,
            a.max_seqlen,
            b.max_seqlen,
            **options,
        )
        assert isinstance(y, Tensor)
        return y

    return _packed(inputs, layouts, attend)


def _flash(
    module: str,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    layouts: tuple[PackedLayout, PackedLayout],
    causal: bool,
) -> Contender:
    """Return a FlashAttention package, as it comes."""
    function = importlib.import_module(module).flash_attn_varlen_func

    def attend(q: Tensor, k: Tensor, v: Tensor, a: PackedLayout, b: PackedLayout) -> Tensor:
        y = function(
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=a.cu_seqlens,
            cu_seqlens_k=b.cu_seqlens,
            max_seqlen_q=a.max_seqlen,
            max_seqlen_k=b.max_seqlen,
            causal=causal,
        )
        return y[0] if isinstance(y, tuple) else y

    return _packed(inputs, layouts, attend)


def padded(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    layouts: tuple[PackedLayout, PackedLayout],
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
) -> Contender:
    """Return a contender on a padded batch (B, H, T, D); ``attend`` gets q, k, v, mask (B, T)."""
    paddings = [Padding(layout) for layout in layouts]
    q, k, v, upstream = (
        leaf(padding.pad(x).transpose(1, 2))
        for x, padding in zip(inputs, [*paddings, paddings[1], paddings[0]], strict=True)
    )

    def packed(name: str, x: Tensor) -> Tensor:
        padding = paddings[0] if name in ("result 0", "q") else paddings[1]
        return padding.pack(x.transpose(1, 2))

    mask = paddings[1].mask
    return Contender(
        {"q": q, "k": k, "v": v}, lambda: attend(q, k, v, mask), [upstream.detach()], packed
    )


def padded_sdpa(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    layouts: tuple[PackedLayout, PackedLayout],
    causal: bool,
    turn: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Contender:
    """Return `scaled_dot_product_attention`; with a causal mask it needs no padding mask."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        if turn is not None:
            places = torch.arange(q.shape[2], device=q.device)
            q, k = turn(q, places), turn(k, places)
        if causal:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])

    return padded(inputs, layouts, attend)


def _flex(inputs: tuple[Tensor, Tensor, Tensor, Tensor], layout: PackedLayout) -> Contender:
    """FlexAttention with a mask of documents; the mask is made outside of what is timed."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    exact = _without_tail(layout)
    total = exact.total
    documents = exact.sequence_ids()

    def same(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return documents[i] == documents[j]

    gpu = layout.device.type == "cuda"
    mask = create_block_mask(same, None, None, total, total, device=layout.device, _compile=gpu)
    # Uncompiled it stores all scores; that is for tests alone.
    attend = torch.compile(flex_attention, dynamic=False) if gpu else flex_attention
    q, k, v, upstream = (leaf(x[:total].transpose(0, 1)[None]) for x in inputs)
    return Contender(
        {"q": q, "k": k, "v": v},
        lambda: attend(q, k, v, block_mask=mask),  # type: ignore[arg-type, return-value]
        [upstream.detach()],
        lambda name, x: _with_tail(x[0].transpose(0, 1), layout.rows),
    )
