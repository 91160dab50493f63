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
from tests.support.conformance import Variation, evaluate
from tests.support.operation_cases import FACTORIES


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


@pytest.mark.parametrize(
    ("name", "options", "number", "reason"),
    [
        ("attention", {"width": 257}, torch.float32, "256 channels"),
        ("depthwise_conv", {"taps": 33}, torch.float32, "more than 32 taps"),
        ("guided_attention", {"width": 257}, torch.float32, "head widths up to 256, not 257"),
        ("guided_attention", {}, torch.float64, "float64 is for the reference"),
    ],
)
def test_what_a_kernel_cannot_serve_is_refused(
    name: str, options: dict[str, Any], number: torch.dtype, reason: str, device: torch.device
) -> None:
    case = FACTORIES[name]((2,), **options)("triton")
    with pytest.raises(BackendUnavailable, match=reason):
        evaluate(case, Variation(dtype=number, device=device))


def test_guided_attention_keeps_the_digits_of_penalties_of_small_distances(
    device: torch.device,
) -> None:
    """``1 - exp(-x)`` would lose all of them; without a width there is no penalty."""
    penalties = []
    for sigma in (1e3, 1e5, 1e10):
        torch.manual_seed(0)
        case = FACTORIES["guided_attention"]((17, 3), (40, 33), width=16, sigma=sigma)("triton")
        outcome = evaluate(case, Variation(dtype=torch.float32, device=device))
        penalties.append(torch.cat(outcome.rows["result 1"]))
    torch.testing.assert_close(penalties[0], penalties[1] * 1e4, rtol=1e-5, atol=0)
    assert penalties[2].abs().max() < 1e-18


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
