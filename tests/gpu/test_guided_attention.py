"""`guided_attention` in Triton against its definition."""

from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from effasr_kernels import BackendUnavailable, PackedLayout, guided_attention
from effasr_kernels.runtime.launch import launch
from effasr_kernels.shared.philox import keep_mask
from effasr_kernels.testing.tolerance import assert_no_worse

HEADS, WIDTH, SIGMA, DROPPED = 2, 16, 0.3, 0.375
TOKENS, FRAMES = (17, 0, 3, 2), (40, 5, 33, 0)
LARGEST_SEED = 2**62 - 1


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

    def densely(self, seed: int, dtype: torch.dtype) -> list[Tensor]:
        """The same from whole matrices, with weights dropped as `keep_mask` says."""
        leaves = [x.detach().to(dtype).requires_grad_() for x in self.values]
        q, k, v = leaves
        output, penalty = torch.zeros_like(q), torch.zeros_like(q[..., 0])
        spans = zip(
            pairwise(self.layout_q.cu_seqlens_host),
            pairwise(self.layout_k.cu_seqlens_host),
            strict=True,
        )
        for n, ((begin, end), (first, last)) in enumerate(spans):
            tokens, frames = end - begin, last - first
            if not tokens or not frames:
                continue
            keep = _kept(seed, n, tokens, frames, q.device).to(dtype) / (1 - DROPPED)
            scores = torch.einsum("ihd,jhd->hij", q[begin:end], k[first:last]) * WIDTH**-0.5
            weights = scores.softmax(-1)
            i = torch.arange(tokens, dtype=dtype, device=q.device) / tokens
            j = torch.arange(frames, dtype=dtype, device=q.device) / frames
            away = -torch.expm1((i[:, None] - j).square() / (-2 * SIGMA**2))
            y = torch.einsum("hij,jhd->ihd", weights * keep, v[first:last])
            output = output.index_copy(0, torch.arange(begin, end, device=q.device), y)
            p = (weights * away).sum(-1).T
            penalty = penalty.index_copy(0, torch.arange(begin, end, device=q.device), p)
        upstream = [x.to(dtype) for x in self.upstream]
        return [output, penalty, *torch.autograd.grad((output, penalty), leaves, upstream)]


@triton.jit
def _write_mask(out, seed, sequence, probability, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    head = tl.program_id(0)
    keep = keep_mask(tl.load(seed), sequence, head, 0, 0, probability, ROWS, COLUMNS)
    index = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + head * ROWS * COLUMNS + index, keep.to(tl.int8))


def _kept(seed: int, sequence: int, tokens: int, frames: int, device: torch.device) -> Tensor:
    """Which weights of a sequence survive: bool (H, tokens, frames)."""
    rows, columns = (max(16, 1 << (n - 1).bit_length()) for n in (tokens, frames))
    out = torch.zeros(HEADS, rows, columns, dtype=torch.int8, device=device)
    where = torch.tensor([seed], device=device)
    launch(_write_mask, (HEADS,), out, where, sequence, DROPPED, ROWS=rows, COLUMNS=columns)
    return out[:, :tokens, :frames].bool()


@pytest.mark.parametrize("seed", [1, LARGEST_SEED])
def test_drops_what_the_mask_says(seed: int, dtype: torch.dtype, device: torch.device) -> None:
    call = _Call(dtype, device)
    gold = call.densely(seed, torch.float64)
    baseline = call.densely(seed, torch.float32)
    for actual, exact, wide in zip(call(seed=seed), gold, baseline, strict=True):
        # As the reference: narrow tensors are summed in float32, and rounded once.
        assert_no_worse(actual, exact, wide.to(actual.dtype))


def test_drops_the_share_that_it_should(device: torch.device) -> None:
    kept = _kept(7, 0, 128, 128, device).double().mean().item()
    deviation = (DROPPED * (1 - DROPPED) / (HEADS * 128 * 128)) ** 0.5
    assert abs(kept - (1 - DROPPED)) < 4 * deviation


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
