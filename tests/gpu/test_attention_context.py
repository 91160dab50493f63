"""`attention` with a limited context in Triton."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from effasr_kernels import Context, PackedLayout, RelativeBias, Rotary, attention
from effasr_kernels.testing.conformance import (
    Case,
    Packed,
    Shared,
    Variation,
    check_kernel,
    evaluate,
)
from effasr_kernels.testing.tolerance import assert_no_worse

POSITIONS = {"none": None, "rotary": Rotary(100.0), "part": Rotary(100.0, 0.5)}


def _case_for(
    lengths: tuple[int, ...],
    kind: str,
    context: Context,
    *,
    width: int = 16,
    dropout: float = 0.0,
) -> Callable[[str], Case]:
    exact = lambda *shape: torch.randn(shape).to(torch.bfloat16).to(torch.float16).double()
    packed = {name: [exact(n, 1, width) for n in lengths] for name in "qkv"}
    shared = {}
    if kind == "relative":
        reach = min(max(lengths), context.reach)
        shared = {name: exact(1, width) for name in ("content_bias", "position_bias")}
        shared["table"] = exact(2 * reach - 1, 1, width)

    def case_for(backend: str) -> Case:
        def run(packed: Packed, shared: Shared) -> Tensor:
            return attention(
                *(packed[name].values for name in "qkv"),
                packed["q"].layout,
                context=context,
                scale=0.7 * width**-0.5,
                position=RelativeBias(*shared.values()) if shared else POSITIONS[kind],
                dropout=dropout,
                seed=7 + 2**40,
                backend=backend,
            )

        return Case(run, packed, shared, results=("q",))

    return case_for


@pytest.mark.parametrize(
    ("kind", "context"),
    [("none", Context(1, 0, 2)), ("rotary", Context(2, 1, 1)), ("relative", Context(2, 0, 3))],
    ids=["none", "rotary", "relative"],
)
@pytest.mark.representative(kind=["none", "relative"])
def test_keeps_the_contract(
    kind: str, context: Context, dtype: torch.dtype, device: torch.device
) -> None:
    lengths = (2, 0, 5) if kind == "relative" else (3, 0, 18)
    check_kernel(_case_for(lengths, kind, context), dtype, device)


@pytest.mark.parametrize(
    "context",
    [
        Context(2, 0, 3),
        Context(70, 0, 14),
        Context(20, 7, 16),
        Context(0, 0, 5),
        Context(33, 2, 1),
        Context(None, 0, 10),
        Context(7, None, 6),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["none", "rotary", "part", "relative"])
@pytest.mark.representative(kind="relative", context=Context(20, 7, 16))
def test_is_right_across_tiles(
    kind: str, context: Context, dtype: torch.dtype, device: torch.device
) -> None:
    """Several tiles of queries and keys, whose bounds cut chunks."""
    case_for = _case_for((150, 3, 70), kind, context)
    gold = evaluate(case_for("reference"), Variation())
    baseline = evaluate(case_for("reference"), Variation(dtype=dtype))
    actual = evaluate(case_for("triton"), Variation(dtype=dtype, device=device))
    found, exact, same_dtype = (
        {name: torch.cat(pieces) for name, pieces in outcome.rows.items()} | outcome.shared
        for outcome in (actual, gold, baseline)
    )
    for name, values in found.items():
        try:
            assert_no_worse(values, exact[name], same_dtype[name])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.mark.parametrize("kind", ["rotary", "relative"])
@pytest.mark.representative(kind="relative")
def test_drops_the_same_weights_forward_and_backward(kind: str, device: torch.device) -> None:
    """The gradient of a value is the sum of its weights, which the forward shows."""
    rows, context = 75, Context(17, 0, 9)
    case = _case_for((rows,), kind, context, dropout=0.5)("triton")
    q, k = (case.packed[name][0].float().to(device) for name in "qk")
    position = POSITIONS.get(kind)
    if case.shared:
        position = RelativeBias(*(x.float().to(device) for x in case.shared.values()))
    layout = PackedLayout.from_lengths([rows], device)
    v = torch.zeros_like(q).requires_grad_()

    def weights(key: int) -> Tensor:
        shown = torch.zeros_like(q)
        shown[key] = 1
        options = {"position": position, "dropout": 0.5, "seed": 3, "backend": "triton"}
        return attention(q, k, shown, layout, context=context, **options)[:, 0, 0]

    y = attention(
        *(q, k, v, layout),
        context=context,
        position=position,
        dropout=0.5,
        seed=3,
        backend="triton",
    )
    (grad,) = torch.autograd.grad(y.sum(), v)
    for key in (0, 8, 9, 40, rows - 1):
        torch.testing.assert_close(grad[key, 0, 0], weights(key).sum(), rtol=1e-4, atol=1e-5)
