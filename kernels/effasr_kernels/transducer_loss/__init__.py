"""The transducer's joint network, projection and loss, in memory that is flat in the batch size."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from effasr_kernels import checks
from effasr_kernels.dispatch import Backend
from effasr_kernels.packed import PackedLayout
from effasr_kernels.transducer_loss.registration import call, op

__all__ = ["op", "transducer_loss"]


def transducer_loss(
    encoded: Tensor,
    predicted: Tensor,
    targets: Tensor,
    layout_frames: PackedLayout,
    layout_targets: PackedLayout,
    weight: Tensor,
    bias: Tensor,
    *,
    blank_id: int,
    activation: Literal["relu", "tanh"] = "relu",
    fastemit: float = 0.0,
    backend: Backend | str | None = None,
) -> Tensor:
    r"""Negative log-likelihood of each transcript under a transducer (RNN-T), exact.

    .. math::
        \ell_n = -\log \sum_{\pi} \prod_{(t, u) \in \pi} P_{tu}(\pi_{tu}), \qquad
        P_{tu} = \mathrm{softmax}(W \, \mathrm{act}(f_t + g_u) + b)

    over all paths that start at frame 0 with no label, spend one blank per frame and emit the
    labels y_1 to y_U in between; the last step is the blank of the last frame. The
    (T_n, U_n + 1, V) tensor of one sequence exists at a time, and its gradient is computed at once:
    there is no double backward. Sums are float32 (float64 for float64), and those of the lattice
    float64. Under autocast the floating arguments are cast as for a matrix product.

    A sequence of no frames can emit nothing: its loss is 0 without labels, else +inf. A loss of
    +inf (also from logits of -inf) has zero gradient.

    FastEmit multiplies the gradient that flows through every label by 1 + lambda, so that labels
    come early; the value of the loss is unchanged. It is thus not the gradient of the value.

    Args:
        encoded: f, (T, J), floating point.
        predicted: g, (U + N, J), the dtype of ``encoded``: each sequence has one row more than
            labels, the first for no label yet (``layout_targets.lengthened(1)``).
        targets: y, (U,), int32 or int64, each in [0, V) and not the blank; the tail is not read.
        layout_frames: The sequences of ``encoded``.
        layout_targets: The sequences of ``targets``, as many.
        weight: W, (V, J), the dtype of ``encoded``; V counts the blank.
        bias: b, (V,), the dtype of ``encoded``.
        blank_id: The blank's class, in [0, V).
        activation: ``"relu"`` or ``"tanh"``.
        fastemit: lambda, not negative.
        backend: Implementation to use; the fastest that can serve the call by default.

    Returns:
        The loss of each sequence, (N,), float32 (float64 for float64).

    Raises:
        ValueError: An argument is not as above. The values of ``targets`` are checked on a CPU
            only, as a check would wait for a GPU.
        BackendUnavailable: See `effasr_kernels.dispatch.Op.select`.

    References:
        Graves, 2012, https://arxiv.org/abs/1211.3711; Li et al., 2019,
        https://arxiv.org/abs/1909.12415 (gradient merged into the forward); Braun et al., 2022,
        https://arxiv.org/abs/2211.16270 (sample by sample); Yu et al., 2020,
        https://arxiv.org/abs/2010.11148 (FastEmit).
    """
    encoded, predicted, weight, bias = checks.under_autocast(encoded, predicted, weight, bias)
    checks.check_shape(op.name, "encoded", encoded, "(T, J)", None, None)
    checks.check_rows(op.name, "encoded", encoded, "layout_frames", layout_frames)
    joint = encoded.shape[1]
    rows = layout_targets.rows + layout_targets.cu_seqlens.shape[0] - 1
    checks.check_shape(op.name, "predicted", predicted, "(U + N, J)", rows, joint)
    checks.check_shape(op.name, "weight", weight, "(V, J)", None, joint)
    checks.check_shape(op.name, "bias", bias, "(V,)", weight.shape[0])
    checks.check_floating(op.name, encoded=encoded, predicted=predicted, weight=weight, bias=bias)
    checks.check_transcripts(
        op.name, targets, layout_targets, layout_frames, weight.shape[0], blank_id
    )
    if activation not in ("relu", "tanh"):
        raise checks.wrong(op.name, "activation", 'be "relu" or "tanh"', repr(activation))
    if not fastemit >= 0:
        raise checks.wrong(op.name, "fastemit", "be at least 0", fastemit)
    return call(
        encoded,
        predicted,
        targets,
        layout_frames,
        layout_targets,
        weight,
        bias,
        blank_id=blank_id,
        activation=activation,
        fastemit=fastemit,
        backend=backend,
    )
