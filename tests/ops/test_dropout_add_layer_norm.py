import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from effasr_kernels import PackedLayout, dropout_add_layer_norm
from effasr_kernels.shared.dropout import kept_elements

CHANNELS = 12


def _inputs(rows: int = 7, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shapes = (rows, CHANNELS), (rows, CHANNELS), (CHANNELS,), (CHANNELS,)
    return [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes]


def test_matches_torch_with_dropout() -> None:
    x, residual, weight, bias = leaves = _inputs()
    added = torch.randn(CHANNELS, dtype=torch.float64, requires_grad=True)
    layout = PackedLayout.from_lengths((3, 4))
    y, s = dropout_add_layer_norm(
        *leaves, layout, x_bias=added, scale=0.5, dropout=0.25, eps=1e-3, seed=11, offset=2
    )
    leaves.append(added)
    keep = kept_elements(torch.tensor(11), (7, CHANNELS), 0.25, 2)
    expected = residual + 0.5 * ((x + added) * keep) / 0.75
    centred = expected - expected.mean(1, keepdim=True)
    scale = (centred.square().mean(1, keepdim=True) + 1e-3).rsqrt()
    torch.testing.assert_close(s, expected)
    torch.testing.assert_close(y, centred * scale * weight + bias)
    upstream = [torch.randn_like(y), torch.randn_like(s)]
    got = torch.autograd.grad([y, s], leaves, upstream)
    own = torch.autograd.grad([centred * scale * weight + bias, expected], leaves, upstream)
    for a, b in zip(got, own, strict=True):
        torch.testing.assert_close(a, b)


def test_post_norm_is_the_norm_of_the_sum() -> None:
    leaves = _inputs()
    layout = PackedLayout.from_lengths((3, 4))
    normed, _ = dropout_add_layer_norm(*leaves, layout, dropout=0.5, seed=3)
    replaced = dropout_add_layer_norm(*leaves, layout, dropout=0.5, seed=3, prenorm=False)
    assert torch.equal(normed, replaced)


def test_a_norm_alone_hands_on_the_residual_and_both_gradients() -> None:
    _, residual, weight, bias = _inputs()
    layout = PackedLayout.from_lengths((3, 4))
    y, stream = dropout_add_layer_norm(None, residual, weight, bias, layout)
    assert torch.equal(stream, residual)
    expected = F.layer_norm(residual, (CHANNELS,), weight, bias)
    torch.testing.assert_close(y, expected)
    a, b = torch.randn_like(y), torch.randn_like(y)
    (got,) = torch.autograd.grad([y, stream], residual, [a, b])
    (own,) = torch.autograd.grad([expected, residual * 1], residual, [a, b])
    torch.testing.assert_close(got, own)


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
def test_the_stream_keeps_its_dtype_under_autocast(stream: torch.dtype) -> None:
    x, residual, weight, bias = _inputs(dtype=torch.float32)
    layout = PackedLayout.from_lengths((3, 4))
    with torch.autocast("cpu", torch.bfloat16):
        arguments = x, residual.to(stream), weight, bias, layout
        y, s = dropout_add_layer_norm(*arguments)
        (alone, same), after = (
            dropout_add_layer_norm(None, *arguments[1:]),
            dropout_add_layer_norm(*arguments, prenorm=False),
        )
    assert (y.dtype, s.dtype, alone.dtype) == (torch.bfloat16, stream, torch.bfloat16)
    assert (same.dtype, after.dtype) == (stream, stream)
    expected = (residual.to(stream).float() + x.bfloat16().float()).to(stream)
    torch.testing.assert_close(s, expected, rtol=0, atol=0)
    # The sum is rounded before it is normalized, and the parameters are not rounded.
    normed = F.layer_norm(expected.float(), (CHANNELS,), weight, bias)
    torch.testing.assert_close(y, normed.bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(after, normed.to(stream), rtol=0, atol=0)
    for result in (y, s, alone, after):
        for leaf in torch.autograd.grad(
            result.float().sum(), [residual, weight], allow_unused=True
        ):
            assert leaf is None or leaf.dtype == torch.float32


def test_dropout_depends_on_the_seed_and_the_offset() -> None:
    keep = {
        (seed, offset): kept_elements(torch.tensor(seed), (64, 50), 0.3, offset)
        for seed in (1, 2**61 + 1)
        for offset in (0, 1)
    }
    masks = list(keep.values())
    for i, one in enumerate(masks):
        # Four standard deviations of 3,200 draws.
        assert abs(one.double().mean() - 0.7) < 4 * (0.21 / one.numel()) ** 0.5
        for other in masks[i + 1 :]:
            assert abs((one == other).double().mean() - 0.58) < 4 * (0.2436 / one.numel()) ** 0.5
    assert torch.equal(kept_elements(torch.tensor(1), (9, 7), 0.3, 0), keep[1, 0][:9, :7])


def test_a_backward_drops_what_the_forward_dropped_without_a_seed() -> None:
    x, residual, *_ = _inputs(64)
    layout = PackedLayout.from_lengths((64,))
    s = dropout_add_layer_norm(x, residual, None, None, layout, dropout=0.5)
    (gradient,) = torch.autograd.grad(s.sum(), x)
    assert torch.equal(gradient == 0, s == residual)
    assert not torch.equal(s, dropout_add_layer_norm(x, residual, None, None, layout, dropout=0.5))
