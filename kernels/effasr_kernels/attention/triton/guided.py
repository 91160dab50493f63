"""`guided_attention` in Triton: the kernels of `attention`, with their constant ``GUIDED``."""

from typing import Any

from torch import Tensor

from effasr_kernels.attention import AttentionArguments
from effasr_kernels.attention.triton import backend
from effasr_kernels.attention.triton.config import WIDEST
from effasr_kernels.runtime.dispatch import Gradients, Tensors

# The arguments of `guided_attention`; attention does not import that package.
GuidedArguments = Any


def unsupported_reason(a: GuidedArguments) -> str | None:
    if a.q.shape[-1] > WIDEST:
        return f"supports head widths up to {WIDEST}, not {a.q.shape[-1]}"
    return None


def forward(a: GuidedArguments) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Compute output and penalty; save each row's log-sum-exp to base 2, float32 (H, U)."""
    return backend.forward(_plain(a), 0.5 / a.sigma**2)


def saved_like(a: GuidedArguments) -> tuple[Tensor, ...]:
    return backend.saved_like(_plain(a))


def backward(a: GuidedArguments, grads: Tensors, results: Tensors, saved: Tensors) -> Gradients:
    return backend.backward(_plain(a), grads, results, saved, 0.5 / a.sigma**2)


def _plain(a: GuidedArguments) -> AttentionArguments:
    tensors = a.q, a.k, a.v, a.layout_q, a.layout_k
    return AttentionArguments(*tensors, False, a.scale, None, None, None, None, a.dropout, a.seed)
