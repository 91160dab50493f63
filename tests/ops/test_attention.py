from typing import Any

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
    pack,
)
from effasr_kernels.shared.dropout import Dropout
from tests.support import operation_cases
from tests.support.conformance import Shared
from tests.support.operation_cases import draw, position_for

HEADS, WIDTH = 2, 4
POSITIONS = ("none", "part", "relative")
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


def _turned(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotation as the product of complex numbers: channels c and c + R/2 are one of them."""
    half = int(WIDTH * rotary.fraction) // 2
    frequencies = rotary.base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(x.shape[0])[:, None, None] * frequencies
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.exp(1j * angles)
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], dim=-1)


def _visible_keys(context: Context, query: int, rows: int) -> list[int]:
    """The rule of `Context`, one key at a time."""
    first = query - query % context.chunk
    return [
        key
        for key in range(rows)
        if (context.left is None or key >= first - context.left)
        and (context.right is None or key < first + context.chunk + context.right)
    ]


def _expected(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kind: str,
    shared: Shared,
    *,
    causal: bool = False,
    context: Context | None = None,
) -> Tensor:
    """One sequence, one score at a time."""
    position = position_for(kind, shared)
    if isinstance(position, Rotary):
        q, k = _turned(q, position), _turned(k, position)
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    for h in range(q.shape[1]):
        for i in range(q.shape[0]):
            keys = list(range(min(i + 1, k.shape[0]) if causal else k.shape[0]))
            keys = keys if context is None else _visible_keys(context, i, k.shape[0])
            scores = []
            for j in keys:
                score = q[i, h] @ k[j, h]
                if isinstance(position, RelativeBias):
                    score += position.content_bias[h] @ k[j, h]
                    distance = position.table[i - j + position.table.shape[0] // 2, h]
                    score += (q[i, h] + position.position_bias[h]) @ distance
                scores.append(0.7 * WIDTH**-0.5 * score)
            if scores:
                out[i, h] = torch.stack(scores).softmax(0) @ v[keys, h]
    return out


def _assert_expected(lengths: tuple[int, ...], kind: str, **options: Any) -> None:
    """The factory and the loop take the same options, but for dropout."""
    case = operation_cases.attention(lengths, kind, **options)(None)
    result = case.run({n: pack(list(x)) for n, x in case.packed.items()}, case.shared)
    rules = {name: options[name] for name in ("causal", "context") if name in options}
    pieces = zip(*case.packed.values(), strict=True)
    expected = [_expected(*piece, kind, case.shared, **rules) for piece in pieces]
    torch.testing.assert_close(result, torch.cat(expected))


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        *(
            ((5, 0, 1, 3), {"causal": causal, "lengths_k": lengths_k})
            for causal in (False, True)
            for lengths_k in (None, (3, 1, 0, 5))
        ),
        *(((5, 0, 7), {"causal": x, "heads": 6, "group": 3}) for x in (False, True)),
        # The table of a relative position has no more distances than the context needs.
        *(
            ((11,), {"context": context, "dropout": dropout, "seed": 1})
            for context in CONTEXTS
            for dropout in (0.0, 0.5)
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", POSITIONS)
def test_matches_one_score_at_a_time(
    kind: str, lengths: tuple[int, ...], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "relative" and "group" in options:
        pytest.skip("heads do not share keys there")
    # Dropout of some rate takes a path of its own, whatever it drops.
    monkeypatch.setattr(Dropout, "__call__", lambda _, x: x)
    _assert_expected(lengths, kind, **options)


@pytest.mark.parametrize("context", CONTEXTS, ids=str)
def test_counts_the_pairs_that_are_seen(context: Context) -> None:
    lengths = (7, 0, 1, 12)
    pairs = sum(len(_visible_keys(context, i, rows)) for rows in lengths for i in range(rows))
    layout = PackedLayout.from_lengths(lengths, rows=25)
    x = torch.zeros(25, HEADS, WIDTH)
    with FlopCounterMode(display=False) as counter:
        attention(x, x, x, layout, context=context)
    assert counter.get_total_flops() == 4 * HEADS * WIDTH * pairs


def test_other_backends_refuse_a_context() -> None:
    x = torch.zeros(3, HEADS, WIDTH)
    with pytest.raises(BackendUnavailable, match="does not support a context"):
        attention(x, x, x, PackedLayout.from_lengths([3]), context=Context(1), backend="cpp")


def test_scale_is_one_over_the_root_of_the_width_by_default() -> None:
    q, layout = draw(5, HEADS, WIDTH), PackedLayout.from_lengths((3, 2))
    expected = attention(q, q, q, layout, scale=WIDTH**-0.5)
    torch.testing.assert_close(attention(q, q, q, layout), expected)


def test_is_what_parakeet_computes() -> None:
    """Hugging Face's table runs from the largest distance to the smallest, ours upwards."""
    modeling = pytest.importorskip("transformers.models.parakeet.modeling_parakeet")
    configuration = pytest.importorskip("transformers.models.parakeet.configuration_parakeet")
    frames = 7
    config = configuration.ParakeetEncoderConfig(
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        attention_dropout=0.0,
    )
    config._attn_implementation = "eager"
    theirs = modeling.ParakeetEncoderAttention(config, 0).double()
    torch.nn.init.normal_(theirs.bias_u)
    torch.nn.init.normal_(theirs.bias_v)
    x = torch.randn(1, frames, HEADS * WIDTH, dtype=torch.float64)
    embeddings = modeling.ParakeetEncoderRelPositionalEncoding(config)(x)
    expected, _ = theirs(x, embeddings)

    heads = lambda y: y.view(-1, HEADS, WIDTH)
    q, k, v = (heads(f(x[0])) for f in (theirs.q_proj, theirs.k_proj, theirs.v_proj))
    table = heads(theirs.relative_k_proj(embeddings[0].double())).flip(0)
    position = RelativeBias(theirs.bias_u, theirs.bias_v, table)
    layout = PackedLayout.from_lengths([frames])
    y = theirs.o_proj(attention(q, k, v, layout, position=position).flatten(1))
    torch.testing.assert_close(y, expected[0])


def test_dropout_drops_and_keeps_the_mean() -> None:
    q = torch.zeros(500, 1, 8)
    v = torch.ones(500, 1, 8)
    y = attention(q, q, v, PackedLayout.from_lengths([500]), dropout=0.25, seed=1)[:, 0, 0]
    # Each row is the mean of 500 weights of 0 or 4/3: standard deviation (0.25/0.75/500) ** 0.5.
    deviation = (0.25 / 0.75 / 500) ** 0.5
    assert abs(y.mean() - 1) < 5 * deviation / 500**0.5
    assert 0.8 * deviation < y.std() < 1.2 * deviation


@pytest.mark.parametrize("kind", POSITIONS)
def test_dropout_repeats_with_its_seed_and_has_the_gradient_of_its_value(kind: str) -> None:
    case = operation_cases.attention((5,), kind)(None)
    layout, shared = PackedLayout.from_lengths((3, 2)), case.shared
    leaves = [x.requires_grad_() for x in (case.packed["q"][0], *shared.values())]

    def call(q: Tensor, *values: Tensor, seed: int | None = 3) -> Tensor:
        position = position_for(kind, dict(zip(shared, values, strict=True)))
        return attention(q, q, q, layout, position=position, dropout=0.5, seed=seed)

    torch.autograd.gradcheck(call, tuple(leaves))
    assert torch.equal(call(*leaves), call(*leaves))
    assert not torch.equal(call(*leaves), call(*leaves, seed=4))
    torch.manual_seed(5)
    first = call(*leaves, seed=None)
    assert not torch.equal(call(*leaves, seed=None), first)
    torch.manual_seed(5)
    assert torch.equal(call(*leaves, seed=None), first)


def test_a_seed_drops_by_what_came_before() -> None:
    """As `Dropout` says: neither a tail nor later sequences matter, but the order does."""
    x = torch.randn(9, 2, 4)

    def drop(rows: Tensor, lengths: list[int]) -> Tensor:
        layout = PackedLayout.from_lengths(lengths, rows=rows.shape[0])
        return attention(rows, rows, rows, layout, dropout=0.5, seed=3)

    expected = drop(x[:4], [4])
    assert torch.equal(drop(x, [4])[:4], expected)
    assert torch.equal(drop(x, [4, 5])[:4], expected)
    assert not torch.equal(drop(torch.cat([x[4:], x[:4]]), [5, 4])[5:], expected)
