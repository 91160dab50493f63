"""What references promise beyond formulas and contract; names begin with the operation's."""

from math import comb

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from effasr_kernels import (
    PackedLayout,
    append_to_pages,
    best_alignment_loss,
    bias_activation_dropout,
    ctc_loss,
    depthwise_conv,
    dropout_add_layer_norm,
    guided_attention,
    linear_cross_entropy,
    pack,
    rms_norm,
    subsampling_stem,
)
from effasr_kernels.shared.dropout import kept_elements, realised_rate
from tests.support.philox import kept_weights

LAYOUT = PackedLayout.from_lengths((3, 4))


def test_append_to_pages_writes_each_row_to_its_place_and_nothing_else() -> None:
    k, v = torch.randn(2, 6, 2, 4)
    k_pages, v_pages = torch.randn(2, 8, 3, 2, 4)
    # Two sequences, and a row that is skipped, whose pages nobody looks at.
    table = torch.tensor([[5, 2]] * 3 + [[-5, 99]] + [[7, 0]] * 2, dtype=torch.int32)
    positions = torch.tensor([0, 5, 3, -1, 1, 4], dtype=torch.int32)
    expected_k, expected_v = k_pages.clone(), v_pages.clone()
    for n, position in enumerate(positions.tolist()):
        if position >= 0:
            page = int(table[n, position // 3])
            expected_k[page, position % 3], expected_v[page, position % 3] = k[n], v[n]
    append_to_pages(k, v, k_pages, v_pages, table, positions)
    append_to_pages(k, v, k_pages, v_pages, table, torch.full_like(positions, -1))
    assert torch.equal(k_pages, expected_k)
    assert torch.equal(v_pages, expected_v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_best_alignment_loss_does_not_change_with_repeated_frames(dtype: torch.dtype) -> None:
    """Neither does the gradient of the text; of equal tokens the last is taken."""
    x, y = torch.randn(5, 6, dtype=dtype), torch.randn(4, 6, dtype=dtype, requires_grad=True)
    outcomes = []
    for repeats in (1, 3):
        layouts = [PackedLayout.from_lengths([n]) for n in (5 * repeats, 4)]
        loss = best_alignment_loss(x.repeat_interleave(repeats, 0), y, *layouts)
        outcomes.append((loss, *torch.autograd.grad(loss.sum(), y)))
    torch.testing.assert_close(outcomes[1], outcomes[0])
    equal = torch.ones(4, 6, dtype=dtype, requires_grad=True)
    best_alignment_loss(x, equal, *[PackedLayout.from_lengths([n]) for n in (5, 4)]).backward()
    assert equal.grad is not None
    assert equal.grad.any(1).tolist() == [False, False, False, True]


def test_ctc_loss_of_an_infeasible_pair_is_infinite_and_has_no_gradient() -> None:
    """Two equal labels need a blank between them: three frames."""
    hidden = torch.randn(4, 3, requires_grad=True)
    layout = PackedLayout.from_lengths([2, 2])
    targets = torch.tensor([1, 1, 1, 2])
    loss = ctc_loss(hidden, torch.randn(3, 3), targets, layout, layout, blank_id=0)
    (gradient,) = torch.autograd.grad(loss.sum(), hidden)
    assert loss.isfinite().tolist() == [False, True]
    assert (gradient != 0).all(1).tolist() == [False, False, True, True]
    assert not gradient[:2].any()


def _with_statistics(x: Tensor, layout: PackedLayout) -> tuple[Tensor, ...]:
    weight = torch.linspace(-1, 1, 5).repeat(3, 1).to(x.dtype)
    bias = torch.full((3,), 7.0, dtype=x.dtype)
    return depthwise_conv(x, weight, layout, bias=bias, statistics=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("lengths", "tail"), [((4, 0, 7), 0), ((4, 0, 7), 3), ((0,), 2), ((), 0)])
def test_depthwise_conv_has_the_statistics_of_the_real_rows(
    lengths: tuple[int, ...], tail: int, dtype: torch.dtype
) -> None:
    layout = PackedLayout.from_lengths(lengths, rows=sum(lengths) + tail)
    x = torch.randn(layout.rows, 3, dtype=torch.float64).to(dtype)
    x[layout.total :] = torch.nan
    y, mean, variance = _with_statistics(x.requires_grad_(), layout)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert not mean.requires_grad
    assert not variance.requires_grad
    real = y.detach()[: layout.total].to(wide) if layout.total else torch.zeros(1, 3).to(wide)
    torch.testing.assert_close(mean, real.mean(0))
    torch.testing.assert_close(variance, real.var(0, correction=0))


def test_depthwise_conv_with_statistics_compiles_and_leaves_the_gradient_alone() -> None:
    layout = PackedLayout.from_lengths((4, 0, 7), rows=12)
    x = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(_with_statistics, fullgraph=True, backend="aot_eager")
    outcomes = []
    for run in (_with_statistics, compiled):
        y, mean, variance = run(x, layout)
        loss = (y * mean + y.square() * variance).sum()
        outcomes.append((y, mean, variance, *torch.autograd.grad(loss, x)))
    torch.testing.assert_close(outcomes[0], outcomes[1])
    _, mean, variance, gradient = outcomes[0]
    y, *_ = _with_statistics(x, layout)
    weights = (mean + 2 * y * variance).detach()
    torch.testing.assert_close(gradient, torch.autograd.grad((y * weights).sum(), x)[0])


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
def test_dropout_add_layer_norm_keeps_the_dtype_of_the_stream_under_autocast(
    stream: torch.dtype,
) -> None:
    x, residual, weight, bias = (torch.randn(*shape) for shape in ((7, 9), (7, 9), (9,), (9,)))
    arguments = residual.to(stream), weight, bias, LAYOUT
    with torch.autocast("cpu", torch.bfloat16):
        y, s = dropout_add_layer_norm(x, *arguments)
        alone, same = dropout_add_layer_norm(None, *arguments)
        after = dropout_add_layer_norm(x, *arguments, prenorm=False)
    assert (alone.dtype, same.dtype) == (torch.bfloat16, stream)
    expected = (residual.to(stream).float() + x.bfloat16().float()).to(stream)
    # The sum is rounded before it is normalized, and the parameters are not rounded.
    normed = F.layer_norm(expected.float(), (9,), weight, bias)
    for result, other in ((s, expected), (y, normed.bfloat16()), (after, normed.to(stream))):
        torch.testing.assert_close(result, other, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["elements", "weights"])
def test_masks_are_independent_draws(kind: str) -> None:
    """Of the rate that 8 bits give: their mean, neighbours of each kind, and the 16 of a call."""
    rate, seeds = realised_rate(0.1), (1, 2**61 + 1)
    assert rate == 26 / 256
    if kind == "elements":
        drawn = [
            kept_elements(torch.tensor(seed), (64, 256), rate, offset)
            for seed in seeds
            for offset in (0, 1)
        ]
        # By call: rows 4 i to 4 i + 3 and columns 4 j to 4 j + 3.
        calls = torch.stack(drawn).view(4, 16, 4, 64, 4).sum((2, 4))
    else:
        # Sequences, and two heads of each.
        drawn = [
            mask
            for seed in seeds
            for sequence in (0, 1)
            for mask in kept_weights(seed, sequence, 2, 64, 256, rate)
        ]
        # Rows i and i + 8, columns 2 j, 2 j + 1 and those 8, 16 and 24 after them.
        calls = torch.stack(drawn).view(8, 4, 2, 8, 8, 4, 4, 2).sum((2, 5, 7))
    masks = torch.stack(drawn)
    shifts = [(i, j) for i in (0, 1, 2, 4, 8) for j in (0, 1, 2, 4, 8, 16) if i + j]
    pairs = [(masks[:, i:, j:], masks[:, : 64 - i, : 256 - j]) for i, j in shifts]
    pairs += [(x, y) for n, x in enumerate(drawn) for y in drawn[n + 1 :]]
    equal = rate**2 + (1 - rate) ** 2
    # Four standard deviations of as many draws.
    limit = lambda p, mask: 4 * (p * (1 - p) / mask.numel()) ** 0.5
    assert abs(masks.double().mean() - (1 - rate)) < limit(rate, masks)
    for x, y in pairs:
        assert abs((x == y).double().mean() - equal) < limit(equal, x)
    # Chi-squared of how many of 16 are kept, against the binomial distribution; 10 and fewer are
    # one class. 27.9 has a probability of 1e-4 with 6 degrees of freedom.
    shares = torch.tensor([comb(16, n) * (1 - rate) ** n * rate ** (16 - n) for n in range(17)])
    expected = calls.numel() * torch.cat([shares[:11].sum()[None], shares[11:]])
    counts = calls.clamp(min=10).flatten().bincount(minlength=17)[10:]
    assert counts.sum() == calls.numel()
    assert ((counts - expected) ** 2 / expected).sum() < 27.9
    smaller = kept_elements(torch.tensor(1), (9, 7), rate, 0)
    assert torch.equal(smaller, kept_elements(torch.tensor(1), (64, 50), rate, 0)[:9, :7])


def test_dropout_is_of_the_realised_rate() -> None:
    """What is kept has the factor of the rate in 256ths, so that the mean stays."""
    layout, ones = PackedLayout.from_lengths((64,)), torch.ones(64, 40, dtype=torch.float64)
    for rate, realised in ((0.1, 26 / 256), (0.001, 0.0), (0.9999, 255 / 256)):
        y = bias_activation_dropout(ones, None, layout, activation="relu", dropout=rate, seed=3)
        assert set(y.flatten().tolist()) <= {0.0, 1 / (1 - realised)}, rate


def test_dropout_add_layer_norm_without_a_seed_drops_the_same_in_its_backward() -> None:
    x, residual = torch.randn(2, 64, 12).unbind()
    x.requires_grad_()
    arguments = x, residual, None, None, PackedLayout.from_lengths((64,))
    s = dropout_add_layer_norm(*arguments, dropout=0.5)
    (gradient,) = torch.autograd.grad(s.sum(), x)
    assert torch.equal(gradient == 0, s == residual)
    assert not torch.equal(s, dropout_add_layer_norm(*arguments, dropout=0.5))


def test_guided_attention_takes_the_penalty_before_dropout() -> None:
    q, k = (pack([torch.randn(n, 2, 3) for n in lengths]) for lengths in ((6, 3), (8, 5)))
    arguments = q.values, k.values, k.values, q.layout, k.layout
    y, penalty = guided_attention(*arguments, sigma=0.3)
    dropped, same = guided_attention(*arguments, sigma=0.3, dropout=0.5, seed=1)
    assert torch.equal(penalty, same)
    assert not torch.equal(y, dropped)
    assert torch.equal(guided_attention(*arguments, sigma=0.3, dropout=0.5, seed=1)[0], dropped)


@pytest.mark.parametrize("targets", [[2, 7, 0, 1], [7, 7, 7, 7]])
def test_linear_cross_entropy_reads_no_ignored_row(targets: list[int]) -> None:
    ignored = torch.tensor(targets, dtype=torch.int32) == 7
    hidden, weight = torch.randn(4, 5), torch.randn(6, 5, requires_grad=True)
    hidden[ignored] = torch.nan
    hidden.requires_grad_()
    options = {"ignore_index": 7, "label_smoothing": 0.1}
    losses = linear_cross_entropy(hidden, weight, torch.tensor(targets).int(), **options)
    dx, dweight = torch.autograd.grad(losses.sum(), (hidden, weight))
    assert not losses[ignored].any()
    assert not dx[ignored].any()
    assert bool(dweight.isfinite().all())


def test_rms_norm_rounds_once_with_the_offset_1_alone() -> None:
    x, weight = torch.randn(50, 12).bfloat16(), torch.randn(12)
    normal = F.rms_norm(x.float(), (12,), eps=1e-5)
    assert torch.equal(rms_norm(x, weight, eps=1e-5), weight * normal.bfloat16())
    shifted = rms_norm(x, weight, eps=1e-5, offset=1)
    assert torch.equal(shifted, ((1 + weight) * normal).bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        narrow = rms_norm(x.float(), weight, eps=1e-5)
    assert torch.equal(narrow, rms_norm(x.float(), weight, eps=1e-5).bfloat16())


def test_subsampling_stem_counts_lengths_beyond_the_slots_as_all_of_them() -> None:
    layout, x = PackedLayout.from_lengths((2, 1)), torch.randn(24, 8)
    parameters = [torch.randn(*shape) for shape in ((3, 9), (3,), (3, 9), (3,))]
    y = subsampling_stem(x, *parameters, layout, torch.tensor([16, 8]))
    beyond = torch.tensor([99, 8], dtype=torch.int32)
    assert torch.equal(subsampling_stem(x, *parameters, layout, beyond), y)
