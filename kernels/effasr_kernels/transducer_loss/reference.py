"""The definition of `transducer_loss`: what every other implementation must match."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from effasr_kernels.checks import check_labels
from effasr_kernels.packed import PackedLayout
from effasr_kernels.ragged import widen
from effasr_kernels.transducer_loss.lattice import log_likelihood, occupancies


def why_not(*args: object, **kwargs: object) -> None:
    """The reference serves every call."""


@dataclass(frozen=True, slots=True)
class _Settings:
    frames: PackedLayout
    labels: PackedLayout
    blank_id: int
    activation: str
    fastemit: float
    with_gradient: bool


def run(
    encoded: Tensor,
    predicted: Tensor,
    targets: Tensor,
    layout_frames: PackedLayout,
    layout_targets: PackedLayout,
    weight: Tensor,
    bias: Tensor,
    *,
    blank_id: int,
    activation: str,
    fastemit: float,
) -> Tensor:
    """See `effasr_kernels.transducer_loss.transducer_loss`."""
    labels = targets[: layout_targets.total]
    exception = f" other than the blank {blank_id}"
    check_labels("transducer_loss", labels, weight.shape[0], exception, blank_id)
    inputs = tuple(widen(x) for x in (encoded, predicted, weight, bias))
    with_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    settings = _Settings(
        layout_frames, layout_targets, blank_id, activation, fastemit, with_gradient
    )
    return _TransducerLoss.apply(*inputs, targets.long(), settings)


class _TransducerLoss(torch.autograd.Function):
    """The loss, whose forward also leaves the gradient of its sum."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        """The inputs of `_losses`, then its settings."""
        inputs, ctx.settings = args[:-1], args[-1]
        losses, gradients = _losses(inputs, None, ctx.settings)
        ctx.save_for_backward(*inputs, *gradients)
        return losses

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Scale the gradient of the sum, or compute another weighting afresh."""
        (grad,) = grad_outputs
        inputs, gradients = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
        if grad.numel() and bool((grad == grad[0]).all()):
            gradients = tuple(gradient * grad[0] for gradient in gradients)
        else:
            # The gradients of weight and bias are sums over sequences: too late to weight them.
            _, gradients = _losses(inputs, grad, ctx.settings)
        return *gradients, None, None


def _losses(
    inputs: tuple[Tensor, ...], scales: Tensor | None, settings: _Settings
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss of every sequence, and the gradients of their sum weighted by ``scales`` (N,).

    Args:
        inputs: encoded, predicted, weight, bias and targets.
        scales: Of each loss in the sum; all 1 by default.
        settings: The rest.
    """
    encoded, predicted, weight, bias, targets = inputs
    losses = encoded.new_zeros(settings.frames.num_sequences)
    gradients: tuple[Tensor, ...] = ()
    if settings.with_gradient:
        gradients = tuple(torch.zeros_like(x) for x in (encoded, predicted, weight, bias))
    labels = settings.labels
    rows_f, rows_y = settings.frames.cu_seqlens_host, labels.cu_seqlens_host
    rows_g = labels.lengthened(1).cu_seqlens_host
    for n in range(settings.frames.num_sequences):
        f = slice(rows_f[n], rows_f[n + 1])
        g = slice(rows_g[n], rows_g[n + 1])
        y = targets[rows_y[n] : rows_y[n + 1]]
        if f.start == f.stop:
            losses[n] = torch.inf if y.numel() else 0.0
            continue
        losses[n], dz, h = _logit_gradient(encoded[f], predicted[g], weight, bias, y, settings)
        if settings.with_gradient:
            if scales is not None:
                dz *= scales[n]
            _accumulate(gradients, f, g, dz, h, weight, settings.activation)
    return losses, gradients


def _logit_gradient(
    encoded: Tensor,
    predicted: Tensor,
    weight: Tensor,
    bias: Tensor,
    labels: Tensor,
    settings: _Settings,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of one sequence, its gradient (T, U + 1, V) at the logits, and the joint's output.

    Without a gradient the second result is meaningless.
    """
    h = encoded[:, None] + predicted
    h = h.relu_() if settings.activation == "relu" else h.tanh_()
    z = torch.addmm(bias, h.flatten(0, 1), weight.T).view(*h.shape[:2], -1)
    z -= z.logsumexp(-1, keepdim=True)
    columns = labels.expand(z.shape[0], -1)[..., None]
    log_label = z[:, :-1].gather(2, columns)[..., 0]
    if not settings.with_gradient:
        return -log_likelihood(z[..., settings.blank_id], log_label), z, h
    total, took_blank, took_label = occupancies(z[..., settings.blank_id], log_label)
    took_label *= 1 + settings.fastemit
    dz = z.exp_().mul_((took_blank + took_label)[..., None].to(z.dtype))
    dz[..., settings.blank_id] -= took_blank.to(z.dtype)
    dz[:, :-1].scatter_add_(2, columns, -took_label[:, :-1, None].to(z.dtype))
    return -total, dz, h


def _accumulate(
    gradients: tuple[Tensor, ...],
    f: slice,
    g: slice,
    dz: Tensor,
    h: Tensor,
    weight: Tensor,
    activation: str,
) -> None:
    """Add one sequence's share to the gradients of encoded, predicted, weight and bias."""
    of_encoded, of_predicted, of_weight, of_bias = gradients
    dz_rows, h_rows = dz.flatten(0, 1), h.flatten(0, 1)
    of_weight.addmm_(dz_rows.T, h_rows)
    of_bias += dz_rows.sum(0)
    da = (dz_rows @ weight).view_as(h)
    da *= h > 0 if activation == "relu" else 1 - h.square()
    of_encoded[f] = da.sum(1)
    of_predicted[g] = da.sum(0)
