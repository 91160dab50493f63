"""`linear_cross_entropy` in Triton, on the shared projection kernels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels.linear_cross_entropy import CrossEntropyArguments
from effasr_kernels.runtime.dispatch import Gradients, Tensors
from effasr_kernels.runtime.launch import ceil_div, launch
from effasr_kernels.shared import projection

_BLOCK_V = 1024


def forward(a: CrossEntropyArguments) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the loss of each row, and the log-normalizers or the gradients to save."""
    # Targets are not checked, because that would synchronize with the GPU. A target outside [0, V)
    # makes the loss of its row NaN, and so the gradients of that row, the weight and the bias.
    if a.uniform_gradient:
        return _with_gradients(a)
    normalizer, target_logit, mean = projection.row_statistics(
        *(a.hidden, a.weight, a.bias, a.targets),
        ignore_index=a.ignore_index,
        with_mean=a.label_smoothing != 0,
    )
    assert target_logit is not None
    # Every term is zero for ignored rows.
    expected = (
        target_logit
        if mean is None
        else (1 - a.label_smoothing) * target_logit + a.label_smoothing * mean
    )
    loss = normalizer - expected
    if a.z_loss != 0:
        loss = loss.addcmul_(normalizer, normalizer, value=a.z_loss)
    return (loss,), (normalizer,)


def saved_like(a: CrossEntropyArguments) -> tuple[Tensor, ...]:
    # The log-normalizers, (U,); with ``uniform_gradient`` the gradients of hidden, weight
    # and bias for an upstream gradient of 1, in the shapes of these; of hidden alone if ``frozen``.
    if a.uniform_gradient:
        parts = (a.hidden,) if a.frozen else (a.hidden, a.weight, a.bias)
        return tuple(x.new_empty(x.shape, dtype=torch.float32) for x in parts if x is not None)
    return (a.hidden.new_empty(a.hidden.shape[0], dtype=torch.float32),)


def backward(
    a: CrossEntropyArguments, grads: Tensors, results: Tensors, saved: Tensors
) -> Gradients:
    if a.uniform_gradient:
        return _scaled(a, grads[0], saved)
    (upstream,), (normalizer,) = grads, saved
    targets, bias = a.targets.contiguous(), None if a.bias is None else a.bias.contiguous()
    count = a.weight.shape[0]
    target_weight, class_weight = 1.0 - a.label_smoothing, a.label_smoothing / max(1, count)

    def write_grad_logits(first: int, logits: Tensor, d_logits: Tensor) -> None:
        rows = slice(first, first + logits.shape[0])
        launch(
            _grad_logits_kernel,
            (logits.shape[0], ceil_div(count, _BLOCK_V)),
            *(logits, d_logits, bias, targets[rows], normalizer[rows], upstream[rows]),
            *(
                count,
                logits.stride(0),
                a.ignore_index,
                target_weight,
                class_weight,
                float(a.z_loss),
            ),
            num_warps=4,
            num_stages=1,
            BLOCK_V=_BLOCK_V,
        )

    d_hidden, d_weight, d_bias = projection.project_backward(
        *(a.hidden, a.weight, a.bias, targets != a.ignore_index, write_grad_logits),
        padded=True,
        frozen=a.frozen,
    )
    return {"hidden": d_hidden, "weight": d_weight, "bias": d_bias}


def _with_gradients(a: CrossEntropyArguments) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the losses, and the gradients of their sum in float32; logits are computed once."""
    targets, bias = a.targets.contiguous(), None if a.bias is None else a.bias.contiguous()
    count = a.weight.shape[0]
    losses = a.hidden.new_empty(a.hidden.shape[0], dtype=torch.float32)
    mean = a.label_smoothing / max(1, count)

    def write_grad_logits(first: int, logits: Tensor, d_logits: Tensor) -> None:
        rows = slice(first, first + logits.shape[0])
        launch(
            _loss_and_grad_kernel,
            (logits.shape[0],),
            *(logits, d_logits, bias, targets[rows], losses[rows]),
            *(count, logits.stride(0), a.ignore_index, 1.0 - a.label_smoothing, mean),
            float(a.z_loss),
            num_warps=4,
            num_stages=1,
            SMOOTHED=a.label_smoothing != 0,
            BLOCK_V=_BLOCK_V,
        )

    gradients = projection.project_backward(
        *(a.hidden, a.weight, a.bias, targets != a.ignore_index, write_grad_logits),
        padded=True,
        rounded=False,
        frozen=a.frozen,
    )
    return (losses,), tuple(x for x in gradients if x is not None)


def _scaled(a: CrossEntropyArguments, upstream: Tensor, saved: Tensors) -> dict[str, Tensor | None]:
    """Return the saved gradients, scaled by the one upstream gradient and rounded once."""
    scale = upstream.new_empty(())
    launch(
        _upstream_scale_kernel,
        (1,),
        *(upstream, a.targets.contiguous(), scale, upstream.shape[0], a.ignore_index),
        num_warps=4,
        num_stages=1,
        BLOCK=_BLOCK_V,
    )
    named = zip(("hidden", "weight", "bias"), saved, strict=False)
    gradients: dict[str, Tensor | None] = {"weight": None, "bias": None}
    for name, gradient in named:
        out = gradient.new_empty(gradient.shape, dtype=getattr(a, name).dtype)
        gradients[name] = torch.mul(gradient, scale, out=out)
    return gradients


@triton.jit(do_not_specialize=["count", "ignore_index", "target_weight", "class_weight", "z_loss"])
def _loss_and_grad_kernel(
    logits,
    d_logits,
    bias,
    targets,
    losses,
    count,
    stride,
    ignore_index,
    target_weight,
    class_weight,
    z_loss,
    SMOOTHED: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write the loss of row u and the gradient of its logits; program u."""
    # The row is read twice, the second time from a cache: for the normalizer, with a running
    # maximum in each lane, and for the gradient. ``d_logits`` may be ``logits``: everything that
    # depends on several logits is reduced before the first store. Otherwise as
    # `_grad_logits_kernel`.
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK_V)
    first = row.to(tl.int64) * stride
    target = tl.load(targets + row)
    counted = target != ignore_index
    exists = (target >= 0) & (target < count)
    largest = tl.full((BLOCK_V,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_V,), tl.float32)
    target_logit = tl.zeros((BLOCK_V,), tl.float32)
    logit_sum = tl.zeros((BLOCK_V,), tl.float32)
    for begin in range(0, count, BLOCK_V):
        v = begin + lanes
        z = tl.load(logits + first + v, mask=v < stride, other=0.0)
        if bias is not None:
            z += tl.load(bias + v, mask=v < count, other=0.0).to(tl.float32)
        z = tl.where(v < count, z, float("-inf"))
        larger = tl.maximum(largest, z)
        pivot = tl.where(larger == float("-inf"), 0.0, larger)
        mass = mass * tl.exp(largest - pivot) + tl.exp(z - pivot)
        largest = larger
        target_logit += tl.where(v == target, z, 0.0)
        if SMOOTHED:
            logit_sum += tl.where(v < count, z, 0.0)
    top = tl.max(largest, axis=0)
    pivot = tl.where(top == float("-inf"), 0.0, top)
    log_sum = pivot + tl.log(tl.sum(mass * tl.exp(largest - pivot), axis=0))
    loss = log_sum - target_weight * tl.sum(target_logit, axis=0) + z_loss * log_sum * log_sum
    if SMOOTHED:
        loss -= class_weight * tl.sum(logit_sum, axis=0)
    loss = tl.where(exists, loss, float("nan"))
    tl.store(losses + row, tl.where(counted, loss, 0.0))

    factor = 1.0 + 2.0 * z_loss * log_sum
    for begin in range(0, count, BLOCK_V):
        v = begin + lanes
        z = tl.load(logits + first + v, mask=(v < stride) & counted, other=0.0)
        if bias is not None:
            z += tl.load(bias + v, mask=v < count, other=0.0).to(tl.float32)
        d = tl.exp(z - log_sum) * factor - class_weight
        d -= tl.where(v == target, target_weight, 0.0)
        d = tl.where(exists, d, float("nan"))
        d = tl.where(counted, d, 0.0)
        tl.store(d_logits + first + v, d.to(d_logits.dtype.element_ty), mask=v < stride)


@triton.jit(do_not_specialize=["rows", "ignore_index"])
def _upstream_scale_kernel(upstream, targets, scale, rows, ignore_index, BLOCK: tl.constexpr):
    """Write the upstream gradient of the rows that count: NaN if they differ, 0 if none counts."""
    lanes = tl.arange(0, BLOCK)
    smallest = tl.full((BLOCK,), float("inf"), tl.float32)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    has_nan = tl.zeros((BLOCK,), tl.int32)
    has_row = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, rows, BLOCK):
        row = begin + lanes
        counted = tl.load(targets + row, mask=row < rows, other=ignore_index) != ignore_index
        counted = counted & (row < rows)
        g = tl.load(upstream + row, mask=counted, other=0.0).to(tl.float32)
        smallest = tl.where(counted & (g < smallest), g, smallest)
        largest = tl.where(counted & (g > largest), g, largest)
        has_nan = tl.where(counted & (g != g), 1, has_nan)
        has_row = tl.where(counted, 1, has_row)
    low, high = tl.min(smallest, axis=0), tl.max(largest, axis=0)
    value = tl.where((low == high) & (tl.max(has_nan, axis=0) == 0), low, float("nan"))
    tl.store(scale, tl.where(tl.max(has_row, axis=0) == 0, 0.0, value))


@triton.jit(do_not_specialize=["ignore_index", "target_weight", "class_weight", "z_loss"])
def _grad_logits_kernel(
    logits,
    d_logits,
    bias,
    targets,
    normalizer,
    upstream,
    count,
    stride,
    ignore_index,
    target_weight,
    class_weight,
    z_loss,
    BLOCK_V: tl.constexpr,
):
    """Write the gradient of the logits of row u in block j of the vocabulary; program (u, j)."""
    # An element depends only on its own logit, so ``d_logits`` may be ``logits``. The smoothed
    # target distribution is ``class_weight``, plus ``target_weight`` at the target class. The
    # padding between rows is written too: a mask that ends at an arbitrary class would make loads
    # and stores of single elements.
    row = tl.program_id(0)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    index = row.to(tl.int64) * stride + v
    target = tl.load(targets + row)
    counted = target != ignore_index
    log_sum = tl.load(normalizer + row)
    scale = tl.load(upstream + row)
    exists = (target >= 0) & (target < count)
    scale = tl.where(exists, scale, float("nan"))
    z = tl.load(logits + index, mask=(v < stride) & counted, other=0.0)
    if bias is not None:
        z += tl.load(bias + v, mask=v < count, other=0.0).to(tl.float32)
    d = tl.exp(z - log_sum) * (1.0 + 2.0 * z_loss * log_sum) - class_weight
    d -= tl.where(v == target, target_weight, 0.0)
    d = tl.where(counted, scale * d, 0.0)
    tl.store(d_logits + index, d.to(d_logits.dtype.element_ty), mask=v < stride)
