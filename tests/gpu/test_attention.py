from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from effasr_kernels import Context, PackedLayout, RelativeBias, Rotary, attention
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
