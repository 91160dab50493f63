from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from effasr_kernels import PackedLayout, RelativeBias, Rotary, attention, pack
from effasr_kernels.testing.conformance import Case, Packed, Shared, check_compiler

HEADS, WIDTH, REACH = 2, 4, 40
POSITIONS = ("none", "rotary", "relative")


def _position(kind: str, shared: Shared) -> Rotary | RelativeBias | None:
    if kind == "relative":
        return RelativeBias(shared["content_bias"], shared["position_bias"], shared["table"])
    return Rotary(base=100.0, fraction=0.5) if kind == "rotary" else None


def _shared(kind: str) -> dict[str, Tensor]:
    if kind != "relative":
        return {}
    shapes = {
        "content_bias": (HEADS, WIDTH),
        "position_bias": (HEADS, WIDTH),
        "table": (2 * REACH - 1, HEADS, WIDTH),
    }
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def _rows(lengths: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(n, HEADS, WIDTH, dtype=torch.float64) for n in lengths]


def _case(
    lengths: tuple[int, ...], kind: str, *, causal: bool = False, across: bool = False
) -> Case:
    lengths_k = lengths[::-1] if across else lengths

    def run(packed: Packed, shared: Shared) -> Tensor:
        q, k, v = packed["q"], packed["k"], packed["v"]
        layout_k = k.layout if across else None
        position = _position(kind, shared)
        return attention(
            q.values,
            k.values,
            v.values,
            q.layout,
            layout_k,
            causal=causal,
            position=position,
            scale=0.7,
        )

    packed = {"q": _rows(lengths), "k": _rows(lengths_k), "v": _rows(lengths_k)}
    return Case(run, packed, _shared(kind), results=("q",))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", POSITIONS)
def test_keeps_the_contract(
    check: Callable[[Case], None], lengths: tuple[int, ...], kind: str, causal: bool
) -> None:
    check(_case(lengths, kind, causal=causal))


@pytest.mark.parametrize("kind", POSITIONS)
def test_keeps_the_contract_from_one_batch_to_another(
    check: Callable[[Case], None], lengths: tuple[int, ...], kind: str
) -> None:
    check(_case(lengths, kind, across=True))


@pytest.mark.parametrize("kind", POSITIONS)
def test_compiles(kind: str) -> None:
    check_compiler(_case((5, 0, 2), kind))


def _turned(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotation as the product of complex numbers: channels c and c + R/2 are one of them."""
    half = int(WIDTH * rotary.fraction) // 2
    frequencies = rotary.base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(x.shape[0])[:, None, None] * frequencies
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.exp(1j * angles)
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], dim=-1)


def _expected(q: Tensor, k: Tensor, v: Tensor, kind: str, causal: bool, shared: Shared) -> Tensor:
    """One sequence, one score at a time."""
    position = _position(kind, shared)
    if isinstance(position, Rotary):
        q, k = _turned(q, position), _turned(k, position)
    out = torch.zeros_like(q)
    for h in range(HEADS):
        for i in range(q.shape[0]):
            seen = range(min(i + 1, k.shape[0])) if causal else range(k.shape[0])
            scores = []
            for j in seen:
                score = q[i, h] @ k[j, h]
                if isinstance(position, RelativeBias):
                    score += position.content_bias[h] @ k[j, h]
                    distance = position.table[i - j + REACH - 1, h]
                    score += (q[i, h] + position.position_bias[h]) @ distance
                scores.append(0.7 * score)
            if scores:
                out[i, h] = torch.stack(scores).softmax(0) @ v[: len(scores), h]
    return out


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", POSITIONS)
def test_matches_one_score_at_a_time(kind: str, causal: bool, across: bool) -> None:
    case = _case((5, 0, 1, 3), kind, causal=causal, across=across)
    packed = {name: pack(list(pieces)) for name, pieces in case.packed.items()}
    got = case.run(packed, case.shared)
    assert isinstance(got, Tensor)
    pieces = zip(*case.packed.values(), strict=True)
    expected = [_expected(*each, kind, causal, case.shared) for each in pieces]
    torch.testing.assert_close(got, torch.cat(expected))


def test_scale_is_one_over_the_root_of_the_width_by_default() -> None:
    packed = pack(_rows((3, 2)))
    q, layout = packed.values, packed.layout
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
    got = theirs.o_proj(attention(q, k, v, layout, position=position).flatten(1))
    torch.testing.assert_close(got, expected[0])


def test_dropout_drops_and_keeps_the_mean() -> None:
    q = torch.zeros(500, 1, 8)
    v = torch.ones(500, 1, 8)
    layout = PackedLayout.from_lengths([500])
    y = attention(q, q, v, layout, dropout=0.25, seed=1)[:, 0, 0]
    # Each row is the mean of 500 weights of 0 or 4/3: standard deviation (0.25/0.75/500) ** 0.5.
    deviation = (0.25 / 0.75 / 500) ** 0.5
    assert abs(y.mean() - 1) < 5 * deviation / 500**0.5
    assert 0.8 * deviation < y.std() < 1.2 * deviation


@pytest.mark.parametrize("kind", POSITIONS)
def test_dropout_repeats_with_its_seed(kind: str) -> None:
    packed = pack(_rows((6, 3)))
    position = _position(kind, _shared(kind))

    def call(seed: int | None) -> Tensor:
        q = packed.values
        return attention(q, q, q, packed.layout, position=position, dropout=0.5, seed=seed)

    assert torch.equal(call(3), call(3))
    assert not torch.equal(call(3), call(4))
    torch.manual_seed(5)
    first = call(None)
    assert not torch.equal(call(None), first)
    torch.manual_seed(5)
    assert torch.equal(call(None), first)


@pytest.mark.parametrize("kind", POSITIONS)
def test_dropout_has_the_gradient_of_its_value(kind: str) -> None:
    packed = pack(_rows((3, 2)))
    shared = _shared(kind)
    leaves = [packed.values, *shared.values()]
    for leaf in leaves:
        leaf.requires_grad_()

    def call(q: Tensor, *values: Tensor) -> Tensor:
        position = _position(kind, dict(zip(shared, values, strict=True)))
        return attention(q, q, q, packed.layout, position=position, dropout=0.5, seed=3)

    torch.autograd.gradcheck(call, tuple(leaves))


BIAS = torch.zeros(HEADS, WIDTH)


def _relative(table: Tensor, content_bias: Tensor = BIAS) -> RelativeBias:
    return RelativeBias(content_bias, BIAS, table)


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": _zeros(4, 2)}, r"`q` must have shape \(T_q, H, D\) = .*but is \(4, 2\)"),
        ({"q": _zeros(5, 2, 4)}, r"`q` must have 4 rows, as `layout_q` does, but is \(5, 2, 4\)"),
        (
            {"k": _zeros(4, 3, 4)},
            r"`k` must have a number of heads that divides 2, .* but is \(4, 3, 4\)",
        ),
        ({"v": _zeros(3, 2, 4)}, r"`v` must have 4 rows, as `layout_k` does"),
        ({"v": _zeros(4, 2, 4).double()}, r"`v` must be torch.float32, as `q` is.*float64"),
        (
            {"layout_k": PackedLayout.from_lengths([4])},
            "`layout_k` must have 2 sequences, as `layout_q` does, but is 1",
        ),
        (
            {"layout_q": PackedLayout.from_lengths([1, 3], "meta")},
            "`layout_q` must be on cpu, as `q` is, but is meta",
        ),
        ({"dropout": 1.0}, r"`dropout` must be in \[0, 1\), but is 1.0"),
        ({"position": _relative(_zeros(6, 2, 4))}, "`position.table` must have an odd number"),
        ({"position": _relative(_zeros(7, 4))}, r"`position.table` must have shape \(2L-1, H, D\)"),
        (
            {"position": _relative(_zeros(3, 2, 4))},
            r"`position.table` must have at least 2 \* 3 - 1 rows, for the longest sequence",
        ),
        (
            {"position": _relative(_zeros(5, 2, 4), _zeros(8))},
            r"`position.content_bias` must have shape \(H, D\) = \(2, 4\), but is \(8,\)",
        ),
        (
            {"position": _relative(_zeros(5, 2, 4).double())},
            r"`position.table` must be torch.float32, as `q` is, but is torch.float64",
        ),
    ],
)
def test_says_what_is_wrong(arguments: dict, message: str) -> None:
    given = {name: _zeros(4, HEADS, WIDTH) for name in ("q", "k", "v")}
    given |= {"layout_q": PackedLayout.from_lengths([1, 3])} | arguments
    with pytest.raises(ValueError, match="^attention: " + message):
        attention(**given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"base": 0.0}, "Rotary: `base` must be positive, but is 0.0"),
        ({"fraction": 0.0}, r"Rotary: `fraction` must be in \(0, 1\], but is 0.0"),
        ({"fraction": 1.5}, r"Rotary: `fraction` must be in \(0, 1\], but is 1.5"),
    ],
)
def test_rotary_says_what_is_wrong(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rotary(**arguments)


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
