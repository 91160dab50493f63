"""Projection to the vocabulary fused with the connectionist temporal classification loss."""

from dataclasses import dataclass

from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime import checks
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import CHANNELS, CLASSES, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.flops import known_lengths
from effasr_kernels.runtime.torch_op import DifferentiableOp
from effasr_kernels.shared.ragged import wide_dtype


@dataclass(frozen=True, slots=True)
class CtcArguments:
    hidden: Tensor
    weight: Tensor
    targets: Tensor
    layout_frames: PackedLayout
    layout_targets: PackedLayout
    bias: Tensor | None
    blank_id: int


def _example(inputs: ExampleInputs) -> Keywords:
    frames = inputs.frames()
    return {
        "hidden": inputs.floating(frames.rows, CHANNELS),
        "weight": inputs.floating(CLASSES, CHANNELS),
        "targets": inputs.targets(),
        "layout_frames": frames,
        "layout_targets": inputs.tokens(),
        "bias": inputs.floating(CLASSES),
        "blank_id": 0,
    }


OPERATION = DifferentiableOp(
    "ctc_loss",
    CtcArguments,
    {
        Backend.TRITON: "effasr_kernels.ctc_loss._triton",
        Backend.CPP: "effasr_kernels.ctc_loss._cpp",
        Backend.REFERENCE: "effasr_kernels.ctc_loss.reference",
    },
    outputs=lambda a: a.hidden.new_empty(a.layout_frames.num_sequences, dtype=wide_dtype(a.hidden)),
    flops=lambda a: 2 * sum(known_lengths(a.layout_frames)) * a.weight.numel(),
    examples=[Example("ctc_loss", _example, 2 * 40 * CLASSES * CHANNELS)],
)

_NAME = OPERATION.name


def ctc_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    layout_frames: PackedLayout,
    layout_targets: PackedLayout,
    *,
    bias: Tensor | None = None,
    blank_id: int,
    backend: Backend | str | None = None,
) -> Tensor:
    r"""Return the negative log-likelihood of each transcript, summed over its alignments.

    .. math::
        \ell_n = -\log \sum_{\pi \in B^{-1}(y_n)} \prod_t \mathrm{softmax}(W h_t + b)_{\pi_t}

    where B removes repeats, then blanks. A transcript needs one frame for each label and one more
    for each label that repeats its predecessor; if the sequence has fewer frames, the loss is +inf
    and the gradient zero. A sequence without frames and labels has loss 0. Sums are computed in
    float32 (float64 for float64), sums over alignments in float64. Under autocast the floating
    arguments are cast as for a matrix product.

    Args:
        hidden: h, (T, C), floating point.
        weight: W, (V, C), the dtype of ``hidden``; V includes the blank.
        targets: y, (U,), int32 or int64, each in [0, V) and not the blank; the tail is not read.
        layout_frames: Layout of ``hidden``, N sequences.
        layout_targets: Layout of ``targets``, N sequences.
        bias: b, (V,), the dtype of ``hidden``; zero by default.
        blank_id: Class of the blank, in [0, V).
        backend: Implementation to use; by default the fastest that supports the call.

    Returns:
        The loss of each sequence, (N,), float32 (float64 for float64).

    Raises:
        ValueError: An argument is invalid. The values of ``targets`` are only checked on a CPU,
            because a check on a GPU would synchronize with it.
        BackendUnavailable: See `effasr_kernels.runtime.dispatch.Dispatcher.select`.

    References:
        Graves et al., 2006, https://www.cs.toronto.edu/~graves/icml_2006.pdf.
    """
    hidden, weight, bias = checks.under_autocast(hidden, weight, bias)
    checks.check_shape(_NAME, "hidden", hidden, "(T, C)", None, None)
    checks.check_rows(_NAME, "hidden", hidden, "layout_frames", layout_frames)
    checks.check_shape(_NAME, "weight", weight, "(V, C)", None, hidden.shape[1])
    if bias is not None:
        checks.check_shape(_NAME, "bias", bias, "(V,)", weight.shape[0])
    checks.check_floating(_NAME, hidden=hidden, weight=weight, bias=bias)
    checks.check_transcripts(
        _NAME, targets, layout_targets, layout_frames, weight.shape[0], blank_id
    )
    arguments = CtcArguments(hidden, weight, targets, layout_frames, layout_targets, bias, blank_id)
    return OPERATION(arguments, backend)
