"""Attention within packed sequences, and from one packed batch to another."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from effasr_kernels.attention.context import Context
from effasr_kernels.attention.order import ORDER
from effasr_kernels.attention.position import RelativeBias, Rotary
from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime import checks
from effasr_kernels.runtime.arguments import Kind
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import FRAMES, HEADS, WIDTH, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.flops import known_lengths, pairs
from effasr_kernels.runtime.torch_op import DifferentiableOp
from effasr_kernels.shared.dropout import realised_rate, seed_for

_ROTARY = Kind(
    ("float[]? {}",),
    lambda rotary: (None if rotary is None else [rotary.base, rotary.fraction],),
    lambda values: None if values is None else Rotary(*values),
)


def _context(left: int, right: int, chunk: int) -> Context:
    return Context(None if left < 0 else left, None if right < 0 else right, chunk)


_CONTEXT = Kind(
    ("int[]? {}",),
    # Schemas have no lists of optional numbers; -1 stands for no limit.
    lambda context: (
        None
        if context is None
        else [-1 if x is None else x for x in (context.left, context.right)] + [context.chunk],
    ),
    lambda values: None if values is None else _context(*values),
)


@dataclass(frozen=True, slots=True)
class AttentionArguments:
    q: Tensor
    k: Tensor
    v: Tensor
    layout_q: PackedLayout
    layout_k: PackedLayout
    causal: bool
    scale: float
    rotary: Rotary | None = field(metadata={"kind": _ROTARY})
    content_bias: Tensor | None
    position_bias: Tensor | None
    position_table: Tensor | None
    dropout: float
    seed: Tensor | None
    context: Context | None = field(default=None, metadata={"kind": _CONTEXT})

    @property
    def group(self) -> int:
        """Heads of queries that share one head of keys and values."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def relative(self) -> RelativeBias | None:
        if self.content_bias is None or self.position_bias is None or self.position_table is None:
            return None
        return RelativeBias(self.content_bias, self.position_bias, self.position_table)


def _flops(a: AttentionArguments) -> int:
    # Scores and weighted sum; a relative position adds one product per pair.
    products = 2 if a.content_bias is None else 3
    if a.context is None:
        seen = pairs(a.layout_q, a.layout_k, a.causal)
    else:
        seen = sum(map(a.context.pairs, known_lengths(a.layout_q)))
    return 2 * products * seen * a.q.shape[1] * a.q.shape[2]


def _self_attention(inputs: ExampleInputs, *, key_heads: int = HEADS, **options: Any) -> Keywords:
    layout = inputs.frames()
    q, k, v = (
        inputs.floating(layout.rows, heads, WIDTH) for heads in (HEADS, key_heads, key_heads)
    )
    return {"q": q, "k": k, "v": v, "layout_q": layout, **options}


def _relative(inputs: ExampleInputs, **options: Any) -> Keywords:
    arguments = _self_attention(inputs, **options)
    biases = inputs.floating(HEADS, WIDTH), inputs.floating(HEADS, WIDTH)
    table = inputs.floating(2 * max(FRAMES) - 1, HEADS, WIDTH)
    return {**arguments, "position": RelativeBias(*biases, table)}


OPERATION = DifferentiableOp(
    "attention",
    AttentionArguments,
    {
        Backend.TRITON: "effasr_kernels.attention.triton.backend",
        Backend.CUDA: "effasr_kernels.attention._cuda",
        Backend.VARLEN: "effasr_kernels.attention.backends.varlen",
        Backend.FLASH_ATTN_2: "effasr_kernels.attention.backends.packages:VERSION_2",
        Backend.FLASH_ATTN_3: "effasr_kernels.attention.backends.packages:VERSION_3",
        Backend.FLASH_ATTN_4: "effasr_kernels.attention.backends.packages:VERSION_4",
        Backend.CPP: "effasr_kernels.attention._cpp",
        Backend.REFERENCE: "effasr_kernels.attention.reference",
    },
    order=lambda a: ORDER,
    outputs=lambda a: a.q.new_empty(a.q.shape),
    flops=_flops,
    examples=[
        Example("attention, relative", _relative, 6 * HEADS * WIDTH * (24 * 24 + 16 * 16)),
        Example(
            "attention, rotary",
            lambda inputs: _self_attention(inputs, position=Rotary()),
            4 * HEADS * WIDTH * (24 * 24 + 16 * 16),
        ),
        Example(
            "attention, causal",
            lambda inputs: _self_attention(inputs, causal=True),
            4 * HEADS * WIDTH * (24 * 25 // 2 + 16 * 17 // 2),
        ),
        Example(
            "attention, grouped queries",
            lambda inputs: _self_attention(inputs, key_heads=1, causal=True, position=Rotary()),
            4 * HEADS * WIDTH * (24 * 25 // 2 + 16 * 17 // 2),
        ),
        Example(
            "attention, relative in chunks",
            lambda inputs: _relative(inputs, context=Context(4, 0, 8)),
            # The first chunk of 8 sees itself, the others 4 keys more.
            6 * HEADS * WIDTH * (8 * (8 + 12 + 12) + 8 * (8 + 12)),
        ),
    ],
)

_NAME = OPERATION.name


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_q: PackedLayout,
    layout_k: PackedLayout | None = None,
    *,
    causal: bool = False,
    context: Context | None = None,
    scale: float | None = None,
    position: Rotary | RelativeBias | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    backend: Backend | str | None = None,
) -> Tensor:
    r"""Attend from each query to the keys of its own sequence.

    .. math::
        y_i = \sum_j \mathrm{dropout}(A)_{ij} v_j, \qquad
        A_{ij} = \mathrm{softmax}_j(s_{ij}), \qquad s_{ij} = \mathrm{scale} \; q_i^\top k_j

    for every head; see `Rotary` and `RelativeBias` for the scores s with a ``position``. Head h of
    the queries reads head ``h // (H / H_k)`` of the keys and values: with H_k less than H that is
    grouped-query attention, for which nothing is repeated. Sums are computed in float32 (float64
    for float64). The output is zero for a query whose sequence has no key, and in the tail. Under
    autocast the floating arguments are cast as for a matrix product.

    Args:
        q: (T_q, H, D), floating point.
        k: (T_k, H_k, D), the dtype of ``q``; H_k divides H, and is H for a `RelativeBias`.
        v: (T_k, H_k, D), the dtype of ``q``.
        layout_q: Layout of ``q``.
        layout_k: Layout of ``k`` and ``v``, with as many sequences as ``layout_q``, the default.
        causal: Whether query i attends only to keys 0 to i of its sequence.
        context: Limits each query to the keys near its chunk, in self-attention; by default a query
            attends to all keys of its sequence. Work falls with it.
        scale: Factor of the scores, ``D ** -0.5`` by default.
        position: Position encoding of the scores; None by default. Its floating tensors have the
            dtype of ``q``.
        dropout: Probability, in [0, 1), to drop an attention weight; rounded to a multiple of
            1/256.
        seed: Seed of the dropout; drawn from torch's global generator by default. Equal calls with
            the same seed, implementation and kind of device drop the same weights.
        backend: Implementation to use; by default the fastest that supports the call.

    Returns:
        (T_q, H, D), the dtype of ``q``.

    Raises:
        ValueError: An argument is invalid.
        BackendUnavailable: See `effasr_kernels.runtime.dispatch.Dispatcher.select`.

    References:
        Vaswani et al., 2017, https://arxiv.org/abs/1706.03762; Ainslie et al., 2023, for
        grouped-query attention, https://arxiv.org/abs/2305.13245.
    """
    layout_k = layout_q if layout_k is None else layout_k
    content_bias = position_bias = table = None
    if isinstance(position, RelativeBias):
        content_bias, position_bias, table = (
            position.content_bias,
            position.position_bias,
            position.table,
        )
    q, k, v, content_bias, position_bias, table = checks.under_autocast(
        q, k, v, content_bias, position_bias, table
    )
    checks.check_attention(_NAME, q, k, v, layout_q, layout_k, dropout, grouped=True)
    dropout = realised_rate(dropout)
    arguments = AttentionArguments(
        *(q, k, v, layout_q, layout_k, causal),
        q.shape[-1] ** -0.5 if scale is None else scale,
        position if isinstance(position, Rotary) else None,
        *(content_bias, position_bias, table),
        dropout,
        seed_for(dropout, seed, q.device),
        context,
    )
    if context is not None:
        _check_context(arguments)
    if table is None:
        checks.check_floating(_NAME, q=q, k=k, v=v)
    else:
        _check_relative(arguments)
    return OPERATION(arguments, backend)


def _check_context(a: AttentionArguments) -> None:
    if a.layout_k is not a.layout_q:
        rule = "be None where keys have a layout of their own, for it is of self-attention"
        raise checks.wrong(_NAME, "context", rule, a.context)
    if a.causal:
        rule = "be None with `causal`: Context(None, 0, 1) is causal, too"
        raise checks.wrong(_NAME, "context", rule, a.context)


def _check_relative(a: AttentionArguments) -> None:
    position, (_, heads, width) = a.relative, a.q.shape
    assert position is not None
    if a.group > 1:
        rule = f"have {heads} heads, as `q`, where `position` is a RelativeBias"
        raise checks.wrong(_NAME, "k", rule, tuple(a.k.shape))
    biases = {
        "position.content_bias": position.content_bias,
        "position.position_bias": position.position_bias,
    }
    for name, bias in biases.items():
        checks.check_shape(_NAME, name, bias, "(H, D)", heads, width)
    table = position.table
    checks.check_shape(_NAME, "position.table", table, "(2L-1, H, D)", None, heads, width)
    if table.shape[0] % 2 == 0:
        rule = "have an odd number of rows"
        raise checks.wrong(_NAME, "position.table", rule, tuple(table.shape))
    tensors = {"q": a.q, "k": a.k, "v": a.v, **biases, "position.table": table}
    checks.check_floating(_NAME, **tensors)
    # If the host does not know the lengths, kernels read zeros for missing rows of the table.
    if a.layout_q.known_on_host:
        position.reach(a.layout_q, context=a.context)
    if a.layout_k is not a.layout_q and a.layout_k.known_on_host:
        position.reach(a.layout_k)
