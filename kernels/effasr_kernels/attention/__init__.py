"""Attention within packed sequences, and from one packed batch to another."""

from __future__ import annotations

from torch import Tensor

from effasr_kernels.attention.position import RelativeBias, Rotary
from effasr_kernels.attention.torch_op import call, op
from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime import checks
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.shared.dropout import draw_seed

__all__ = ["RelativeBias", "Rotary", "attention", "op"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_q: PackedLayout,
    layout_k: PackedLayout | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    position: Rotary | RelativeBias | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    backend: Backend | str | None = None,
) -> Tensor:
    r"""Attend from each query to the keys of its own sequence.

    .. math::
        y_i = \sum_j \mathrm{dropout}(A)_{ij} v_j, \qquad
        A_{ij} = \mathrm{softmax}_j(s_{ij}), \qquad s_{ij} = \mathrm{scale} \; q_i^\top k_j

    for every head; ``position`` changes the score s as its class says. Sums are taken in float32
    (in float64 for float64). A query whose sequence has no key gives zeros, as does the tail.
    Under autocast the floating arguments are cast as for a matrix product.

    Args:
        q: (T_q, H, D), floating point.
        k: (T_k, H, D), the dtype of ``q``.
        v: (T_k, H, D), the dtype of ``q``.
        layout_q: The sequences of ``q``.
        layout_k: Those of ``k`` and ``v``, as many as in ``layout_q``, which is the default.
        causal: Whether query i sees only the keys 0 to i of its sequence.
        scale: Factor of the scores, ``D ** -0.5`` by default.
        position: How positions enter the scores; not at all by default. All floating tensors in it
            have the dtype of ``q``.
        dropout: Probability, in [0, 1), to drop an attention weight.
        seed: Where dropout starts to draw; from torch's global generator by default. Equal
            calls drop equal weights, with one implementation on one kind of device.
        backend: Implementation to use; the fastest that can serve the call by default.

    Returns:
        (T_q, H, D), the dtype of ``q``.

    Raises:
        ValueError: An argument is not as above.
        BackendUnavailable: See `effasr_kernels.runtime.dispatch.Op.select`.

    References:
        Vaswani et al., 2017, https://arxiv.org/abs/1706.03762.
    """
    layout_k = layout_q if layout_k is None else layout_k
    if isinstance(position, RelativeBias):
        q, k, v, *biases = checks.under_autocast(
            q, k, v, position.content_bias, position.position_bias, position.table
        )
        position = RelativeBias(*biases)
    else:
        q, k, v = checks.under_autocast(q, k, v)
    checks.check_attention(op.name, q, k, v, layout_q, layout_k, dropout)
    checks.check_floating(op.name, q=q, k=k, v=v)
    if isinstance(position, RelativeBias):
        _check_relative(q, position, layout_q, layout_k)
    return call(
        q,
        k,
        v,
        layout_q,
        layout_k,
        causal=causal,
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        position=position,
        dropout=dropout,
        seed=draw_seed(q.device) if dropout and seed is None else seed,
        backend=backend,
    )


def _check_relative(q: Tensor, position: RelativeBias, *layouts: PackedLayout) -> None:
    heads, width = q.shape[1:]
    biases = {
        "position.content_bias": position.content_bias,
        "position.position_bias": position.position_bias,
    }
    for name, bias in biases.items():
        checks.check_shape(op.name, name, bias, "(H, D)", heads, width)
    table = position.table
    checks.check_shape(op.name, "position.table", table, "(2L-1, H, D)", None, heads, width)
    if table.shape[0] % 2 == 0:
        rule = "have an odd number of rows"
        raise checks.wrong(op.name, "position.table", rule, tuple(table.shape))
    checks.check_floating(op.name, q=q, **biases, **{"position.table": table})
    # Where the host does not know the lengths, the kernels take zeros for rows that are missing.
    known = [layout for layout in layouts if layout.known_on_host]
    if known:
        position.reach(*known)
