import math

import torch
from torch import Tensor

from effasr_kernels import attention, guided_attention, pack

HEADS, WIDTH, SIGMA = 2, 3, 0.3


def _rows(lengths: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(n, HEADS, WIDTH, dtype=torch.float64) for n in lengths]


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
