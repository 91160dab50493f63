"""Several linear layers as one matrix product, some with a bias and some without."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from effasr.nn.biased_linear import biased_linear
from effasr_kernels.shared.cpu.linear import linear


class Linear(nn.Linear):
    """`torch.nn.Linear` for training.

    Its products are oneDNN's on a CPU (`effasr_kernels.shared.cpu.linear`), and the gradient of its
    bias waits for those of the layer on a GPU (`biased_linear`).
    """

    def forward(self, input: Tensor, *, with_bias: bool = True) -> Tensor:
        """Map (..., in) to (..., out), without the bias if the caller adds it."""
        if with_bias and self.bias is not None:
            return biased_linear(input, self.weight, self.bias)
        return linear(input, self.weight)


class JoinedLinear(Linear):
    """Linear layers of one size on one input, as one product."""

    biased: tuple[bool, ...]  # Whether each layer has a bias

    def __init__(self, width: int, size: int, biased: Sequence[bool]):
        """Build the layers from ``width`` to ``size`` channels each; at least one has a bias."""
        super().__init__(width, len(biased) * size, bias=False)
        self.biased = tuple(biased)
        self.bias = nn.Parameter(self.weight.new_zeros(sum(biased) * size))

    def forward(self, input: Tensor, *, with_bias: bool = True) -> Tensor:
        """Map (..., in) to (..., out), the layers' outputs in order."""
        return linear(input, self.weight, whole_bias(self) if with_bias else None)


def joined_linear(width: int, size: int, biased: Sequence[bool]) -> nn.Linear:
    """Return a `JoinedLinear`, or a plain layer where all layers have a bias or none has."""
    if all(biased) or not any(biased):
        return Linear(width, len(biased) * size, bias=all(biased))
    return JoinedLinear(width, size, biased)


def whole_bias(layer: nn.Linear) -> Tensor | None:
    """Return the bias of a layer, with zeros for parts without one: (out,), or None."""
    biased, bias = getattr(layer, "biased", None), layer.bias
    if biased is None or bias is None:
        return bias
    # Zeros in the product's own addition cost nothing; a second addition would cost a pass.
    size = layer.out_features // len(biased)
    none, parts = bias.new_zeros(size), []
    for number, has in enumerate(biased):
        begin = size * sum(biased[:number])
        parts.append(bias[begin : begin + size] if has else none)
    return torch.cat(parts)
