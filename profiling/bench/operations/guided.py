"""Benchmarks of cross-attention with the guided-attention penalty against its formula."""

from __future__ import annotations

import torch
from torch import Tensor

import effasr_kernels as kernels
from bench.contender import Case, Contender, Padding, leaf
from bench.operations.attention import heads
from bench.workload import Workload

_SIGMA = 0.2


def cases(workload: Workload) -> list[Case]:
    """Return the case of guided attention from tokens to frames."""
    tokens, frames = workload.token_layout, workload.frame_layout
    q, upstream = heads(workload, tokens), heads(workload, tokens).detach().roll(1, 0)
    k, v = heads(workload, frames), heads(workload, frames).detach().flip(-2).requires_grad_()
    weight = workload.rows_of(tokens, workload.widths.heads).detach().float()
    upstream[tokens.total :] = 0

    def ours(backend: str) -> Contender:
        return Contender(
            {"q": q, "k": k, "v": v},
            lambda: kernels.guided_attention(
                q, k, v, tokens, frames, sigma=_SIGMA, backend=backend
            ),
            [upstream, weight],
        )

    def eager() -> Contender:
        paddings = Padding(tokens), Padding(frames)
        queries, keys, values = (
            leaf(padding.pad(x).transpose(1, 2))
            for x, padding in zip((q, k, v), (paddings[0], *paddings[1:] * 2), strict=True)
        )
        i, j = (
            torch.arange(p.mask.shape[1], device=p.mask.device) / p.lengths[:, None]
            for p in paddings
        )
        far = -torch.expm1((i[:, :, None] - j[:, None]).square() / (-2 * _SIGMA**2))
        hidden = ~paddings[1].mask[:, None, None]

        def call() -> tuple[Tensor, Tensor]:
            scores = (queries @ keys.mT).float() * workload.head_width**-0.5
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            penalty = (weights * far[:, None]).sum(-1)
            return weights.to(values.dtype) @ values, penalty

        def packed(name: str, x: Tensor) -> Tensor:
            return paddings[name in ("k", "v")].pack(x.transpose(1, 2))

        grads = [paddings[0].pad(x).transpose(1, 2) for x in (upstream, weight)]
        return Contender({"q": queries, "k": keys, "v": values}, call, grads, packed)

    return [Case("guided_attention", "", workload.describe(), ours, {"eager padded": eager})]
