"""Operations of a decoding step, compared with what they replace: padded caches, all logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import effasr_kernels as kernels
from bench.contender import Case, Contender
from bench.workload import Workload

_SEQUENCES, _HYPOTHESES = 32, 5
_PAGE = 64
_GROUP = 2
"""Heads that share keys in Qwen3 of 1.7 billion weights, which has 16 heads of 128 channels."""


def cases(workload: Workload) -> list[Case]:
    """Return a token of each hypothesis: of one, for one sequence and many, and of a beam."""
    frames, tokens = (lengths[:_SEQUENCES] for lengths in workload.lengths)
    return [
        cross(workload, frames[:1], 1, "cross, one sequence"),
        cross(workload, frames, 1, "cross"),
        cross(workload, frames, _HYPOTHESES, "cross, beam"),
        itself(workload, tokens),
        itself(workload, [f + t for f, t in zip(frames, tokens, strict=True)], _GROUP),
        append(workload, tokens),
        top_k(workload, len(frames), 1, ""),
        top_k(workload, len(frames) * _HYPOTHESES, 2 * _HYPOTHESES, "beam"),
    ]


class Cache:
    """Keys and values of some sequences, padded and in pages."""

    def __init__(self, workload: Workload, lengths: list[int]):
        """Draw keys and values; pages are in random order.

        Attributes:
            padded: Padded keys and values, (S, H, longest, D) each, zero past the end.
            pages: Paged keys and values, (P, B, H, D) each.
            table: (S, M).
            lengths: (S,).
            mask: (S, 1, 1, longest): where there is a key.
            moved: Bytes of the keys and values that there are.
        """
        device, heads, width = workload.device, workload.widths.heads, workload.head_width
        columns = -(-max(lengths) // _PAGE)
        count = len(lengths) * columns
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(device)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.table = order.view(len(lengths), columns).int()
        self.pages, self.padded = [], []
        for seed in (1, 2):
            pages = workload.draw(count, _PAGE, heads, width).detach().roll(seed, -1)
            rows = pages[order].view(len(lengths), columns * _PAGE, heads, width)
            self.pages.append(pages)
            self.padded.append(rows[:, : max(lengths)].transpose(1, 2).contiguous())
        j = torch.arange(max(lengths), device=device)
        self.mask = (j < self.lengths[:, None])[:, None, None]
        self.moved = 2 * sum(lengths) * heads * width * self.pages[0].element_size()


def _of_results(call: Callable[[], Tensor], leaves: dict[str, Tensor], moved: int) -> Contender:
    return Contender(leaves, call, (), moved=moved)


def cross(workload: Workload, lengths: list[int], hypotheses: int, kind: str) -> Case:
    """Return the hypotheses of each sequence attend to its encoded speech."""
    cache, heads, width = Cache(workload, lengths), workload.widths.heads, workload.head_width
    q = workload.draw(len(lengths) * hypotheses, heads, width).detach()
    moved = cache.moved + 2 * q.numel() * q.element_size()
    wide = q.view(len(lengths), hypotheses, heads, width).transpose(1, 2).contiguous()

    def ours(backend: str) -> Contender:
        return _of_results(
            lambda: kernels.decode_attention(
                q, *cache.pages, cache.table, cache.lengths, backend=backend
            ),
            {"q": q},
            moved,
        )

    def padded() -> Contender:
        call = lambda: F.scaled_dot_product_attention(wide, *cache.padded, attn_mask=cache.mask)
        packed = lambda name, x: x.transpose(1, 2).reshape(q.shape)
        return Contender({"q": wide}, call, (), packed, moved=moved)

    shape = f"S={len(lengths)} N={len(q)} keys={sum(lengths)} longest={max(lengths)}"
    shape += f" H={heads} D={width} B={_PAGE}"
    return Case("decode_attention", kind, shape, ours, {"torch SDPA padded": padded})


def itself(workload: Workload, lengths: list[int], group: int = 1) -> Case:
    """Return the newest token of each sequence enters the cache, and attends to all so far.

    Args:
        workload: Widths and device.
        lengths: Keys of each sequence, the newest included.
        group: Heads that share keys, more than 1 in a language model.
    """
    cache, heads, width = Cache(workload, lengths), workload.widths.heads, workload.head_width
    q = workload.draw(len(lengths), group * heads, width).detach()
    new_k, new_v = (workload.draw(len(lengths), heads, width).detach().roll(i, -1) for i in (1, 2))
    moved = cache.moved + (2 * q.numel() + 2 * new_k.numel()) * q.element_size()
    leaves = {"q": q, "new_k": new_k, "new_v": new_v}

    def ours(backend: str) -> Contender:
        return _of_results(
            lambda: kernels.decode_attention(
                *(q, *cache.pages, cache.table, cache.lengths),
                new_k=new_k,
                new_v=new_v,
                backend=backend,
            ),
            leaves,
            moved,
        )

    def padded() -> Contender:
        s = torch.arange(len(lengths), device=q.device)
        last = cache.lengths.long() - 1
        options = {"attn_mask": cache.mask, **({"enable_gqa": True} if group > 1 else {})}

        def call() -> Tensor:
            for x, new in zip(cache.padded, (new_k, new_v), strict=True):
                x[s, :, last] = new
            wide = q[:, :, None]
            return F.scaled_dot_product_attention(wide, *cache.padded, **options)[:, :, 0]

        return _of_results(call, leaves, moved)

    shape = f"S=N={len(lengths)} keys={sum(lengths)} longest={max(lengths)} H={group * heads}"
    shape += f" Hk={heads}" if group > 1 else ""
    shape += f" D={width} B={_PAGE}"
    kind = "self, grouped" if group > 1 else "self"
    return Case("decode_attention", kind, shape, ours, {"torch SDPA padded": padded})


def append(workload: Workload, lengths: list[int]) -> Case:
    """Return keys and values of all tokens of some prompts enter the cache."""
    cache, heads, width = Cache(workload, lengths), workload.widths.heads, workload.head_width
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths]).int().to(workload.device)
    table = cache.table[sequence.to(workload.device)]
    k, v = (workload.draw(sum(lengths), heads, width).detach().roll(i, -1) for i in (1, 2))
    leaves = {"k": k, "v": v}
    moved = 4 * k.numel() * k.element_size()

    def ours(backend: str) -> Contender:
        def call() -> Tensor:
            kernels.append_to_pages(k, v, *cache.pages, table, positions, backend=backend)
            return cache.pages[1]

        return _of_results(call, leaves, moved)

    def index_put() -> Contender:
        pages = [torch.empty_like(x).copy_(x) for x in cache.pages]
        place = table.gather(1, (positions // _PAGE).long()[:, None])[:, 0].long()
        row = (positions % _PAGE).long()

        def call() -> Tensor:
            for x, new in zip(pages, (k, v), strict=True):
                x[place, row] = new
            return pages[1]

        return _of_results(call, leaves, moved)

    shape = f"N={sum(lengths)} H={heads} D={width} B={_PAGE}"
    return Case("append_to_pages", "", shape, ours, {"torch index_put": index_put})


def top_k(workload: Workload, rows: int, k: int, kind: str) -> Case:
    """Return next tokens and probabilities; only the latter are compared, as classes may tie."""
    classes, width = workload.widths.vocabulary, workload.width
    hidden = workload.draw(rows, width).detach()
    weight = workload.draw(classes, width, scale=width**-0.5).detach()
    k = min(k, classes)
    leaves = {"hidden": hidden, "weight": weight}
    moved = sum(x.numel() * x.element_size() for x in leaves.values()) + 12 * rows * k

    def ours(backend: str) -> Contender:
        call = lambda: kernels.projected_top_k(hidden, weight, k=k, backend=backend)[0]
        return _of_results(call, leaves, moved)

    def eager() -> Contender:
        call = lambda: F.linear(hidden, weight).float().log_softmax(-1).topk(k)[0]
        return _of_results(call, leaves, moved)

    shape = f"N={rows} C={width} V={classes} k={k}"
    return Case("projected_top_k", kind, shape, ours, {"torch eager": eager})
