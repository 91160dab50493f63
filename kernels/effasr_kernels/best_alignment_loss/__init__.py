"""Distance of speech from text under the best monotone alignment."""

from dataclasses import dataclass

from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime import checks
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import CHANNELS, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.flops import pairs
from effasr_kernels.runtime.torch_op import DifferentiableOp
from effasr_kernels.shared.ragged import wide_dtype


@dataclass(frozen=True, slots=True)
class AlignmentArguments:
    speech: Tensor
    text: Tensor
    layout_speech: PackedLayout
    layout_text: PackedLayout


def _example(inputs: ExampleInputs) -> Keywords:
    frames, tokens = inputs.frames(), inputs.tokens()
    speech, text = (inputs.floating(layout.rows, CHANNELS) for layout in (frames, tokens))
    return {"speech": speech, "text": text, "layout_speech": frames, "layout_text": tokens}


OPERATION = DifferentiableOp(
    "best_alignment_loss",
    AlignmentArguments,
    {
        Backend.TRITON: "effasr_kernels.best_alignment_loss._triton",
        Backend.CPP: "effasr_kernels.best_alignment_loss._cpp",
        Backend.REFERENCE: "effasr_kernels.best_alignment_loss.reference",
    },
    outputs=lambda a: a.speech.new_empty(a.layout_speech.num_sequences, dtype=wide_dtype(a.speech)),
    flops=lambda a: 2 * pairs(a.layout_speech, a.layout_text) * a.speech.shape[1],
    examples=[Example("best_alignment_loss", _example, 2 * CHANNELS * (24 * 5 + 16 * 3))],
)

_NAME = OPERATION.name


def best_alignment_loss(
    speech: Tensor,
    text: Tensor,
    layout_speech: PackedLayout,
    layout_text: PackedLayout,
    *,
    backend: Backend | str | None = None,
) -> Tensor:
    r"""Return the mean distance of frames from tokens under the best monotone alignment.

    .. math::
        \ell_n = \min_{0 \le a_0 \le a_1 \le \dots < U_n}
            \frac{1}{T_n C} \sum_t \lVert x_t - y_{a_t} \rVert^2

    Each frame is aligned to one token, and tokens may be skipped: to repeat each frame k times
    changes nothing, and an alignment exists wherever there is a token, also for a text that was
    upsampled to more rows than there are frames. Of equal alignments the one with the later tokens
    counts. The gradient is that of the best alignment, which is constant to it. A sequence without
    frames has loss 0; one with frames, but without tokens has loss +inf and gradient zero. Sums are
    computed in float32 (float64 for float64), those over alignments in float64. Beside T + U rows
    memory is needed for one bit of each pair of a frame and a token. Under autocast the arguments
    are cast as for a matrix product.

    Args:
        speech: x, (T, C), floating point.
        text: y, (U, C), the dtype of ``speech``.
        layout_speech: Layout of ``speech``, N sequences.
        layout_text: Layout of ``text``, N sequences.
        backend: Implementation to use; by default the fastest that supports the call.

    Returns:
        The loss of each sequence, (N,), float32 (float64 for float64).

    Raises:
        ValueError: An argument is invalid.
        BackendUnavailable: See `effasr_kernels.runtime.dispatch.Dispatcher.select`.

    References:
        Peyser et al., 2023, https://arxiv.org/abs/2308.06125.
    """
    speech, text = checks.under_autocast(speech, text)
    checks.check_shape(_NAME, "speech", speech, "(T, C)", None, None)
    checks.check_shape(_NAME, "text", text, "(U, C)", None, speech.shape[1])
    checks.check_rows(_NAME, "speech", speech, "layout_speech", layout_speech)
    checks.check_rows(_NAME, "text", text, "layout_text", layout_text)
    checks.check_floating(_NAME, speech=speech, text=text)
    checks.check_same_sequences(_NAME, "layout_text", layout_text, "layout_speech", layout_speech)
    return OPERATION(AlignmentArguments(speech, text, layout_speech, layout_text), backend)
