"""`guided_attention` in Triton against its definition."""

import pytest
import torch
from torch import Tensor

from effasr_kernels import BackendUnavailable, PackedLayout, guided_attention

HEADS, WIDTH, SIGMA, DROPPED = 2, 16, 0.3, 0.375
TOKENS, FRAMES = (17, 0, 3, 2), (40, 5, 33, 0)


class _Call:
    """Tensors of a call with dropout, and results and gradients of it."""

    def __init__(self, dtype: torch.dtype, device: torch.device, tail: int = 3):
        self.layout_q = PackedLayout.from_lengths(TOKENS, device, rows=sum(TOKENS) + tail)
        self.layout_k = PackedLayout.from_lengths(FRAMES, device, rows=sum(FRAMES) + tail)
        rows = self.layout_q.rows, self.layout_k.rows, self.layout_k.rows
        values = [torch.randn(n, HEADS, WIDTH, dtype=torch.float64) for n in rows]
        # What the dtype holds, so that float64 computes from the same numbers.
        self.values = [x.to(device, dtype) for x in values]
        shape = self.layout_q.rows, HEADS
        self.upstream = (
            torch.randn(*shape, WIDTH, dtype=torch.float64).to(device, dtype),
            torch.randn(shape, dtype=torch.float32).to(device),
        )

    def forward(self, **options: object) -> tuple[Tensor, Tensor]:
        given = {"sigma": SIGMA, "dropout": DROPPED, "seed": 1, "backend": "triton"} | options
        return guided_attention(*self.values, self.layout_q, self.layout_k, **given)  # type: ignore[arg-type]

    def __call__(self, **options: object) -> list[Tensor]:
        leaves = [x.requires_grad_() for x in self.values]
        results = self.forward(**options)
        return [*results, *torch.autograd.grad(results, leaves, self.upstream)]


def test_penalty_is_taken_before_dropout(device: torch.device) -> None:
    call = _Call(torch.float32, device)
    (y, penalty), (y_whole, penalty_whole) = call.forward(), call.forward(dropout=0.0)
    # Two binaries, which may add in another order.
    torch.testing.assert_close(penalty, penalty_whole, rtol=1e-6, atol=1e-7)
    assert not torch.equal(y, y_whole)


def test_a_seed_repeats_whatever_holds_it(device: torch.device) -> None:
    call = _Call(torch.float32, device)
    first, _ = call.forward(seed=5)
    assert not torch.equal(first, call.forward(seed=6)[0])
    for seed in (5, torch.tensor(5), torch.tensor(5, device=device)):
        assert torch.equal(first, call.forward(seed=seed)[0])


def test_without_width_of_the_diagonal_there_is_no_penalty(device: torch.device) -> None:
    call = _Call(torch.float32, device)
    plain = call(sigma=1e10)
    assert plain[1].abs().max() < 1e-18
    call.upstream = call.upstream[0], torch.full_like(call.upstream[1], 1e3)
    for x, y in zip(call(sigma=1e10), plain, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_a_penalty_of_small_distances_keeps_its_digits(device: torch.device) -> None:
    """``1 - exp(-x)`` would lose all of them."""
    call = _Call(torch.float32, device, tail=0)
    wide, wider = call.forward(sigma=1e3)[1], call.forward(sigma=1e5)[1]
    torch.testing.assert_close(wide, wider * 1e4, rtol=1e-5, atol=0)


def test_says_what_it_cannot_serve(device: torch.device) -> None:
    layout = PackedLayout.from_lengths([1], device)
    for x, reason in (
        (torch.zeros(1, 1, 257, device=device), "head widths up to 256, not 257"),
        (torch.zeros(1, 1, 16, device=device).double(), "float64 is for the reference"),
    ):
        with pytest.raises(BackendUnavailable, match=reason):
            guided_attention(x, x, x, layout, layout, sigma=SIGMA, backend="triton")
