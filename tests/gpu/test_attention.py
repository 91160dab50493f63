from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from effasr_kernels import Context, PackedLayout, RelativeBias, Rotary, attention
from effasr_kernels.attention.triton.delta import row_delta
from effasr_kernels.attention.triton.relative import bias_width, relative_backward, relative_scores
from effasr_kernels.runtime.launch import recording
from effasr_kernels.shared.joined import unbind_parts
from tests.support import operation_cases
from tests.support.operation_cases import position_for

HEADS = 2


@pytest.mark.parametrize("kind", ["none", "rotary", "partly rotary", "relative", "cross"])
@pytest.mark.representative(kind=["relative", "cross"])
def test_gradients_of_one_product_are_one_tensor(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    layout = PackedLayout.from_lengths((5, 12), device, rows=20)
    position: Any = None
    if kind.endswith("rotary"):
        position = Rotary(fraction=1.0 if kind == "rotary" else 0.5)
    elif kind == "relative":
        tables = [torch.randn(rows, HEADS, 16).to(device, dtype) for rows in (1, 1, 23)]
        position = RelativeBias(tables[0][0], tables[1][0], tables[2])
    is_cross = kind == "cross"
    layout_q = PackedLayout.from_lengths((9, 10), device) if is_cross else layout
    whole = torch.randn(20, 2 if is_cross else 3, HEADS, 16).to(device, dtype)
    # The queries of the other kind are of another product.
    apart = [torch.randn(19, HEADS, 16).to(device, dtype).requires_grad_()] if is_cross else []
    dy = torch.randn(layout_q.rows, HEADS, 16).to(device, dtype)

    def gradients(*parts: Tensor) -> tuple[Tensor, ...]:
        given = [*apart, *parts]
        y = attention(*given, layout_q, layout, position=position, backend="triton")
        return torch.autograd.grad(y, given, dy)

    expected = gradients(*(x.contiguous().requires_grad_() for x in whole.unbind(1)))
    found = gradients(*unbind_parts(whole.clone().requires_grad_()))
    assert all(map(torch.equal, found, expected))
    joined = found[len(apart) :]
    size = HEADS * 16
    one = joined[0].untyped_storage().data_ptr()
    for number, gradient in enumerate(joined):
        if kind == "partly rotary":
            assert gradient.is_contiguous()
            continue
        assert gradient.untyped_storage().data_ptr() == one
        assert gradient.stride() == (len(joined) * size, 16, 1)
        assert gradient.storage_offset() == number * size


def test_drops_the_same_beside_other_sequences(device: torch.device) -> None:
    """Not the lengths of the others nor a tail, but a sequence's number and the seed."""
    x = torch.randn(20, HEADS, 16, device=device)

    def dropped(before: int, after: int, tail: int, seed: int | Tensor) -> Tensor:
        rows = before + 20 + after + tail
        layout = PackedLayout.from_lengths((before, 20, after), device, rows=rows)
        packed = torch.randn(rows, HEADS, 16, device=device)
        packed[before : before + 20] = x
        y = attention(packed, packed, packed, layout, dropout=0.5, seed=seed, backend="triton")
        return y[before : before + 20]

    expected = dropped(3, 4, 0, 5)
    assert torch.equal(dropped(40, 0, 7, 5), expected)
    assert torch.equal(dropped(3, 4, 0, torch.tensor(5, device=device)), expected)
    assert not torch.equal(dropped(3, 4, 0, 6), expected)


@pytest.mark.parametrize("kind", ["rotary", "relative"])
@pytest.mark.representative(kind="relative")
def test_a_context_drops_the_same_weights_forward_and_backward(
    kind: str, device: torch.device
) -> None:
    """The gradient of a value is the sum of its weights, which the forward shows."""
    rows, context = 75, Context(17, 0, 9)
    case = operation_cases.attention((rows,), kind, heads=1, width=16, context=context)(None)
    q, k = (case.packed[name][0].float().to(device) for name in "qk")
    shared = {name: x.float().to(device) for name, x in case.shared.items()}
    layout = PackedLayout.from_lengths([rows], device)
    v = torch.zeros_like(q).requires_grad_()

    def call(v: Tensor) -> Tensor:
        options = {"position": position_for(kind, shared), "dropout": 0.5, "seed": 3}
        return attention(q, k, v, layout, context=context, backend="triton", **options)

    (grad,) = torch.autograd.grad(call(v).sum(), v)
    for key in (0, 8, 9, 40, rows - 1):
        one_hot = torch.zeros_like(q)
        one_hot[key] = 1
        expected = call(one_hot)[:, 0, 0].sum()
        torch.testing.assert_close(grad[key, 0, 0], expected, rtol=1e-4, atol=1e-5)


def test_layers_share_tile_tables(device: torch.device) -> None:
    layout = PackedLayout.from_lengths((70, 5), device).with_tile_tables()
    x = torch.zeros(75, HEADS, 64, device=device, requires_grad=True)
    with recording() as launches:
        y = x
        for _ in range(3):
            y = attention(y, y, y, layout, position=Rotary(), backend="triton")
        y.sum().backward()
    made = [x.constants["BLOCK"] for x in launches if x.kernel.fn.__name__ == "fill_tile_table"]
    searching = [x for x in launches if x.args.get("tiles", 0) is None]
    assert len(made) == len(set(made))
    assert made
    assert not searching
    assert sum("attention" in x.kernel.fn.__name__ for x in launches) >= 9


_SCALE = 0.3


@dataclass(frozen=True)
class RelativeProblem:
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


def relative_problem(
    dtype: torch.dtype,
    device: torch.device,
    lengths_q: Sequence[int],
    lengths_k: Sequence[int] | None = None,
    *,
    heads: int = 2,
    width: int = 20,
    spare: int = 3,
) -> RelativeProblem:
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
    made = RelativeProblem(q, k, position, layout_q, layout_k, ds)
    ds.masked_fill_(~made.defined(), 0).masked_fill_(~made.defined(8), torch.nan)
    return made


def test_the_backward_gets_the_queries_with_the_content_bias(
    dtype: torch.dtype, device: torch.device
) -> None:
    """As a sum of its own rounds them; the scores are the same, to the bit."""
    given = relative_problem(dtype, device, (67, 0, 5, 150), heads=2)
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
    given = relative_problem(dtype, device, (67, 0, 5, 150), (3, 7, 0, 70), heads=2, width=64)
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
    given = relative_problem(torch.float32, device, (3, 5), (4, 2), spare=60)
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
