"""`attention` with `torch.nn.attention.varlen.varlen_attn`, torch's build of FlashAttention 2.

Its backward is deterministic only under `torch.use_deterministic_algorithms`. Therefore the
backward here calls the underlying operation with that setting enabled for the call.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from effasr_kernels.attention import AttentionArguments
from effasr_kernels.attention.backends import packages
from effasr_kernels.runtime.dispatch import Gradients, Tensors

_FUNCTION = (
    "torch.nn.attention.varlen",
    "varlen_attn",
    "'torch>=2.11'",
    # Up to torch 2.10 it had `is_causal` and no `scale`.
    ("query", "key", "value", "cu_seq_q", "max_q", "return_aux", "scale", "window_size"),
)
_CAUSAL, _FULL = (-1, 0), (-1, -1)
_WIDEST_ON_SMALL_GPUS = 192


def unsupported_reason(a: AttentionArguments) -> str | None:
    function = packages.find(*_FUNCTION)
    if isinstance(function, str):
        return function
    reason = packages.refusal(a)
    if reason is not None:
        return reason
    if not _built_in():
        return "torch was built without FlashAttention"
    # Whether `varlen_attn` now calls another version, with other properties.
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    if current is not None and current() not in (None, "FA2"):
        return "torch.nn.attention.activate_flash_attention_impl has replaced FlashAttention 2"
    if a.group > 1:
        return "computes as many heads of keys as of queries"
    width = a.q.shape[-1]
    if width > _WIDEST_ON_SMALL_GPUS and packages.capability(a.q.device) in ((8, 6), (8, 9)):
        return f"supports head widths up to {_WIDEST_ON_SMALL_GPUS} on this GPU, not {width}"
    return None


def forward(a: AttentionArguments) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Compute the output; save the log-sum-exp of each query's scores, float32 (H, T_q)."""
    q, layout_q, layout_k = a.q, a.layout_q, a.layout_k
    if not (layout_q.max_seqlen_bound and layout_k.max_seqlen_bound):
        return (q.new_zeros(q.shape),), (q.new_zeros(q.shape[1::-1], dtype=torch.float32),)
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    y, log_sums = varlen_attn(
        _rows(q),
        _rows(a.k),
        _rows(a.v),
        layout_q.cu_seqlens,
        layout_k.cu_seqlens,
        layout_q.max_seqlen_bound,
        layout_k.max_seqlen_bound,
        return_aux=AuxRequest(lse=True),
        scale=a.scale,
        window_size=_CAUSAL if a.causal else _FULL,
    )
    return (y.masked_fill_(packages.outside(layout_q, layout_k), 0),), (log_sums,)


def saved_like(a: AttentionArguments) -> tuple[Tensor, ...]:
    return (a.q.new_empty(a.q.shape[1::-1], dtype=torch.float32),)


def backward(a: AttentionArguments, grads: Tensors, results: Tensors, saved: Tensors) -> Gradients:
    q, k, v, layout_q, layout_k = a.q, a.k, a.v, a.layout_q, a.layout_k
    if not (layout_q.max_seqlen_bound and layout_k.max_seqlen_bound):
        return {"q": torch.zeros_like(q), "k": torch.zeros_like(k), "v": torch.zeros_like(v)}
    window = _CAUSAL if a.causal else _FULL
    with _deterministic():
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grads[0],
            _rows(q),
            _rows(a.k),
            _rows(a.v),
            results[0],
            saved[0],
            layout_q.cu_seqlens,
            layout_k.cu_seqlens,
            layout_q.max_seqlen_bound,
            layout_k.max_seqlen_bound,
            0.0,
            a.causal,
            # State and offset of the dropout, which is 0.
            torch.zeros(2, dtype=torch.uint64, device=q.device),
            torch.empty(0, device=q.device),
            scale=a.scale,
            window_size_left=window[0],
            window_size_right=window[1],
        )
    outside_k = packages.outside(layout_k, layout_q)
    return {
        "q": dq.masked_fill_(packages.outside(layout_q, layout_k), 0),
        "k": dk.masked_fill_(outside_k, 0),
        "v": dv.masked_fill_(outside_k, 0),
    }


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _built_in() -> bool:
    return torch.backends.cuda.is_flash_attention_available()


@contextmanager
def _deterministic() -> Iterator[None]:
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Deterministic mode would otherwise fill every new tensor, to detect uninitialised reads.
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
