"""Partial sums of the gradients of a whole layer are added together, where its gradients meet."""

from collections import Counter
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from effasr.nn.feed_forward import FeedForward
from effasr.nn.residual import Residual
from effasr.training.strategies.weight_copies import WeightCopies
from effasr_kernels import PackedLayout, dropout_add_layer_norm
from effasr_kernels.runtime.launch import Launch, _Recorder, diverted, launch


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
        with diverted(None):
            launch(made.kernel, made.grid, *made.values, **made.options, **made.constants)

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
        assert torch.equal(one, other)
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
