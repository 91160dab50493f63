"""A projection to the vocabulary and the best classes of each row; logits are never stored."""

from __future__ import annotations

from torch import Tensor

from effasr_kernels.projected_top_k.definition import OPERATION, TopKArguments
from effasr_kernels.runtime import checks
from effasr_kernels.runtime.dispatch import Backend

_NAME = OPERATION.name

MOST = 16
"""The largest ``k``: a kernel keeps as many classes of each row in registers."""


def projected_top_k(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    k: int = 1,
    classes: int | None = None,
    backend: Backend | str | None = None,
) -> tuple[Tensor, Tensor]:
    r"""The k most likely classes of each row, and the logarithms of their probabilities.

    .. math:: \log p_{nv} = z_{nv} - \log \sum_{u < V'} e^{z_{nu}}, \qquad z_n = W h_n + b

    The best comes first; of equal logits, the lower class. Logits and sums are float32 (float64 for
    float64). A row depends on nothing but itself, to the bit: of a kernel for given shapes; of the
    reference, whose matrix product pads rows to whole tiles of 16, as far as the library of that
    product keeps its order of sums over tiles. A row with a logit that is NaN has log-probabilities
    that are NaN, and undefined classes in range. There is no gradient, and nothing waits for the
    device. Under autocast the floating arguments are cast as for a matrix product.

    Args:
        hidden: h, (N, C), floating point.
        weight: W, (V, C), the dtype of ``hidden``.
        bias: b, (V,), the dtype of ``hidden``; zero by default.
        k: How many classes, in [1, 16], and at most ``classes``.
        classes: V', in [1, V]: only the first so many rows of ``weight`` count; V by default.
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
