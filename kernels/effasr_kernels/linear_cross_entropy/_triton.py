"""`linear_cross_entropy` in Triton, on the shared projection kernels."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.linear_cross_entropy.definition import CrossEntropyArguments
from effasr_kernels.runtime.launch import launch, refusal
from effasr_kernels.shared import projection

_BLOCK_V = 1024


def unsupported_reason(a: CrossEntropyArguments) -> str | None:
    """Return why this backend does not support these arguments, or None if it does."""
    return refusal(a.hidden)


def forward(
    a: CrossEntropyArguments,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the loss of each row, and the log-normalizers to save.

    Targets are not checked, because that would synchronize with the GPU. A target outside [0, V)
    makes the loss of its row NaN, and so the gradients of that row, the weight and the bias.
    """
    normalizer, own, mean = projection.row_statistics(
        *(a.hidden, a.weight, a.bias, a.targets),
        ignore_index=a.ignore_index,
        with_mean=a.label_smoothing != 0,
    )
    assert own is not None
    # Every term is zero for ignored rows.
    expected = own if mean is None else (1 - a.label_smoothing) * own + a.label_smoothing * mean
    loss = normalizer - expected
    if a.z_loss != 0:
        loss = loss.addcmul_(normalizer, normalizer, value=a.z_loss)
    return (loss,), (normalizer,)


def saved_like(a: CrossEntropyArguments) -> tuple[Tensor, ...]:
    """Return an empty tensor for the log-normalizers, float32 (U,)."""
    return (a.hidden.new_empty(a.hidden.shape[0], dtype=torch.float32),)


def backward(
    a: CrossEntropyArguments,
    grads: tuple[Tensor, ...],
    results: tuple[Tensor, ...],
    saved: tuple[Tensor, ...],
) -> dict[str, Tensor | None]:
    r"""Return the gradients of hidden, weight and bias.

    .. math::
        \frac{\partial}{\partial z_{uv}} = g_u \Big( (1 + 2 \zeta L_u) e^{z_{uv} - L_u}
            - (1 - \epsilon) [v = y_u] - \frac\epsilon V \Big)

    In addition to the arguments, peak memory is ``U C b`` bytes for the gradient of hidden,
    ``V C (4 + b)`` for the gradient of weight in float32 and rounded, and ``n V (4 + b)`` for
    n = `projection.chunk_rows` (V) rows of logits and their gradient, where b is the element size
    of ``hidden`` in bytes and V >= C. For float32 the last two are ``4 V C`` and ``4 n V``.
    """
    (upstream,), (normalizer,) = grads, saved
    targets, bias = a.targets.contiguous(), None if a.bias is None else a.bias.contiguous()
    count = a.weight.shape[0]
    peak, uniform = 1.0 - a.label_smoothing, a.label_smoothing / max(1, count)

    def fill(first: int, logits: Tensor, d_logits: Tensor) -> None:
        rows = slice(first, first + logits.shape[0])
        launch(
            _differentiate,
            (logits.shape[0], -(-count // _BLOCK_V)),
            *(logits, d_logits, bias, targets[rows], normalizer[rows], upstream[rows]),
            *(count, logits.stride(0), a.ignore_index, peak, uniform, float(a.z_loss)),
            num_warps=4,
            num_stages=1,
            BLOCK_V=_BLOCK_V,
        )

    d_hidden, d_weight, d_bias = projection.project_backward(
        a.hidden, a.weight, a.bias, targets != a.ignore_index, fill, padded=True
    )
    return {"hidden": d_hidden, "weight": d_weight, "bias": d_bias}


@triton.jit(do_not_specialize=["ignore_index", "peak", "uniform", "z_loss"])
def _differentiate(
    logits,
    d_logits,
    bias,
    targets,
    normalizer,
    upstream,
    count,
    stride,
    ignore_index,
    peak,
    uniform,
    z_loss,
    BLOCK_V: tl.constexpr,
):
    """Write the gradient of the logits of row u in block j of the vocabulary; program (u, j).

    An element depends only on its own logit, so ``d_logits`` may be ``logits``. The smoothed
    target distribution is ``uniform``, plus ``peak`` at the target class. The padding between rows
    is written too: a mask that ends at an arbitrary class would make loads and stores of single
    elements.
    """
    row = tl.program_id(0)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    place = row.to(tl.int64) * stride + v
    target = tl.load(targets + row)
    counted = target != ignore_index
    log_sum = tl.load(normalizer + row)
    scale = tl.load(upstream + row)
    exists = (target >= 0) & (target < count)
    scale = tl.where(exists, scale, float("nan"))
    z = tl.load(logits + place, mask=(v < stride) & counted, other=0.0)
    if bias is not None:
        z += tl.load(bias + v, mask=v < count, other=0.0).to(tl.float32)
    d = tl.exp(z - log_sum) * (1.0 + 2.0 * z_loss * log_sum) - uniform
    d -= tl.where(v == target, peak, 0.0)
    d = tl.where(counted, scale * d, 0.0)
    tl.store(d_logits + place, d.to(d_logits.dtype.element_ty), mask=v < stride)
