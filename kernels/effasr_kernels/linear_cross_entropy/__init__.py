"""Projection to the vocabulary fused with cross-entropy; logits exist only in chunks."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from effasr_kernels.runtime import checks
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import CHANNELS, CLASSES, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.torch_op import DifferentiableOp
from effasr_kernels.shared.ragged import wide_dtype


@dataclass(frozen=True, slots=True)
class CrossEntropyArguments:
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    bias: Tensor | None
    label_smoothing: float
    ignore_index: int
    z_loss: float
    uniform_gradient: bool = False
    frozen: bool = False


def _flops(a: CrossEntropyArguments) -> int:
    fake = is_fake(a.targets)
    rows = a.targets.shape[0] if fake else int((a.targets != a.ignore_index).sum())
    return 2 * rows * a.weight.numel()


def _example(inputs: ExampleInputs) -> Keywords:
    targets = inputs.targets()
    return {
        "hidden": inputs.floating(targets.shape[0], CHANNELS),
        "weight": inputs.floating(CLASSES, CHANNELS),
        "targets": targets,
        "bias": inputs.floating(CLASSES),
        "label_smoothing": 0.1,
    }


OPERATION = DifferentiableOp(
    "linear_cross_entropy",
    CrossEntropyArguments,
    outputs=lambda a: a.hidden.new_empty(a.hidden.shape[0], dtype=wide_dtype(a.hidden)),
    flops=_flops,
    examples=[Example("linear_cross_entropy", _example, 2 * 8 * CLASSES * CHANNELS)],
)

_NAME = OPERATION.name


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    uniform_gradient: bool = False,
    backend: Backend | str | None = None,
) -> Tensor:
    r"""Return the cross-entropy of each row's projection, with label smoothing as in `torch.nn`.

    .. math::
        \ell_u = L_u - (1 - \epsilon) z_{u, y_u} - \frac\epsilon V \sum_v z_{uv} + \zeta L_u^2,
        \qquad z_u = W h_u + b, \qquad L_u = \log \sum_v e^{z_{uv}}

    Rows whose target is ``ignore_index`` (prompts, the tail of a static shape) have loss zero and
    no gradient, even if they contain NaN. Logits and sums are float32 (float64 for float64). Under
    autocast the floating arguments are cast as for a matrix product.

    Args:
        hidden: h, (U, C), floating point.
        weight: W, (V, C), the dtype of ``hidden``.
        targets: y, (U,), int32 or int64, each in [0, V) or ``ignore_index``.
        bias: b, (V,), the dtype of ``hidden``; zero by default.
        label_smoothing: epsilon, in [0, 1].
        ignore_index: Target of rows that are left out of the loss.
        z_loss: zeta, not negative; penalizes large normalizers.
        uniform_gradient: Promise that the gradient of the result is one number for all rows that
            count, as that of its sum is. The Triton backend then computes the gradients of the
            arguments in the forward, with 6 U V C operations in place of 8, keeps them in float32
            (4 (U + V) C bytes), and scales them in the backward. If the promise is broken, they are
            NaN; the reference does not need it. Where ``weight`` and ``bias`` have no gradient, it
            takes 4 U V C operations in place of 6, and 4 U C bytes.
        backend: Implementation to use; by default the fastest that supports the call.

    Returns:
        The loss of each row, (U,), float32 (float64 for float64).

    Raises:
        ValueError: An argument is invalid. The values of ``targets`` are only checked on a CPU,
            because a check on a GPU would synchronize with it; there, a target out of range makes
            the loss of its row NaN.
        BackendUnavailable: See `effasr_kernels.runtime.dispatch.Dispatcher.select`.

    References:
        Szegedy et al., 2015, https://arxiv.org/abs/1512.00567 (smoothing); Chowdhery et al., 2022,
        https://arxiv.org/abs/2204.02311, section 5 (z-loss).
    """
    hidden, weight, bias = checks.under_autocast(hidden, weight, bias)
    checks.check_shape(_NAME, "hidden", hidden, "(U, C)", None, None)
    checks.check_shape(_NAME, "weight", weight, "(V, C)", None, hidden.shape[1])
    checks.check_shape(_NAME, "targets", targets, "(U,)", hidden.shape[0])
    if bias is not None:
        checks.check_shape(_NAME, "bias", bias, "(V,)", weight.shape[0])
    checks.check_floating(_NAME, hidden=hidden, weight=weight, bias=bias)
    checks.check_integers(_NAME, "targets", targets, "hidden", hidden)
    if not 0 <= label_smoothing <= 1:
        raise checks.wrong(_NAME, "label_smoothing", "be in [0, 1]", label_smoothing)
    if not z_loss >= 0:
        raise checks.wrong(_NAME, "z_loss", "be at least 0", z_loss)
    floating = [hidden, weight] if bias is None else [hidden, weight, bias]
    # Without a backward, gradients would be computed for nothing.
    early = uniform_gradient and torch.is_grad_enabled() and any(x.requires_grad for x in floating)
    frozen = not any(x.requires_grad for x in floating[1:])
    arguments = CrossEntropyArguments(
        hidden, weight, targets, bias, label_smoothing, ignore_index, z_loss, early, frozen
    )
    return OPERATION(arguments, backend)
