"""Layers of a stack: each may be computed again in the backward, compiled, or passed by."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from effasr import ranges
from effasr.nn.parameters.sharded import is_sharded_tensor
from effasr.nn.parameters.unused import touch_unused_parameters
from effasr_kernels import PackedLayout, PackedSequence

# Of the thread, for autograd computes again in its own.
_here = threading.local()


class Layer(nn.Module):
    """One of a stack; its forward is made by `checkpointed_forward`.

    Attributes:
        is_checkpointed: Whether only its inputs are kept between the forward and the backward.
        is_compiled: Whether torch.compile makes it, alone.
    """

    is_checkpointed = False
    is_compiled = False


def checkpointed_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Make the forward of a `Layer` from what it computes: (self, x, ...) to anything.

    The result takes ``idle=True`` besides, and then returns ``x`` as it is, whose backward reaches
    the layer's parameters: see `skip_layers`.

    Where a layer is computed again, the random numbers are the same, those of seeds that an
    operation draws included, and so are the gradients, bit by bit. What a forward leaves behind,
    such as running statistics, it must leave once: it asks `is_recomputing`.
    """

    def compute(self: Layer, *args: Any) -> Any:
        if not (self.is_checkpointed and torch.is_grad_enabled() and _is_reached(self, args)):
            return forward(self, *args)
        # The compiler takes no contexts, and needs none: of what it computes again, it leaves out
        # all that changes a buffer.
        options: Any = {} if torch.compiler.is_compiling() else {"context_fn": _contexts}
        return checkpoint(partial(forward, self), *args, use_reentrant=False, **options)

    @cache
    def compiled() -> Callable[..., Any]:
        # One for all layers, which differ by their weights alone.
        return torch.compile(compute, fullgraph=True, dynamic=False)

    @wraps(forward)
    def run(self: Layer, x: Tensor, *args: Any, idle: bool = False) -> Any:
        if idle:
            return touch_unused_parameters(x, self.parameters())
        return (compiled() if self.is_compiled else compute)(self, x, *args)

    return run


def apply_activation_checkpointing(model: nn.Module, every: int) -> None:
    """Let each ``every``-th layer of every stack in a model be recomputed, its first included."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for number, layer in enumerate(module):
                if isinstance(layer, Layer):
                    layer.is_checkpointed = number % every == 0


def compile_layers(model: nn.Module) -> None:
    """Let torch.compile make each layer of every stack in a model, for batches of one shape."""
    for module in model.modules():
        if isinstance(module, Layer):
            module.is_compiled = True


def is_recomputing() -> bool:
    """Whether this forward repeats an earlier one, which has left behind what it leaves."""
    return getattr(_here, "depth", 0) > 0


def is_sharded(layers: Iterable[nn.Module]) -> bool:
    """Whether processes have parts of layers, and gather each for its forward and backward."""
    return any(is_sharded_tensor(next(layer.parameters(), None)) for layer in layers)


def skip_layers(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    """Return ``x`` after layers that have nothing to do, each of which is gathered all the same.

    The processes of a group gather sharded layers together, in one order, and reduce their
    gradients together: so a process whose batch does not use a layer must come by, in the forward
    and in the backward. The gradient of the layer is zero. Layers that are not sharded are left
    alone.
    """
    layers = list(layers)
    if is_sharded(layers):
        for layer in layers:
            x = layer(x, idle=True)
    return x


def is_empty(*layouts: PackedLayout) -> bool:
    """Whether it is known on the host that a batch has no row in one of its layouts."""
    return all(layout.known_on_host for layout in layouts) and 0 in [x.total for x in layouts]


def _is_reached(layer: nn.Module, inputs: Iterable[Any]) -> bool:
    """Whether the backward comes to a layer: not where neither it nor what is before it learns."""
    values = [x.values if isinstance(x, PackedSequence) else x for x in inputs]
    tensors = [x for x in values if isinstance(x, Tensor)]
    return any(x.requires_grad for x in (*tensors, *layer.parameters()))


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _recomputing()


@contextmanager
def _recomputing() -> Iterator[None]:
    _here.depth = getattr(_here, "depth", 0) + 1
    try:
        with ranges.range("recompute"):
            yield
    finally:
        _here.depth -= 1
