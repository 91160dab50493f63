"""`attention` whose heads of queries share heads of keys and values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from effasr_kernels import PackedLayout, RelativeBias, Rotary, attention
from effasr_kernels.runtime import native

HEADS, GROUP, WIDTH = 6, 3, 8
LENGTHS, LENGTHS_K = (5, 0, 40, 1), (40, 3, 0, 7)

backends = pytest.mark.parametrize(
    "backend",
    [
        "reference",
        pytest.param(
            "cpp",
            marks=pytest.mark.skipif(
                native.unsupported_reason() is not None, reason="the CPU kernels are not built"
            ),
        ),
    ],
)


def _rows(layout: PackedLayout, heads: int) -> Tensor:
    return torch.randn(layout.rows, heads, WIDTH).requires_grad_()


@backends
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["causal", "rotary", "across"])
def test_is_attention_with_repeated_keys(backend: str, kind: str, dropout: float) -> None:
    """Results and gradients, and no gradient of the tail."""
    layout = PackedLayout.from_lengths(LENGTHS, rows=sum(LENGTHS) + 3)
    layout_k = PackedLayout.from_lengths(LENGTHS_K, rows=sum(LENGTHS_K) + 3)
    layout_k = layout_k if kind == "across" else layout
    q = _rows(layout, HEADS)
    k, v = (_rows(layout_k, HEADS // GROUP) for _ in range(2))
    weights = torch.randn(q.shape)

    def run(k: Tensor, v: Tensor, backend: str) -> tuple[Tensor, ...]:
        y = attention(
            *(q, k, v, layout, layout_k if kind == "across" else None),
            causal=kind == "causal",
            position=Rotary() if kind == "rotary" else None,
            dropout=dropout,
            seed=3,
            backend=backend,
        )
        return y, *torch.autograd.grad((y * weights).sum(), (q, k, v))

    # The reference draws dropout from a generator of its own.
    oracle = backend if dropout else "reference"
    k_whole, v_whole = (x.repeat_interleave(GROUP, dim=1).detach() for x in (k, v))
    expected = list(run(k_whole.requires_grad_(), v_whole.requires_grad_(), oracle))
    expected[2:] = [x.view(-1, HEADS // GROUP, GROUP, WIDTH).sum(2) for x in expected[2:]]
    for found, wanted in zip(run(k, v, backend), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@backends
def test_long_sequences_sum_over_parts_and_heads(backend: str) -> None:
    """The gradient of keys adds up the parts of queries that tasks of a CPU compute."""
    layout = PackedLayout.from_lengths((1300, 9))
    q, k, v = (torch.randn(1309, n, 4, dtype=torch.float32).requires_grad_() for n in (4, 2, 2))
    weights = torch.randn(q.shape)

    def gradients(k: Tensor, v: Tensor, backend: str) -> tuple[Tensor, ...]:
        y = attention(q, k, v, layout, causal=True, backend=backend)
        return torch.autograd.grad((y * weights).sum(), (k, v))

    wide = [x.detach().repeat_interleave(2, dim=1).requires_grad_() for x in (k, v)]
    expected = [x.view(-1, 2, 2, 4).sum(2) for x in gradients(*wide, "reference")]
    torch.testing.assert_close(gradients(k, v, backend), tuple(expected), rtol=1e-4, atol=1e-4)


def test_heads_that_do_not_divide_are_refused() -> None:
    layout = PackedLayout.from_lengths((2,))
    q, k = torch.randn(2, 6, 8), torch.randn(2, 4, 8)
    with pytest.raises(ValueError, match=r"`k` must have a number of heads that divides 6"):
        attention(q, k, k, layout)
    with pytest.raises(ValueError, match=r"`v` must .*\(T_k, H, D\)"):
        attention(q, q, k, layout)


def test_relative_positions_need_all_heads() -> None:
    layout = PackedLayout.from_lengths((2,))
    q, k = torch.randn(2, 6, 8), torch.randn(2, 3, 8)
    position = RelativeBias(torch.randn(6, 8), torch.randn(6, 8), torch.randn(3, 6, 8))
    with pytest.raises(ValueError, match=r"`k` must have 6 heads, as `q`, where `position` is"):
        attention(q, k, k, layout, position=position)
