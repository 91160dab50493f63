"""The buffer of relative scores and its gradients; `test_operations.py` has the values."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from effasr_kernels import RelativeBias
from effasr_kernels.attention.triton.delta import row_delta
from effasr_kernels.attention.triton.relative import bias_width, relative_backward, relative_scores
from effasr_kernels.packed import PackedLayout

_SCALE = 0.3


@dataclass(frozen=True)
class Problem:
    """Queries, keys and positions, and a gradient for their scores."""

    q: Tensor
    k: Tensor
    position: RelativeBias
    layout_q: PackedLayout
    layout_k: PackedLayout
    ds: Tensor

    def defined(self, vector: int = 1) -> Tensor:
        """Which columns of the buffer have a key, in whole vectors: bool (T_q, 1, W)."""
        lengths = torch.tensor((*self.layout_k.lengths, 0), device=self.q.device)
        keys = lengths[self.layout_q.sequence_ids()]
        columns = torch.arange(self.ds.shape[-1], device=self.q.device) // vector * vector
        return columns < keys[:, None, None]


def problem(
    dtype: torch.dtype,
    device: torch.device,
    lengths_q: Sequence[int],
    lengths_k: Sequence[int] | None = None,
    *,
    heads: int = 2,
    width: int = 20,
    spare: int = 3,
) -> Problem:
    """Random numbers; NaN in the tail and where nothing is defined; slices of larger tensors."""
    lengths_k = lengths_q if lengths_k is None else lengths_k
    layout_q, layout_k = (
        PackedLayout.from_lengths(
            x, device, rows=sum(x) + more, num_sequences=len(x) + 2, static_max_seqlen=max(x) + 1
        )
        for x, more in ((lengths_q, 3), (lengths_k, 2))
    )
    reach = max(*lengths_q, *lengths_k, 1) + spare
    columns = bias_width(layout_k.max_seqlen_bound)
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(device, dtype)
    q = draw(layout_q.rows, 3, heads, width)[:, 1]
    q[layout_q.total :] = torch.nan
    table = draw(2 * reach - 1, heads, 2, width)[:, :, 1]
    k = draw(layout_k.rows, heads, 2, width)[:, :, 0]
    k[layout_k.total :] = torch.nan
    position = RelativeBias(draw(heads, width), draw(heads, width), table)
    ds = draw(layout_q.rows, heads, columns)
    made = Problem(q, k, position, layout_q, layout_k, ds)
    ds.masked_fill_(~made.defined(), 0).masked_fill_(~made.defined(8), torch.nan)
    return made


def test_the_backward_gets_the_queries_with_the_content_bias(
    dtype: torch.dtype, device: torch.device
) -> None:
    """As a sum of its own rounds them; the scores are the same, to the bit."""
    given = problem(dtype, device, (67, 0, 5, 150), heads=2)
    position, layouts = given.position, (given.layout_q, given.layout_k)
    biased = torch.full_like(given.q, -3, memory_format=torch.contiguous_format)
    found = relative_scores(
        *(given.q, position.position_bias, position.table, *layouts),
        content_bias=position.content_bias,
        biased=biased,
    )
    total = given.layout_q.total
    assert torch.equal(biased[:total], (given.q + position.content_bias)[:total])
    assert bool((biased[total:] == -3).all())
    plain = relative_scores(given.q, position.position_bias, position.table, *layouts)
    hidden = ~given.defined(8)
    assert torch.equal(found.masked_fill(hidden, 0), plain.masked_fill(hidden, 0))


def test_the_backward_gets_the_sums_of_its_rows(dtype: torch.dtype, device: torch.device) -> None:
    """As a launch of its own computes them, to the bit; NaN in the tail is not read."""
    given = problem(dtype, device, (67, 0, 5, 150), (3, 7, 0, 70), heads=2, width=64)
    total = given.layout_q.total
    result, grad = (given.q.contiguous(), given.q.flip(2).contiguous())
    delta = torch.full((2, given.layout_q.rows), -3.0, device=device)
    scores = relative_scores(
        *(given.q, given.position.position_bias, given.position.table),
        *(given.layout_q, given.layout_k),
        result=result,
        grad_result=grad,
        delta=delta,
    )
    assert torch.equal(delta[:, :total], row_delta(grad, result)[:, :total])
    assert bool((delta[:, total:] == -3).all())
    assert scores.masked_fill(~given.defined(8), 0).isfinite().all()


def test_distances_that_none_has_get_no_gradient(device: torch.device) -> None:
    given = problem(torch.float32, device, (3, 5), (4, 2), spare=60)
    layouts = given.layout_q, given.layout_k
    *_, table = relative_backward(given.ds, given.q, given.k, given.position, *layouts, _SCALE)
    used = torch.zeros(table.shape[0], dtype=torch.bool, device=device)
    used[table.shape[0] // 2 - 3 :][:8] = True
    assert not table[~used].any()
    assert table[used].abs().sum((1, 2)).all()


def test_buffer_past_two_billion_elements(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU with 24 GB")
    length, count, heads, width = 4096, 17, 8, 16
    layout = PackedLayout.from_lengths((length,) * count, device)
    alone = PackedLayout.from_lengths((length,), device)
    q = torch.randn(layout.rows, heads, width, device=device, dtype=torch.bfloat16)
    bias, table = torch.randn_like(q[0]), torch.randn_like(q[: 2 * length - 1])
    scores = relative_scores(q, bias, table, layout, layout)
    assert scores.numel() > 2**31
    last, position = q[-length:], RelativeBias(bias, bias, table)
    expected = relative_scores(last, bias, table, alone, alone)
    assert torch.equal(scores[-length:], expected)
    grad_q, *_ = relative_backward(scores, q, q, position, layout, layout, _SCALE)
    expected, *_ = relative_backward(expected, last, last, position, alone, alone, _SCALE)
    assert torch.equal(grad_q[-length:], expected)
