"""What single operations promise beyond `test_operations.py`; names begin with the operation's."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import effasr_kernels
from effasr_kernels import BackendUnavailable, PackedLayout
from effasr_kernels.batch_norm import OPERATION, BatchNormArguments
from effasr_kernels.grouped_linear import _triton as grouped_linear
from tests.gpu.conftest import EMULATED


def test_batch_norm_takes_a_part_of_a_larger_tensor(
    dtype: torch.dtype, device: torch.device
) -> None:
    layout = PackedLayout.from_lengths((5, 2), device)
    wide, ones = torch.randn(7, 10).to(device, dtype), torch.ones(6, device=device)

    def call(x: Tensor) -> Tensor:
        given = x, ones, ones, ones, ones, layout
        return effasr_kernels.batch_norm(*given, silu=True, backend="triton")

    assert torch.equal(call(wide[:, 2:8]), call(wide[:, 2:8].contiguous()))


def test_batch_norm_gradients_in_compiled_code_share_no_memory(device: torch.device) -> None:
    """Those of weight and bias are parts of one tensor, which the compiler does not expect."""
    layout = PackedLayout.from_lengths((5, 2), device)
    x, dy = torch.randn(2, 7, 6, device=device).unbind()
    ones = torch.ones(6, device=device)
    arguments = BatchNormArguments(x, ones, ones, ones, ones, layout, 1e-5, True, False)
    flat = OPERATION.flatten(arguments, "triton")
    required = [True] * 3 + [False] * (len(flat) - 3)
    gradients = torch.ops.effasr.batch_norm_backward([dy], [], required, *flat)
    assert [x.shape for x in gradients] == [x.shape for x in flat[:3]]
    assert len({x.untyped_storage().data_ptr() for x in gradients}) == 3


@pytest.mark.parametrize("activation", ["silu", "relu", "gelu"])
def test_bias_activation_dropout_keeps_nan(activation: Any, device: torch.device) -> None:
    layout = PackedLayout.from_lengths([4])
    x = torch.tensor([[torch.nan, 1.0, -1.0, torch.nan]]).repeat(4, 1)
    dy = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).repeat(4, 1)

    def run(backend: str, place: torch.device | str) -> list[Tensor]:
        leaf, options = x.to(place).requires_grad_(), {"activation": activation, "backend": backend}
        y = effasr_kernels.bias_activation_dropout(leaf, None, layout.to(place), **options)
        (dx,) = torch.autograd.grad(y, leaf, dy.to(place))
        return [y.detach().cpu(), dx.cpu()]

    for x_, y_ in zip(run("triton", device), run("reference", "cpu"), strict=True):
        torch.testing.assert_close(x_, y_, equal_nan=True)


def test_dropout_add_layer_norm_gives_no_gradient_to_a_result_that_is_not_used(
    device: torch.device,
) -> None:
    layout = PackedLayout.from_lengths((5,), device)
    x, residual = (torch.randn(5, 8, device=device, requires_grad=True) for _ in range(2))
    given = x, residual, torch.randn(8, device=device), torch.zeros(8, device=device), layout
    _, s = effasr_kernels.dropout_add_layer_norm(*given, scale=0.5, backend="triton")
    of_x, of_residual = torch.autograd.grad(s.sum(), (x, residual))
    assert bool((of_x == 0.5).all())
    assert bool((of_residual == 1).all())


def test_dropout_add_layer_norm_takes_a_seed_on_the_device(device: torch.device) -> None:
    layout = PackedLayout.from_lengths((6,), device)
    x, residual = torch.ones(6, 20, device=device), torch.zeros(6, 20, device=device)
    first, second = (
        effasr_kernels.dropout_add_layer_norm(
            x, residual, None, None, layout, dropout=0.5, seed=seed, backend="triton"
        )
        for seed in (9, torch.tensor(9, device=device))
    )
    assert torch.equal(first, second)
    assert set(first.unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated_activation_of_large_values(activation: Any, device: torch.device) -> None:
    """Where the logistic function is 0 or 1, gradients are finite."""
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]], device=device, requires_grad=True)
    y = effasr_kernels.gated_activation(
        gate, torch.ones_like(gate), activation=activation, backend="triton"
    )
    (slope,) = torch.autograd.grad(y.sum(), gate)
    assert slope.tolist() == [[0.0, 0.0, 0.5, 1.0, 1.0]]
    assert y.tolist() == [[0.0, 0.0, 0.0, 100.0, 1e4]]


def test_gated_activation_of_the_halves_of_a_product(
    dtype: torch.dtype, device: torch.device
) -> None:
    product = torch.randn(5, 48).to(device, dtype).requires_grad_()
    results = []
    for parts in (product.chunk(2, -1), [x.contiguous() for x in product.chunk(2, -1)]):
        y = effasr_kernels.gated_activation(*parts, activation="silu", backend="triton")
        results.append((y, *torch.autograd.grad(y.square().sum(), product)))
    assert all(map(torch.equal, *results))


def test_grouped_linear_launches_no_product_for_frozen_weights(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    kernels = []
    launch = grouped_linear.launch

    def record(kernel: Any, *arguments: Any, **options: Any) -> None:
        kernels.append(kernel)
        launch(kernel, *arguments, **options)

    monkeypatch.setattr(grouped_linear, "launch", record)
    layout = PackedLayout.from_lengths((3, 2), device)
    x = torch.randn(5, 8, device=device, requires_grad=True)
    weight = torch.randn(2, 4, 8, device=device)
    effasr_kernels.grouped_linear(x, weight, layout, backend="triton").sum().backward()
    assert kernels == [grouped_linear.multiply] * 2


@pytest.mark.skipif(EMULATED > 0, reason="the same launches as in the interpreter")
def test_grouped_linear_of_a_wider_tensor_and_a_transposed_weight(device: torch.device) -> None:
    layout = PackedLayout.from_lengths((4, 3), device)
    wide, weight = torch.randn(7, 20).to(device), torch.randn(2, 8, 6).to(device)
    call = lambda x, weight: effasr_kernels.grouped_linear(x, weight, layout, backend="triton")
    expected = call(wide[:, 4:12].contiguous(), weight.transpose(1, 2).contiguous())
    assert torch.equal(call(wide[:, 4:12], weight.transpose(1, 2)), expected)


@pytest.mark.parametrize("offset", [0, 1])
def test_rms_norm_of_heads_in_any_order(
    offset: Any, dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(3, 4, 16).to(device, dtype).requires_grad_()
    weight, dy = torch.randn(16, device=device).requires_grad_(), torch.randn(3, 4, 16).to(device)
    results = []
    for turned in (x, x.transpose(0, 1)):
        y = effasr_kernels.rms_norm(turned, weight, eps=1e-6, offset=offset, backend="triton")
        y = y if turned is x else y.transpose(0, 1)
        results.append((y, *torch.autograd.grad(y, (x, weight), dy.to(y.dtype))))
    assert all(map(torch.equal, results[0][:2], results[1][:2]))
    torch.testing.assert_close(results[0][2], results[1][2], rtol=1e-5, atol=1e-5)


def test_subsampling_stem_does_not_hide_nan_of_the_features(device: torch.device) -> None:
    layout = PackedLayout.from_lengths((1,), device)
    x = torch.full((8, 8), torch.nan, device=device)
    ones = [torch.ones(*shape, device=device) for shape in ((2, 9), (2,), (2, 9), (2,))]
    length = torch.tensor([8], device=device)
    y = effasr_kernels.subsampling_stem(x, *ones, layout, length, backend="triton")
    assert y.isnan().all()


def test_subsampling_stem_gives_no_gradient_to_features(device: torch.device) -> None:
    layout = PackedLayout.from_lengths((1,), device)
    x = torch.zeros(8, 8, device=device, requires_grad=True)
    ones = [torch.ones(*shape, device=device) for shape in ((2, 9), (2,), (2, 9), (2,))]
    given = *ones, layout, torch.tensor([8], device=device)
    call = lambda x: effasr_kernels.subsampling_stem(x, *given, backend="triton")
    with pytest.raises(BackendUnavailable, match="gives no gradient to x"):
        call(x)
    with FlopCounterMode(display=False), pytest.raises(BackendUnavailable, match="gradient to x"):
        call(x)
    call(x.detach())
