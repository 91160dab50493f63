"""`guided_attention` on a CPU by the kernels of ``csrc/``, which compute in float32.

Tensors of float16 and bfloat16 are converted to float32; results and gradients are rounded once.
"""

import torch
from torch import Tensor

from effasr_kernels.guided_attention import GuidedArguments
from effasr_kernels.runtime.dispatch import Gradients, Tensors
from effasr_kernels.shared.cpu import attention as cpu_attention
from effasr_kernels.shared.ragged import widen


def forward(a: GuidedArguments) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    # Saves the softmax statistics and, for float16 and bfloat16, the output before rounding.
    out, softmax, penalty = _call(a).forward()
    assert penalty is not None  # `sigma` is given
    exact = () if out.dtype == a.q.dtype else (out,)
    return (out.to(a.q.dtype), penalty), (softmax, *exact)


def saved_like(a: GuidedArguments) -> tuple[Tensor, ...]:
    softmax = cpu_attention.saved_like(a.q)
    if a.q.dtype == torch.float32:
        return (softmax,)
    return softmax, a.q.new_empty(a.q.shape, dtype=torch.float32)


def backward(a: GuidedArguments, grads: Tensors, results: Tensors, saved: Tensors) -> Gradients:
    softmax, *exact = saved
    (out,) = exact or results[:1]
    grad_out, grad_penalty = grads
    gradients = _call(a).backward(widen(grad_out), grad_penalty, out, softmax, results[1])
    return {name: dx.to(a.q.dtype) for name, dx in zip("qkv", gradients, strict=True)}


def _call(a: GuidedArguments) -> cpu_attention.Call:
    wide = widen(a.q), widen(a.k), widen(a.v)
    arguments = *wide, a.layout_q, a.layout_k, a.scale, a.dropout, a.seed
    return cpu_attention.Call("guided_attention", *arguments, sigma=a.sigma)
