"""The residual stream of a layer: dropout and addition of its modules' outputs, and its norms."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effasr.nn.linear import Linear
from effasr_kernels import PackedLayout, dropout_add_layer_norm
from effasr_kernels.runtime.dispatch import load
from effasr_kernels.shared.dropout import draw_seeds


def is_fused(x: Tensor) -> bool:
    """Whether kernels that join several steps serve rows: on a CPU, PyTorch's calls are faster."""
    if not x.is_cpu:
        return True
    if torch.compiler.is_compiling():
        return False
    # Loaded by name, as a machine without a GPU may lack Triton.
    launch = load("effasr_kernels.runtime.launch")
    return not isinstance(launch, str) and launch.serves_cpu()


def residual_stream(x: Tensor, *, in_fp32: bool) -> Tensor:
    """Return a stack's input, (T, width), in its stream's dtype: that of ``x`` without autocast."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.float32 if in_fp32 else torch.get_autocast_dtype(kind))


def draw_layer_seeds(layers: Iterable[Any], x: Tensor) -> list[tuple[Tensor, ...]]:
    """Draw the dropout seeds of all layers in one launch; none where a generator serves them."""
    counts = [layer.seeds if _takes_seeds(layer, x) else 0 for layer in layers]
    drawn = iter(draw_seeds(sum(counts), x.device) if any(counts) else ())
    return [tuple(islice(drawn, count)) for count in counts]


def normalized(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Normalize the stream on a CPU, also where fsdp2 has gathered narrower weights."""
    if norm.weight.dtype == x.dtype or x.dtype != torch.float32:
        return norm(x)
    weight, bias = norm.weight.float(), norm_bias(norm).float()
    return F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)


def norm_bias(norm: nn.LayerNorm) -> Tensor:
    """The bias of a norm; zeros where it has none, as kernels add one."""
    return torch.zeros_like(norm.weight) if norm.bias is None else norm.bias


@dataclass(frozen=True, slots=True)
class Residual:
    """Adds the outputs of a layer's modules to the residual stream, and normalizes the sum.

    The last linear layer of a module leaves its bias to the addition (`project`), whose backward
    then sums the gradient of the bias with the rows that it computes anyway.
    """

    layout: PackedLayout
    dropout: float  # Probability to drop an element of an output; 0 outside training
    # int64 (), shared by the dropouts of rows, each at its own offset, and by self-attention, which
    # decides independently of them. None on a CPU (the global generator), or if nothing is dropped.
    seed: Tensor | None

    @classmethod
    def of(
        cls,
        layer: Any,
        x: Tensor,
        layout: PackedLayout,
        dropout: float,
        seeds: Sequence[Tensor] = (),
    ) -> "Residual":
        seeds = seeds or draw_layer_seeds([layer], x)[0]
        return cls(layout, dropout if layer.training else 0.0, seeds[0] if seeds else None)

    @staticmethod
    def project(last: nn.Linear, y: Tensor) -> Tensor:
        """Apply the last layer of a module whose output `add` or a norm is given with ``last``."""
        return last(y) if _bias_of(last, y) is None else last(y, with_bias=False)

    def norm(self, x: Tensor, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
        """The normalized stream and the next ``x``, whose gradients meet in the norm's backward."""
        if not is_fused(x):
            return normalized(x, norm), x
        bias = norm_bias(norm)
        return dropout_add_layer_norm(None, x, norm.weight, bias, self.layout, eps=norm.eps)

    def add(
        self, x: Tensor, output: Tensor, last: nn.Module, *, offset: int, scale: float = 1.0
    ) -> Tensor:
        """The stream with ``scale`` times the output of a module, without the bias of ``last``.

        ``offset`` numbers this dropout among those with the same seed.
        """
        return self._add(x, output, last, None, offset=offset, scale=scale)

    def add_norm(
        self,
        x: Tensor,
        output: Tensor,
        last: nn.Module,
        norm: nn.LayerNorm,
        *,
        offset: int,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """The normalized result of `add`, and that result."""
        if is_fused(x):
            return self._add(x, output, last, norm, offset=offset, scale=scale)
        x = self.add(x, output, last, offset=offset, scale=scale)
        return normalized(x, norm), x

    def add_post_norm(
        self,
        x: Tensor,
        output: Tensor,
        last: nn.Module,
        norm: nn.LayerNorm,
        *,
        offset: int,
        scale: float = 1.0,
    ) -> Tensor:
        """The normalized result of `add`, which goes on as the stream."""
        if is_fused(x):
            return self._add(x, output, last, norm, offset=offset, scale=scale, prenorm=False)
        return normalized(self.add(x, output, last, offset=offset, scale=scale), norm)

    def _add(
        self,
        x: Tensor,
        output: Tensor,
        last: nn.Module,
        norm: nn.LayerNorm | None,
        *,
        scale: float,
        **options: Any,
    ) -> Any:
        if not is_fused(x):
            return torch.add(x, F.dropout(output, self.dropout), alpha=scale)
        weight: Any = None
        bias: Any = None
        if norm is not None:
            weight, bias = norm.weight, norm_bias(norm)
            options["eps"] = norm.eps
        return dropout_add_layer_norm(
            output,
            x,
            weight,
            bias,
            self.layout,
            x_bias=_bias_of(last, x),
            scale=scale,
            dropout=self.dropout,
            seed=self.seed,
            **options,
        )


def _takes_seeds(layer: Any, x: Tensor) -> bool:
    return layer.training and any(layer.dropouts) and is_fused(x)


def _bias_of(last: nn.Module, x: Tensor) -> Tensor | None:
    # An adapter and experts add their own bias; where the steps are separate, the product adds it
    # for nothing.
    return last.bias if is_fused(x) and type(last) is Linear else None
