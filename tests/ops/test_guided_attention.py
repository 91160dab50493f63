import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from effasr_kernels import PackedLayout, attention, guided_attention, pack
from effasr_kernels.testing.conformance import Case, check_compiler

HEADS, WIDTH, SIGMA = 2, 3, 0.3


def _rows(lengths: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(n, HEADS, WIDTH, dtype=torch.float64) for n in lengths]


def _case(lengths: tuple[int, ...]) -> Case:
    frames = lengths[::-1]
    return Case(
        lambda packed, shared: guided_attention(
            packed["q"].values,
            packed["k"].values,
            packed["v"].values,
            packed["q"].layout,
            packed["k"].layout,
            sigma=SIGMA,
        ),
        {"q": _rows(lengths), "k": _rows(frames), "v": _rows(frames)},
        results=("q", "q"),
    )


def test_keeps_the_contract(check: Callable[[Case], None], lengths: tuple[int, ...]) -> None:
    check(_case(lengths))


def test_compiles() -> None:
    check_compiler(_case((5, 0, 2)))


def test_output_is_that_of_attention(lengths: tuple[int, ...]) -> None:
    q, k, v = pack(_rows(lengths)), pack(_rows(lengths[::-1])), pack(_rows(lengths[::-1]))
    values = q.values, k.values, v.values
    expected = attention(*values, q.layout, k.layout, scale=0.4)
    got, _ = guided_attention(*values, q.layout, k.layout, sigma=SIGMA, scale=0.4)
    torch.testing.assert_close(got, expected)


def test_penalty_matches_one_weight_at_a_time() -> None:
    tokens, frames = (3, 0, 1, 2), (4, 2, 0, 5)
    q, k = _rows(tokens), _rows(frames)
    packed_q, packed_k = pack(q), pack(k)
    values = packed_q.values, packed_k.values, packed_k.values
    _, got = guided_attention(*values, packed_q.layout, packed_k.layout, sigma=SIGMA)
    rows = []
    for q_n, k_n in zip(q, k, strict=True):
        for i, query in enumerate(q_n):
            penalty = torch.zeros(HEADS, dtype=torch.float64)
            for h in range(HEADS if k_n.shape[0] else 0):
                weights = (k_n[:, h] @ query[h] / WIDTH**0.5).softmax(0)
                for j, weight in enumerate(weights):
                    distance = i / q_n.shape[0] - j / k_n.shape[0]
                    penalty[h] += weight * (1 - math.exp(-(distance**2) / (2 * SIGMA**2)))
            rows.append(penalty)
    torch.testing.assert_close(got, torch.stack(rows))


def test_penalty_is_taken_before_dropout() -> None:
    q, k = pack(_rows((6, 3))), pack(_rows((8, 5)))
    values = q.values, k.values, k.values
    y, penalty = guided_attention(*values, q.layout, k.layout, sigma=SIGMA)
    y_dropped, penalty_dropped = guided_attention(
        *values, q.layout, k.layout, sigma=SIGMA, dropout=0.5, seed=1
    )
    assert torch.equal(penalty, penalty_dropped)
    assert not torch.equal(y, y_dropped)
    again, _ = guided_attention(*values, q.layout, k.layout, sigma=SIGMA, dropout=0.5, seed=1)
    assert torch.equal(again, y_dropped)


def test_without_a_sequence_the_penalty_has_its_shape() -> None:
    layout, x = PackedLayout.from_lengths([], rows=3), torch.ones(3, HEADS, WIDTH)
    out, penalty = guided_attention(x, x, x, layout, layout, sigma=SIGMA)
    assert (out.shape, penalty.shape) == (x.shape, (3, HEADS))
    assert not out.any()
    assert not penalty.any()


def test_penalty_is_float32_for_narrow_inputs() -> None:
    q = pack([x.bfloat16() for x in _rows((6, 3))])
    y, penalty = guided_attention(q.values, q.values, q.values, q.layout, q.layout, sigma=SIGMA)
    assert y.dtype == torch.bfloat16
    assert penalty.dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sigma": 0.0}, "`sigma` must be positive, but is 0.0"),
        ({"dropout": -0.1}, r"`dropout` must be in \[0, 1\), but is -0.1"),
        ({"k": torch.zeros(4, 2, 5)}, r"`k` must have shape .* = \(any, 2, 3\)"),
        ({"q": torch.zeros(4, 2, 3).half()}, "`k` must be torch.float16, as `q` is"),
    ],
)
def test_says_what_is_wrong(arguments: dict, message: str) -> None:
    layout = PackedLayout.from_lengths([1, 3])
    given = {name: torch.zeros(4, HEADS, WIDTH) for name in ("q", "k", "v")}
    given |= {"layout_q": layout, "layout_k": layout, "sigma": SIGMA} | arguments
    with pytest.raises(ValueError, match="^guided_attention: " + message):
        guided_attention(**given)
