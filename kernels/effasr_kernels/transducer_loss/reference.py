from dataclasses import dataclass

import torch
from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.checks import check_labels
from effasr_kernels.shared.lattice_losses import Losses, differentiable
from effasr_kernels.shared.ragged import widen
from effasr_kernels.transducer_loss import TransducerArguments, lattice


def run(a: TransducerArguments) -> Tensor:
    losses = _Losses(
        *(a.layout_frames, a.layout_targets, a.targets.long(), a.blank_id, a.activation),
        *(a.fastemit, a.durations or (), a.sigma, a.encoded.dtype),
    )
    return differentiable_losses(a, losses)


def differentiable_losses(a: TransducerArguments, losses: Losses) -> Tensor:
    """Check the labels, and compute the losses of widened arguments."""
    labels = a.targets[: a.layout_targets.total]
    exception = f" other than the blank {a.blank_id}"
    classes = a.weight.shape[0] - len(a.durations or ())
    check_labels("transducer_loss", labels, classes, exception, a.blank_id)
    packed = {"encoded": a.encoded, "predicted": a.predicted}
    # An overwritten input must be the argument itself; its rows are widened part by part.
    inputs = {name: x if name in a.overwritten else widen(x) for name, x in packed.items()}
    inputs |= {"weight": widen(a.weight), "bias": widen(a.bias)}
    return differentiable("transducer_loss", losses, inputs, a.overwritten)


@dataclass(frozen=True, slots=True)
class _Losses:
    """See `shared.lattice_losses.Losses`; inputs are encoded, predicted, weight and bias."""

    frames: PackedLayout
    labels: PackedLayout
    targets: Tensor
    blank_id: int
    activation: str
    fastemit: float
    durations: tuple[int, ...]
    sigma: float
    dtype: torch.dtype

    def __call__(
        self,
        inputs: tuple[Tensor, ...],
        scales: Tensor | None = None,
        gradients: tuple[Tensor, ...] = (),
    ) -> Tensor:
        encoded, predicted, weight, bias = inputs
        losses = weight.new_zeros(self.frames.num_sequences)
        rows_f, rows_y = self.frames.cu_seqlens_host, self.labels.cu_seqlens_host
        rows_g = self.labels.lengthened(1).cu_seqlens_host
        # Rows of packed inputs may be overwritten by their gradients, so only the tail is cleared.
        for gradient, offsets in zip(gradients[:2], (rows_f, rows_g), strict=False):
            gradient[offsets[-1] :] = 0
        for gradient in gradients[2:]:
            gradient.zero_()
        for n in range(self.frames.num_sequences):
            f = slice(rows_f[n], rows_f[n + 1])
            g = slice(rows_g[n], rows_g[n + 1])
            y = self.targets[rows_y[n] : rows_y[n + 1]]
            if f.start == f.stop:
                losses[n] = torch.inf if y.numel() else 0.0
                for gradient in gradients[1:2]:
                    gradient[g] = 0
                continue
            rows = widen(encoded[f]), widen(predicted[g])
            losses[n], dz, h = _logit_gradient(*rows, weight, bias, y, self, bool(gradients))
            if gradients:
                if scales is not None:
                    dz *= torch.where(losses[n].isinf(), 0, scales[n])
                _accumulate(gradients, f, g, dz, h, weight, self.activation)
        return losses


def _logit_gradient(
    encoded: Tensor,
    predicted: Tensor,
    weight: Tensor,
    bias: Tensor,
    labels: Tensor,
    settings: _Losses,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of one sequence, the gradient of its logits, and the joint's output."""
    # The gradient is (T, U + 1, V + D); it is undefined without ``with_gradient``.
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
    log_label = of_classes[:, :-1].gather(2, columns)[..., 0] - settings.sigma
    log_blank = z[..., settings.blank_id] - settings.sigma
    log_duration = of_durations if settings.durations else None
    scores = log_blank, log_label, log_duration, settings.durations
    if not with_gradient:
        return -lattice.log_likelihood(*scores), z, h
    total, *took = lattice.occupancies(*scores)
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


def _accumulate(
    gradients: tuple[Tensor, ...],
    f: slice,
    g: slice,
    dz: Tensor,
    h: Tensor,
    weight: Tensor,
    activation: str,
) -> None:
    """Add one sequence's part of the gradients of encoded, predicted, weight and bias."""
    of_encoded, of_predicted, of_weight, of_bias = gradients
    dz_rows, h_rows = dz.flatten(0, 1), h.flatten(0, 1)
    of_weight.addmm_(dz_rows.T, h_rows)
    of_bias += dz_rows.sum(0)
    da = (dz_rows @ weight).view_as(h)
    da *= h > 0 if activation == "relu" else 1 - h.square()
    of_encoded[f] = da.sum(1)
    of_predicted[g] = da.sum(0)
