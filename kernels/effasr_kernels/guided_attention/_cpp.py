"""`guided_attention` on a CPU, in float32, by the kernels of ``csrc/``."""

from __future__ import annotations

from torch import Tensor

from effasr_kernels.guided_attention.definition import GuidedArguments
from effasr_kernels.shared import cpu_attention


def unsupported_reason(a: GuidedArguments) -> str | None:
    """The reason why this backend does not support these arguments, or None."""
    return cpu_attention.refusal(a.q)


def forward(a: GuidedArguments) -> tuple[tuple[Tensor, Tensor], tuple[Tensor]]:
    """See `effasr_kernels.guided_attention.guided_attention`."""
    out, softmax, penalty = _call(a).forward()
    assert penalty is not None  # `sigma` is given
    return (out, penalty), (softmax,)


def saved_like(a: GuidedArguments) -> tuple[Tensor]:
    """Empty tensors with the shapes and dtypes of what `forward` saves."""
    return (cpu_attention.saved_like(a.q),)


def backward(
    a: GuidedArguments,
    grads: tuple[Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    saved: tuple[Tensor],
) -> dict[str, Tensor | None]:
    """Compute the gradients of queries, keys and values, zero in the tail."""
    gradients = _call(a).backward(*grads, results[0], saved[0], results[1])
    return dict(zip(("q", "k", "v"), gradients, strict=True))


def _call(a: GuidedArguments) -> cpu_attention.Call:
    arguments = a.q, a.k, a.v, a.layout_q, a.layout_k, a.scale, a.dropout, a.seed
    return cpu_attention.Call("guided_attention", *arguments, sigma=a.sigma)
