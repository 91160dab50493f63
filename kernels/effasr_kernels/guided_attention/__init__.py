"""Cross-attention with a penalty on attention away from the diagonal."""

from dataclasses import dataclass

from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime import checks
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import HEADS, WIDTH, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.flops import pairs
from effasr_kernels.runtime.torch_op import DifferentiableOp
from effasr_kernels.shared.dropout import realised_rate, seed_for
from effasr_kernels.shared.ragged import wide_dtype


@dataclass(frozen=True, slots=True)
class GuidedArguments:
    q: Tensor
    k: Tensor
    v: Tensor
    layout_q: PackedLayout
    layout_k: PackedLayout
    sigma: float
    scale: float
    dropout: float
    seed: Tensor | None


def _outputs(a: GuidedArguments) -> tuple[Tensor, Tensor]:
    return a.q.new_empty(a.q.shape), a.q.new_empty(a.q.shape[:2], dtype=wide_dtype(a.q))


def _example(inputs: ExampleInputs) -> Keywords:
    layout_q, layout_k = inputs.tokens(), inputs.frames()
    rows = layout_q.rows, layout_k.rows, layout_k.rows
    q, k, v = (inputs.floating(count, HEADS, WIDTH) for count in rows)
    return {"q": q, "k": k, "v": v, "layout_q": layout_q, "layout_k": layout_k, "sigma": 0.2}


OPERATION = DifferentiableOp(
    "guided_attention",
    GuidedArguments,
    {
        Backend.TRITON: "effasr_kernels.attention.triton.guided",
        Backend.CPP: "effasr_kernels.guided_attention._cpp",
        Backend.REFERENCE: "effasr_kernels.guided_attention.reference",
    },
    outputs=_outputs,
    flops=lambda a: 4 * pairs(a.layout_q, a.layout_k) * a.q.shape[1] * a.q.shape[2],
    results=2,
    examples=[Example("guided_attention", _example, 4 * HEADS * WIDTH * (5 * 24 + 3 * 16))],
)

_NAME = OPERATION.name


def guided_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_q: PackedLayout,
    layout_k: PackedLayout,
    *,
    sigma: float,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    backend: Backend | str | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Attend from text to speech, with a penalty on attention away from the diagonal.

    .. math::
        y_i = \sum_j \mathrm{dropout}(A)_{ij} v_j, \qquad
        p_i = \sum_j A_{ij} \Bigl(1 - e^{-(i / U_n - j / T_n)^2 / 2 \sigma^2}\Bigr), \qquad
        A_{ij} = \mathrm{softmax}_j(\mathrm{scale} \; q_i^\top k_j)

    with i and j counted from zero within their sequences, of U_n tokens and T_n frames. Both
    results are differentiable. Sums are computed in float32 (float64 for float64). The results are
    zero in the tail and for rows whose sequence has no key. Under autocast the floating arguments
    are cast as for a matrix product.

    Args:
        q: (U, H, D), floating point.
        k: (T, H, D), the dtype of ``q``.
        v: (T, H, D), the dtype of ``q``.
        layout_q: Layout of ``q``.
        layout_k: Layout of ``k`` and ``v``, with the same number of sequences.
        sigma: Width of the diagonal relative to the sequence; positive.
        scale: Factor of the scores, ``D ** -0.5`` by default.
        dropout: Probability, in [0, 1), to drop an attention weight in the output; rounded to a
            multiple of 1/256.
        seed: Seed of the dropout; drawn from torch's global generator by default. Equal calls with
            the same seed, implementation and kind of device drop the same weights.
        backend: Implementation to use; by default the fastest that supports the call.

    Returns:
        The output (U, H, D), the dtype of ``q``, and the penalty (U, H), float32 (float64 for
        float64), in [0, 1).

    Raises:
        ValueError: An argument is invalid.
        BackendUnavailable: See `effasr_kernels.runtime.dispatch.Dispatcher.select`.

    References:
        Tachibana, Uenoyama and Aihara, 2017, https://arxiv.org/abs/1710.08969.
    """
    q, k, v = checks.under_autocast(q, k, v)
    checks.check_attention(_NAME, q, k, v, layout_q, layout_k, dropout)
    checks.check_floating(_NAME, q=q, k=k, v=v)
    if not sigma > 0:
        raise checks.wrong(_NAME, "sigma", "be positive", sigma)
    dropout = realised_rate(dropout)
    arguments = GuidedArguments(
        *(q, k, v, layout_q, layout_k, sigma),
        q.shape[-1] ** -0.5 if scale is None else scale,
        dropout,
        seed_for(dropout, seed, q.device),
    )
    return OPERATION(arguments, backend)
