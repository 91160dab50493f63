"""Partial sums of the gradients of a whole layer are added together, where its gradients meet."""

from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

from effasr.nn.feed_forward import FeedForward
from effasr.nn.linear import Linear, shared_input
from effasr.nn.residual import Residual
from effasr.training.strategies.weight_copies import WeightCopies
from effasr_kernels import PackedLayout, depthwise_conv, dropout_add_layer_norm, strided_depthwise
from effasr_kernels.runtime.deferred_sums import PartialSums, take_from, waiting
from effasr_kernels.runtime.launch import Launch, _Recorder, diverted, launch, recording
from effasr_kernels.shared.partial_sums import summed, summed_parts, sums_of_layer
from tests.gpu.conftest import EMULATED


class _Block(nn.Module):
    """A feed-forward network between two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.LayerNorm(16), nn.LayerNorm(16)
        self.feed_forward = FeedForward(16, 24, activation="silu", dropout=0.2)

    def forward(self, x: Tensor, layout: PackedLayout, seed: Tensor) -> Tensor:
        residual = Residual(layout, 0.1, seed)
        y, x = residual.norm(x, self.first)
        y = self.feed_forward(y, residual, offset=1)
        return residual.add_post_norm(x, y, self.feed_forward.linear2, self.last, offset=0)


class _Stack(nn.Module):
    """Two blocks, of which the first runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block() for _ in range(2))

    def forward(self, x: Tensor, layout: PackedLayout, seed: Tensor) -> Tensor:
        first, second = self.layers
        for layer in (first, first, second):
            x = layer(x, layout, seed)
        # A gradient that is no partial sum meets one that is.
        return x.square().sum() + second.last.weight.square().sum()  # type: ignore[union-attr]


def _counting(counts: Counter[str]) -> Any:
    """Run launches, and count them by the name of the kernel."""

    emulate, capability = _Recorder.take, _Recorder.capability

    def take(made: Launch) -> None:
        counts[made.kernel.fn.__name__] += 1
        if emulate is not None:
            emulate(made)
            return
        # Which `launch` adds itself.
        options = {x: made.options[x] for x in made.options if x != "enable_fp_fusion"}
        with diverted(None):
            launch(made.kernel, made.grid, *made.values, **options, **made.constants)

    return diverted(take, capability)


def test_a_layer_adds_its_partial_sums_in_one_launch(device: torch.device) -> None:
    torch.manual_seed(0)
    model = _Stack().to(device).train()
    layout = PackedLayout.from_lengths((7, 3), rows=12, device=device)
    x = torch.randn(12, 16, device=device, requires_grad=True)
    seed = torch.tensor(5, device=device)
    found: list[list[Tensor | None]] = []
    counts: list[Counter[str]] = []
    for copies in (None, WeightCopies(model, torch.float32)):
        counts.append(Counter())
        model.zero_grad()
        x.grad = None
        if copies is not None:
            copies.refresh()
        with _counting(counts[-1]), nullcontext() if copies is None else copies.in_use():
            loss = model(x, layout, seed)
            if copies is not None:
                # Not even a backward that passes the weights by leaves anything for the next.
                torch.autograd.grad(loss, x, retain_graph=True)
                counts[-1].clear()
            loss.backward()
        found.append([parameter.grad for parameter in (x, *model.parameters())])
    for one, other in zip(*found, strict=True):
        # cuBLAS may add up the product of a weight's gradient and its transpose in two orders.
        rounding = {} if one.is_cuda and one.ndim == 2 else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(one, other, **rounding)
    assert all(isinstance(x, nn.Parameter) for x in model.parameters())
    # Of two norms and an activation. Those of both runs of the first layer are added together.
    assert counts[0]["sum_rows"] == 3 * 3
    assert (counts[1]["sum_rows"], counts[1]["sum_segments"]) == (0, 2)


def test_gradients_of_other_tensors_do_not_wait(device: torch.device) -> None:
    layout = PackedLayout.from_lengths((3,), device=device)
    x, weight, bias = (torch.randn(*n, device=device) for n in ((3, 16), (16,), (16,)))
    weight.requires_grad_()
    counts: Counter[str] = Counter()
    # A node that takes no partial sums, and a leaf.
    for made in (weight * 1, weight):
        with _counting(counts):
            y, _ = dropout_add_layer_norm(None, x, made, bias, layout)
            (gradient,) = torch.autograd.grad(y.sum(), weight)
        normal = torch.nn.functional.layer_norm(x, (16,))
        torch.testing.assert_close(gradient, normal.sum(0), rtol=1e-5, atol=1e-5)
    assert counts["sum_rows"] == 2


class _Projections(nn.Module):
    """Two linear layers with biases, without anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Linear(16, 24), Linear(24, 16)) for _ in range(2))
        self.rest = Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.rest(x)


def _integers(*shape: int) -> Tensor:
    """Numbers whose products and sums are exact in float32, in any order."""
    return torch.randint(-1, 2, shape).float()


def _projections(device: torch.device) -> tuple[_Projections, Tensor]:
    """Return a model and an input, on which all sums of forward and backward are exact."""
    model = _Projections()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(_integers(*parameter.shape))
    return model.to(device), _integers(40, 16).to(device).requires_grad_()


@pytest.mark.parametrize("shape", [(40,), (5, 8)])
def test_biases_of_linear_layers_are_summed_with_their_layer(
    shape: tuple[int, ...], device: torch.device
) -> None:
    model, x = _projections(device)
    copies = WeightCopies(model, torch.float32)
    copies.refresh()
    leaves, upstream = [x, *model.parameters()], _integers(*shape, 8).to(device)
    rows = x.view(*shape, 16)
    expected = torch.autograd.grad(model(rows), leaves, upstream)
    counts: Counter[str] = Counter()
    for is_checkpointed in (False, True):
        for leaf in leaves:
            leaf.grad = None
        with _counting(counts), copies.in_use():
            y = checkpoint(model, rows, use_reentrant=False) if is_checkpointed else model(rows)
            assert isinstance(y, Tensor)
            # Not even a backward that passes the weights by leaves anything for the next.
            (alone,) = torch.autograd.grad(y, x, upstream, retain_graph=True)
            assert torch.equal(alone, expected[0])
            assert not counts
            y.backward(upstream)
        # The layer outside of all stacks keeps no rows until the end of the backward.
        assert counts == {"sum_segments": 2}
        counts.clear()
        for leaf, gradient in zip(leaves, expected, strict=True):
            assert leaf.grad is not None
            assert torch.equal(leaf.grad, gradient)


def test_linear_layers_are_those_of_torch_where_autocast_casts(device: torch.device) -> None:
    model, x = _projections(device)
    copies = WeightCopies(model, torch.float32)
    copies.refresh()
    counts: Counter[str] = Counter()
    found = []
    with torch.autocast(device.type, torch.bfloat16), _counting(counts):
        for context in (nullcontext(), copies.in_use()):
            with context:
                y = model(x)
                assert y.dtype == torch.bfloat16
                y.sum().backward()
            found.append([leaf.grad for leaf in (x, *model.parameters())])
            model.zero_grad()
            x.grad = None
    assert not counts
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


class _Convolution(nn.Module):
    """A linear layer before a kernel that adds up the rows of its own gradient."""

    def __init__(self, *, gated: bool) -> None:
        super().__init__()
        self.linear, self.gated = Linear(16, 32), gated

    def forward(self, x: Tensor, layout: PackedLayout) -> tuple[Tensor, Tensor]:
        x = self.linear(x if self.gated else x.view(2 * layout.rows, 4, 16))
        taps = _integers(x.shape[-1] // (1 + self.gated), 9).to(x)
        if self.gated:
            return x, depthwise_conv(x, taps, layout, gated=True)
        bias, lengths = torch.zeros_like(x[0, 0]), torch.tensor([66, 0, 15], device=x.device)
        return x, strided_depthwise(x, taps, bias, layout, lengths, relu=True)


@pytest.mark.parametrize("gated", [False, True])
def test_a_kernel_adds_up_the_rows_of_its_gradient(
    gated: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """For the bias of the linear layer before, unless something has changed the gradient."""
    torch.manual_seed(0)
    layout = PackedLayout.from_lengths((33, 0, 8), device, rows=44)
    model, rows = _Convolution(gated=gated).to(device), 44 if gated else 8 * 44
    copies, counts = WeightCopies(model, dtype), Counter[str]()
    copies.refresh()
    with _counting(counts), copies.in_use():
        x, y = model(torch.randn(rows, 16).to(device, dtype), layout)
        upstream = torch.randn(y.shape).to(y)
        (changed,) = torch.autograd.grad(y, x, upstream, retain_graph=True)
        assert take_from(changed.mul_(2)) is None
        (dx,) = torch.autograd.grad(y, x, upstream, retain_graph=True)
        assert take_from(dx) is not None
        assert take_from(dx) is None
        counts.clear()
        y.backward(upstream)
    # The first is of the taps, which are no weight of the model.
    assert counts["sum_rows"] == counts["sum_segments"] == 1
    dx = dx.flatten(0, -2).double().cpu()
    error = torch.finfo(dtype).eps * (dx.abs().sum(0) + dx.sum(0).abs())
    assert model.linear.bias.grad is not None
    assert bool(((model.linear.bias.grad.cpu() - dx.sum(0)).abs() <= error).all())
    assert bool(dx.any())


def test_products_write_gradients_in_float32(device: torch.device, dtype: torch.dtype) -> None:
    """Neither rounded nor added up in 16 bits, into gradients that need not be zero."""
    model, _ = _projections(device)
    copies = WeightCopies(model, dtype, accumulate=True)
    copies.refresh()
    inputs = [_integers(999, 16).abs().to(device) for _ in range(3)]
    weight, results = model.rest.weight, []
    for replace in (False, True):
        for number, x in enumerate(inputs):
            with copies.in_use(accumulate=True, replace=replace and number == 0):
                model.rest(x.to(dtype)).sum().backward()
            assert weight.grad is not None
            results.append(weight.grad.clone())
        weight.grad.fill_(torch.nan)
    assert copies.replaced == {weight}
    sums = torch.stack(inputs).sum(1).cumsum(0)
    assert torch.equal(torch.stack(results), sums[:, None].expand(3, 8, 16).repeat(2, 1, 1))
    # Not all of them exist in bfloat16.
    assert not torch.equal(sums, sums.bfloat16().float())


def test_products_add_up_the_gradient_of_their_input(device: torch.device) -> None:
    model, x = _projections(device)
    copies = WeightCopies(model, torch.float32)
    copies.refresh()
    for others in (0, 1):
        results = []
        for share in (lambda x: x, shared_input):
            with copies.in_use(), profile() as profiler:
                shared = share(x)
                y = sum(layer(shared).sum() for layer in model.layers) + others * shared.sum()
                (gradient,) = torch.autograd.grad(y, x)
            results.append((gradient, [event.name for event in profiler.events() or []]))
        assert torch.equal(results[0][0], results[1][0])
        assert len({names.count("aten::addmm") for _, names in results}) == 2


def test_it_is_one_launch() -> None:
    with recording((9, 0)) as launches:
        found = summed(torch.empty(264, 2, 1000), torch.bfloat16)
    assert (found.shape, found.dtype) == ((2, 1000), torch.bfloat16)
    assert [(x.kernel.fn.__name__, x.grid) for x in launches] == [("sum_rows", (63,))]


def _with_rows(device: torch.device, dtype: torch.dtype) -> list[PartialSums]:
    """Tensors with many rows, few and none among partial sums, of which some are many, too."""
    with waiting() as found:
        summed(torch.randint(-999, 999, (1100, 9), device=device).float(), dtype)
        summed(torch.randint(-999, 999, (65, 7), device=device).float(), dtype)
        summed_parts(torch.randn(2, 3, 41, device=device), torch.float32, dtype)
    for shape in ((1060, 70), (3, 33), (0, 5), (1281, 8)):
        x = torch.randint(-9, 9, shape, device=device).to(dtype)
        out = x.new_empty(shape[1])
        found.insert(1, PartialSums(x, out, None, partial(torch.sum, x, 0, out=out)))
    return found


def test_programs_share_the_rows_of_long_tensors(dtype: torch.dtype, device: torch.device) -> None:
    found = _with_rows(device, dtype)
    sums = sums_of_layer(found)
    for x, got in zip(found, sums, strict=True):
        x.run()
        parts = [part.flatten().float() for part in (x.out, x.last) if part is not None]
        # Sums of integers are exact in float32, and rounded once.
        assert torch.equal(got, torch.cat(parts))
    # The counters are zeros again.
    for one, other in zip(sums, sums_of_layer(found), strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(not EMULATED, reason="only the emulator chooses the order of programs")
def test_the_order_of_programs_changes_no_bit() -> None:
    from emulator.emulate import emulated

    x = torch.randn(1300, 65)
    out = torch.empty(65)
    sums = PartialSums(x, out, None, partial(torch.sum, x, 0, out=out))
    found = []
    for seed in range(3):
        with emulated(EMULATED, seed):
            found.append(sums_of_layer([sums])[0])
    assert all(torch.equal(one, found[0]) for one in found[1:])
    # Each addition rounds by 2**-24 of a partial sum.
    bound = 1300 * 2**-24 * x.abs().sum(0)
    assert bool(((found[0] - x.double().sum(0)).abs() < bound).all())


def test_tensors_of_two_dtypes_are_two_launches() -> None:
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        x = torch.empty(300, 8, dtype=dtype)
        found.append(PartialSums(x, x[0], None, lambda: None))
    with recording((9, 0)) as launches:
        sums_of_layer(found)
    assert [launch.constants["NARROW"] for launch in launches] == ["bf16", "fp16"]
    assert [launch.args["rows1"] is None for launch in launches] == [False, True]


def test_sums_of_a_layer_are_few_launches() -> None:
    with recording((9, 0)) as launches:
        # Partial sums of 14 launches, more than one addition has, of several dtypes and sizes.
        device = torch.device("cpu")
        with waiting() as found:
            for number in range(7):
                wide = torch.randint(-999, 999, (number * 30, 3, 41), device=device).float()
                summed_parts(wide, torch.float32, torch.bfloat16)
                summed(torch.randint(-999, 999, (65, 7), device=device).float(), torch.bfloat16)
        assert launches == []
        sums_of_layer(found)
    assert [x.kernel.fn.__name__ for x in launches] == ["sum_segments"] * 2
