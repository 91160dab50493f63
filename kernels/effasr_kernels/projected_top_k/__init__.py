"""Projection to the vocabulary fused with top-k; logits are never stored."""

from dataclasses import dataclass

import torch
from torch import Tensor

from effasr_kernels.runtime import checks
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import CHANNELS, CLASSES, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.torch_op import ForwardOnlyOp
from effasr_kernels.shared.ragged import wide_dtype


@dataclass(frozen=True, slots=True)
class TopKArguments:
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    k: int
    classes: int


def _outputs(a: TopKArguments) -> tuple[Tensor, ...]:
    shape = a.hidden.shape[0], a.k
    return (
        a.hidden.new_empty(shape, dtype=wide_dtype(a.hidden)),
        a.hidden.new_empty(shape, dtype=torch.int64),
    )


def _example(inputs: ExampleInputs) -> Keywords:
    return {
        "hidden": inputs.floating(4, CHANNELS),
        "weight": inputs.floating(CLASSES, CHANNELS),
        "bias": inputs.floating(CLASSES),
        "k": 2,
        "classes": CLASSES - 1,
    }


OPERATION = ForwardOnlyOp(
    "projected_top_k",
    TopKArguments,
    outputs=_outputs,
    flops=lambda a: 2 * a.hidden.numel() * a.classes,
    results=2,
    examples=[Example("projected_top_k", _example, 2 * 4 * (CLASSES - 1) * CHANNELS)],
)

_NAME = OPERATION.name

MOST = 16
"""Maximum of ``k``; kernels keep the best classes of each row in registers."""


def projected_top_k(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    k: int = 1,
    classes: int | None = None,
    backend: Backend | str | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Return the k most likely classes of each row and their log-probabilities.

    .. math:: \log p_{nv} = z_{nv} - \log \sum_{u < V'} e^{z_{nu}}, \qquad z_n = W h_n + b

    Classes are ordered from the best to the worst, equal logits by class. Logits and sums are
    float32 (float64 for float64). The result of a row is bitwise independent of the other rows: in
    a kernel, for given shapes; in the reference, which pads rows to tiles of 16, as long as the
    library of the matrix product keeps its order of summation for all tiles. A row with a NaN logit
    has NaN log-probabilities and unspecified classes in range. There is no gradient and no
    synchronization with the device. Under autocast the floating arguments are cast as for a matrix
    product.

    Args:
        hidden: h, (N, C), floating point.
        weight: W, (V, C), the dtype of ``hidden``.
        bias: b, (V,), the dtype of ``hidden``; zero by default.
        k: Number of classes to return, in [1, 16] and at most ``classes``.
        classes: V', in [1, V]: number of leading rows of ``weight`` to use; V by default.
        backend: Implementation to use; by default the fastest that supports the call.

    Returns:
        Log-probabilities, (N, k), float32 (float64 for float64), and classes, (N, k), int64.

    Raises:
        ValueError: An argument is invalid.
        RuntimeError: A tensor requires a gradient and grad mode is enabled.
        BackendUnavailable: See `effasr_kernels.runtime.dispatch.Dispatcher.select`.
    """
    hidden, weight, bias = checks.under_autocast(hidden, weight, bias)
    checks.check_shape(_NAME, "hidden", hidden, "(N, C)", None, None)
    checks.check_shape(_NAME, "weight", weight, "(V, C)", None, hidden.shape[1])
    if bias is not None:
        checks.check_shape(_NAME, "bias", bias, "(V,)", weight.shape[0])
    checks.check_floating(_NAME, hidden=hidden, weight=weight, bias=bias)
    classes = weight.shape[0] if classes is None else classes
    if not 1 <= classes <= weight.shape[0]:
        rule = f"be in [1, V = {weight.shape[0]}]"
        raise checks.wrong(_NAME, "classes", rule, classes)
    if not 1 <= k <= min(MOST, classes):
        rule = f"be in [1, {min(MOST, classes)}], at most {MOST} and the number of classes"
        raise checks.wrong(_NAME, "k", rule, k)
    return OPERATION(TopKArguments(hidden, weight, bias, k, classes), backend)
