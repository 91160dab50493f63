"""`attention` with a limited context."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from effasr_kernels import (
    BackendUnavailable,
    Context,
    PackedLayout,
    RelativeBias,
    Rotary,
    attention,
)
from effasr_kernels.testing.conformance import Case, Packed, Shared, check_compiler

HEADS, WIDTH = 2, 4
POSITIONS = ("none", "rotary", "relative")
CONTEXTS = (
    Context(2, 0, 3),
    Context(0, 0, 2),
    Context(1, 2, 1),
    Context(3, 1, 2),
    Context(None, 0, 1),
    Context(None, 0, 4),
    Context(2, None, 3),
    Context(None, None, 2),
    Context(0, 0, 100),
)


def _seen(context: Context, query: int, rows: int) -> list[int]:
    """The rule of the class, one key at a time."""
    first = query - query % context.chunk
    return [
        key
        for key in range(rows)
        if (context.left is None or key >= first - context.left)
        and (context.right is None or key < first + context.chunk + context.right)
    ]


def _position(kind: str, shared: Shared) -> Rotary | RelativeBias | None:
    if kind == "relative":
        return RelativeBias(shared["content_bias"], shared["position_bias"], shared["table"])
    return Rotary(base=100.0) if kind == "rotary" else None


def _case(lengths: tuple[int, ...], kind: str, context: Context) -> Case:
    def run(packed: Packed, shared: Shared) -> Tensor:
        q, k, v = (packed[name].values for name in "qkv")
        position, layout = _position(kind, shared), packed["q"].layout
        return attention(q, k, v, layout, context=context, position=position, scale=0.7)

    draw = lambda *shape: torch.randn(shape, dtype=torch.float64)
    shared = {}
    if kind == "relative":
        # No longer than the context needs.
        reach = min(max(lengths), context.reach)
        shared = {name: draw(HEADS, WIDTH) for name in ("content_bias", "position_bias")}
        shared["table"] = draw(2 * max(reach, 1) - 1, HEADS, WIDTH)
    packed = {name: [draw(n, HEADS, WIDTH) for n in lengths] for name in "qkv"}
    return Case(run, packed, shared, results=("q",))


@pytest.mark.parametrize("context", [Context(2, 0, 3), Context(1, 2, 1)], ids=str)
@pytest.mark.parametrize("kind", POSITIONS)
def test_keeps_the_contract(
    check: Callable[[Case], None], lengths: tuple[int, ...], kind: str, context: Context
) -> None:
    check(_case(lengths, kind, context))


@pytest.mark.parametrize("kind", POSITIONS)
def test_compiles(kind: str) -> None:
    check_compiler(_case((5, 0, 2), kind, Context(2, 0, 3)))


@pytest.mark.parametrize("context", CONTEXTS, ids=str)
@pytest.mark.parametrize("dropout", [0.0, 1e-9])
@pytest.mark.parametrize("kind", POSITIONS)
def test_is_attention_of_each_query_to_what_it_sees(
    kind: str, dropout: float, context: Context
) -> None:
    """One query and its keys alone, with the scores of the whole sequence."""
    rows = 11
    case = _case((rows,), kind, context)
    q, k, v = (case.packed[name][0] for name in "qkv")
    position, layout = _position(kind, case.shared), PackedLayout.from_lengths([rows])
    options = {"scale": 0.7, "dropout": dropout, "seed": 1}
    found = attention(q, k, v, layout, context=context, position=position, **options)
    if isinstance(position, RelativeBias):
        reach = (position.table.shape[0] + 1) // 2
        wide = torch.zeros(2 * rows - 1, HEADS, WIDTH, dtype=torch.float64)
        wide[rows - reach : rows + reach - 1] = position.table
        position = RelativeBias(position.content_bias, position.position_bias, wide)
    for query in range(rows):
        # A value that no other key has shows the weight of each key.
        one_hot = torch.eye(rows, dtype=torch.float64)[:, None].expand(rows, HEADS, rows)
        weights = _weights(q, k, one_hot, layout, position)[query]
        seen = _seen(context, query, rows)
        weights = weights[:, seen] / weights[:, seen].sum(-1, keepdim=True)
        expected = torch.einsum("hj,jhd->hd", weights, v[seen])
        torch.testing.assert_close(found[query], expected)


def _weights(
    q: Tensor,
    k: Tensor,
    one_hot: Tensor,
    layout: PackedLayout,
    position: Rotary | RelativeBias | None,
) -> Tensor:
    """The weights of full attention: (T_q, H, T_k), by values in as many calls as needed."""
    parts = one_hot.split(WIDTH, -1)
    outs = []
    for part in parts:
        v = torch.nn.functional.pad(part, (0, WIDTH - part.shape[-1]))
        outs.append(attention(q, k, v, layout, position=position, scale=0.7)[..., : part.shape[-1]])
    return torch.cat(outs, -1)


@pytest.mark.parametrize("context", CONTEXTS, ids=str)
def test_counts_the_pairs_that_are_seen(context: Context) -> None:
    lengths = (7, 0, 1, 12)
    pairs = sum(len(_seen(context, i, rows)) for rows in lengths for i in range(rows))
    layout = PackedLayout.from_lengths(lengths, rows=25)
    x = torch.zeros(25, HEADS, WIDTH)
    with FlopCounterMode(display=False) as counter:
        attention(x, x, x, layout, context=context)
    assert counter.get_total_flops() == 4 * HEADS * WIDTH * pairs


def test_a_context_of_everything_changes_nothing() -> None:
    layout = PackedLayout.from_lengths([5, 9])
    q, k, v = torch.randn(3, 14, HEADS, WIDTH).unbind()
    expected = attention(q, k, v, layout, causal=True)
    torch.testing.assert_close(attention(q, k, v, layout, context=Context(None)), expected)
    expected = attention(q, k, v, layout)
    for context in (Context(None, None), Context(0, 0, 9)):
        torch.testing.assert_close(attention(q, k, v, layout, context=context), expected)


def test_the_result_of_a_chunk_does_not_depend_on_later_rows() -> None:
    layout = PackedLayout.from_lengths([9])
    x = torch.randn(9, HEADS, WIDTH)
    whole = attention(x, x, x, layout, context=Context(4, 0, 3))
    part = attention(x[:6], x[:6], x[:6], PackedLayout.from_lengths([6]), context=Context(4, 0, 3))
    torch.testing.assert_close(whole[:6], part)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"left": -1}, "`left` must be a whole number of at least 0 or None, for no limit, .* -1"),
        ({"left": 2, "right": -3}, "`right` must be a whole number of at least 0 .* but is -3"),
        ({"left": 2, "chunk": 0}, "`chunk` must be a whole number of at least 1, but is 0"),
        ({"left": 2, "chunk": None}, "`chunk` must be a whole number of at least 1, .* None"),
        ({"left": 2.5}, r"`left` must be a whole number of at least 0 .* but is 2\.5"),
    ],
)
def test_names_the_wrong_number(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Context(**options)


def test_refuses_what_has_no_chunks_in_common() -> None:
    layout, other = (PackedLayout.from_lengths([3]) for _ in range(2))
    x = torch.zeros(3, HEADS, WIDTH)
    with pytest.raises(ValueError, match="`context` must be None where keys have a layout"):
        attention(x, x, x, layout, other, context=Context(1))
    with pytest.raises(ValueError, match="`context` must be None with `causal`"):
        attention(x, x, x, layout, causal=True, context=Context(1))
    table = torch.zeros(5, HEADS, WIDTH)
    position = RelativeBias(x[0], x[0], table)
    layout = PackedLayout.from_lengths([9])
    x = torch.zeros(9, HEADS, WIDTH)
    with pytest.raises(ValueError, match=r"at least 2 \* 4 - 1 rows, for all distances in the"):
        attention(x, x, x, layout, position=position, context=Context(2, 0, 2))


def test_other_backends_say_that_they_have_none() -> None:
    x = torch.zeros(3, HEADS, WIDTH)
    with pytest.raises(BackendUnavailable, match="does not support a context"):
        attention(x, x, x, PackedLayout.from_lengths([3]), context=Context(1), backend="cpp")
