"""Reference implementation of `transducer_loss`, which all other backends must match."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime import inplace_grad
from effasr_kernels.runtime.checks import check_labels
from effasr_kernels.shared.ragged import widen
from effasr_kernels.transducer_loss import TransducerArguments, duration_lattice, lattice


@dataclass(frozen=True, slots=True)
class _Settings:
    frames: PackedLayout
    labels: PackedLayout
    blank_id: int
    activation: str
    fastemit: float
    durations: tuple[int, ...]
    sigma: float
    with_gradient: bool
    dtype: torch.dtype
    overwritten: tuple[str, ...]


def run(a: TransducerArguments) -> Tensor:
    """See `effasr_kernels.transducer_loss.transducer_loss`."""
    durations = a.durations or ()
    labels = a.targets[: a.layout_targets.total]
    exception = f" other than the blank {a.blank_id}"
    classes = a.weight.shape[0] - len(durations)
    check_labels("transducer_loss", labels, classes, exception, a.blank_id)
    packed = {"encoded": a.encoded, "predicted": a.predicted}
    # Overwritten arguments must be passed themselves; they are widened for each sequence.
    rows = (x if name in a.overwritten else widen(x) for name, x in packed.items())
    inputs = (*rows, widen(a.weight), widen(a.bias))
    with_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    settings = _Settings(
        *(a.layout_frames, a.layout_targets, a.blank_id, a.activation, a.fastemit, durations),
        *(a.sigma, with_gradient and not a.overwritten, a.encoded.dtype, a.overwritten),
    )
    return _TransducerLoss.apply(*inputs, a.targets.long(), settings)


class _TransducerLoss(torch.autograd.Function):
    """Autograd function whose forward also computes the gradient of the sum of losses.

    If gradients overwrite the inputs, the backward computes them instead.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        """Return the losses for the inputs of `_losses`, followed by its settings."""
        inputs, ctx.settings = args[:-1], args[-1]
        losses, gradients = _losses(inputs, None, ctx.settings)
        ctx.save_for_backward(*inputs, *gradients)
        return losses

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Scale the gradient of the sum, or recompute it if losses have different weights."""
        (grad,) = grad_outputs
        overwritten = ctx.settings.overwritten
        inplace_grad.begin(ctx, "transducer_loss", overwritten)
        inputs, gradients = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        if overwritten:
            _, gradients = _losses(inputs, grad, replace(ctx.settings, with_gradient=True))
            return *(x.detach() for x in gradients), None, None
        # Sequences without frames, which pad a static shape, have no gradient.
        lengths = torch.tensor(ctx.settings.frames.lengths, device=grad.device)
        counted = grad[lengths > 0]
        if counted.numel() and bool((counted == counted[0]).all()):
            gradients = tuple(gradient * counted[0] for gradient in gradients)
        else:
            # Gradients of weight and bias are already summed over sequences, so recompute them.
            _, gradients = _losses(inputs, grad, ctx.settings)
        return *gradients, None, None


def _losses(
    inputs: tuple[Tensor, ...], scales: Tensor | None, settings: _Settings
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the loss of every sequence and the gradients of their weighted sum.

    Args:
        inputs: encoded, predicted, weight, bias and targets.
        scales: Weight of each loss in the sum, (N,); all 1 by default.
        settings: Remaining arguments of the operation.
    """
    encoded, predicted, weight, bias, targets = inputs
    losses = weight.new_zeros(settings.frames.num_sequences)
    gradients: tuple[Tensor, ...] = ()
    if settings.with_gradient:
        names = "encoded", "predicted", "weight", "bias"
        gradients = tuple(
            x if name in settings.overwritten else torch.zeros_like(x)
            for name, x in zip(names, inputs[:4], strict=True)
        )
    labels = settings.labels
    rows_f, rows_y = settings.frames.cu_seqlens_host, labels.cu_seqlens_host
    rows_g = labels.lengthened(1).cu_seqlens_host
    for n in range(settings.frames.num_sequences):
        f = slice(rows_f[n], rows_f[n + 1])
        g = slice(rows_g[n], rows_g[n + 1])
        y = targets[rows_y[n] : rows_y[n + 1]]
        if f.start == f.stop:
            losses[n] = torch.inf if y.numel() else 0.0
            for gradient in gradients[1:2]:
                gradient[g] = 0
            continue
        rows = widen(encoded[f]), widen(predicted[g])
        losses[n], dz, h = _logit_gradient(*rows, weight, bias, y, settings)
        if settings.with_gradient:
            if scales is not None:
                dz *= scales[n]
            _accumulate(gradients, f, g, dz, h, weight, settings.activation)
    # All rows of an overwritten tensor are overwritten, including those of the tail.
    for gradient, offsets in zip(gradients[:2], (rows_f, rows_g), strict=False):
        gradient[offsets[-1] :] = 0
    return losses, gradients


def _logit_gradient(
    encoded: Tensor,
    predicted: Tensor,
    weight: Tensor,
    bias: Tensor,
    labels: Tensor,
    settings: _Settings,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of one sequence, the gradient of its logits, and the joint's output.

    The gradient is (T, U + 1, V + D); it is undefined if the settings request no gradient.
    """
    h = encoded[:, None] + predicted
    h = h.relu_() if settings.activation == "relu" else h.tanh_()
    # Rounded as the input of a matrix product of that dtype.
    h = h.to(settings.dtype).to(h.dtype)
    z = torch.addmm(bias, h.flatten(0, 1), weight.T).view(*h.shape[:2], -1)
    classes = z.shape[-1] - len(settings.durations)
    of_classes, of_durations = z[..., :classes], z[..., classes:]
    of_classes -= of_classes.logsumexp(-1, keepdim=True)
    if settings.durations:
        of_durations -= of_durations.logsumexp(-1, keepdim=True)
    columns = labels.expand(z.shape[0], -1)[..., None]
    log_label = of_classes[:, :-1].gather(2, columns)[..., 0]
    total, *took = _sum_paths(z[..., settings.blank_id], log_label, of_durations, settings)
    if not settings.with_gradient:
        return -total, z, h
    took_blank, took_label, *took_durations = (part.to(z.dtype) for part in took)
    took_label *= 1 + settings.fastemit
    dz = z.exp_()
    of_classes *= (took_blank + took_label)[..., None]
    of_classes[..., settings.blank_id] -= took_blank
    of_classes[:, :-1].scatter_add_(2, columns, -took_label[:, :-1, None])
    for took_duration in took_durations:
        of_durations *= took_duration.sum(-1, keepdim=True)
        of_durations -= took_duration
    return -total, dz, h


def _sum_paths(
    log_blank: Tensor, log_label: Tensor, log_durations: Tensor, settings: _Settings
) -> tuple[Tensor, ...]:
    """Return the log-likelihood and, if a gradient is needed, the occupancy of each step."""
    if not settings.durations:
        if settings.with_gradient:
            return lattice.occupancies(log_blank, log_label)
        return (lattice.log_likelihood(log_blank, log_label),)
    blank, label = log_blank - settings.sigma, log_label - settings.sigma
    if settings.with_gradient:
        return duration_lattice.occupancies(blank, label, log_durations, settings.durations)
    return (duration_lattice.log_likelihood(blank, label, log_durations, settings.durations),)


def _accumulate(
    gradients: tuple[Tensor, ...],
    f: slice,
    g: slice,
    dz: Tensor,
    h: Tensor,
    weight: Tensor,
    activation: str,
) -> None:
    """Add the gradients of one sequence to those of encoded, predicted, weight and bias."""
    of_encoded, of_predicted, of_weight, of_bias = gradients
    dz_rows, h_rows = dz.flatten(0, 1), h.flatten(0, 1)
    of_weight.addmm_(dz_rows.T, h_rows)
    of_bias += dz_rows.sum(0)
    da = (dz_rows @ weight).view_as(h)
    da *= h > 0 if activation == "relu" else 1 - h.square()
    of_encoded[f] = da.sum(1)
    of_predicted[g] = da.sum(0)
