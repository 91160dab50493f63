"""Layers of a stack: activation checkpointing, compilation, and skipping of unused layers."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from effasr import ranges
from effasr.nn.parameters import is_sharded_tensor, touch_unused_parameters
from effasr.nn.residual import draw_layer_seeds
from effasr_kernels import PackedLayout, PackedSequence
from effasr_kernels.update_running_statistics import updates_together

# Per thread, because autograd recomputes in a thread of its own.
_here = threading.local()


class Layer(nn.Module):
    """A layer of a stack; its forward is wrapped by `checkpointed_forward`."""

    is_checkpointed = False
    is_compiled = False
    seeds: int = 0  # Number of seeds that its forward takes as ``seeds``, where it drops anything

    @property
    def dropouts(self) -> tuple[float, ...]:
        return ()


def checkpointed_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward of a `Layer`: (self, x, ...) to anything.

    The result also takes ``idle=True``, and then returns ``x`` unchanged, with a backward that
    touches the layer's parameters: see `skip_layers`.

    A recomputed layer draws the same random numbers, seeds of operations included, so its gradients
    are the same bit by bit. Side effects of a forward, such as running statistics, must happen
    once: the forward checks `is_recomputing`.
    """

    def compute(self: Layer, *args: Any, **seeds: Any) -> Any:
        if not (self.is_checkpointed and torch.is_grad_enabled() and _is_reached(self, args)):
            return forward(self, *args, **seeds)
        # The compiler does not support contexts and needs none: in its own recomputation it omits
        # everything that changes a buffer.
        options: Any = (
            {}
            if torch.compiler.is_compiling()
            else {"context_fn": lambda: (nullcontext(), _recomputing())}
        )
        return checkpoint(partial(forward, self, **seeds), *args, use_reentrant=False, **options)

    @cache
    def compiled() -> Callable[..., Any]:
        # One compiled function for all layers, which differ only in their weights.
        return torch.compile(compute, fullgraph=True, dynamic=False)

    @wraps(forward)
    def run(self: Layer, x: Tensor, *args: Any, idle: bool = False, **seeds: Any) -> Any:
        if idle:
            return touch_unused_parameters(x, self.parameters())
        return (compiled() if self.is_compiled else compute)(self, x, *args, **seeds)

    return run


def apply_activation_checkpointing(model: nn.Module, every: int) -> None:
    """Checkpoint every ``every``-th layer of each stack, from the first."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for number, layer in enumerate(module):
                if isinstance(layer, Layer):
                    layer.is_checkpointed = number % every == 0


def compile_layers(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Layer):
            module.is_compiled = True


def is_recomputing() -> bool:
    return getattr(_here, "depth", 0) > 0


def is_sharded(layers: Iterable[nn.Module]) -> bool:
    return any(is_sharded_tensor(next(layer.parameters(), None)) for layer in layers)


def skip_layers(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    """Return ``x`` past unused layers, which are gathered nevertheless if they are sharded.

    Processes gather sharded layers and reduce their gradients together and in one order, so a
    process whose batch does not use a layer must take part, in forward and backward. The gradient
    of the layer is zero. Layers that are not sharded are left alone.
    """
    layers = list(layers)
    if is_sharded(layers):
        for layer in layers:
            x = layer(x, idle=True)
    return x


def skip_branch(parts: Iterable[nn.Module], like: Tensor) -> Tensor | None:
    """Skip a branch of the model that this batch does not use, as another process may use it.

    As with `skip_layers`, processes gather sharded layers in one order. If some parts are frozen,
    which layers have a backward depends on what is trained before them, so the skipped branch has a
    graph of its own, until `join_skipped` where the results of both branches are alternatives.
    ``parts`` are in the order in which they run; a `nn.ModuleList` holds layers. The result is a
    zero whose gradient gives every trained parameter a zero gradient; None if the layers are not
    sharded.
    """
    parts = list(parts)
    if not any(is_sharded(part) for part in parts if isinstance(part, nn.ModuleList)):
        return None
    skipped = torch.zeros((), device=like.device)
    for part in parts:
        if isinstance(part, nn.ModuleList):
            skipped = skip_layers(part, skipped)
        else:
            skipped = touch_unused_parameters(skipped, part.parameters())
    return skipped


def join_skipped(x: Tensor, skipped: Tensor | None) -> Tensor:
    """``x``, whose backward runs that of a skipped branch as well; see `skip_branch`."""
    return x if skipped is None else touch_unused_parameters(x, [skipped])


def run_layers(
    layers: nn.ModuleList,
    name: str,
    x: Tensor,
    layout: PackedLayout,
    *args: Any,
    losses: list[Tensor] | None = None,
    first: int = 0,
) -> Any:
    """Run a stack: ``layer(x, *args, seeds=seeds)``; skip it for an empty batch if sharded.

    A layer with routers returns their losses, too, as an output of its own: hooks of a sharded
    layer then see the gradient. They are appended to ``losses``. ``first``: number of the first
    layer, for profilers.
    """
    if is_empty(layout) and is_sharded(layers):
        return skip_layers(layers, x)
    all_seeds = draw_layer_seeds(layers, x)
    # What the compiler traces launches each update by itself.
    with nullcontext() if torch.compiler.is_compiling() else updates_together():
        for number, (layer, seeds) in enumerate(zip(layers, all_seeds, strict=True), first):
            with ranges.range(f"{name}.{number}"):
                x = layer(x, *args, seeds=seeds)
            if isinstance(x, tuple):
                x, layer_losses = x
                if losses is not None:
                    losses.append(layer_losses)
    return x


def is_empty(*layouts: PackedLayout) -> bool:
    """Whether the host knows that a batch has no row in one of its layouts."""
    return all(layout.known_on_host for layout in layouts) and 0 in [x.total for x in layouts]


def _is_reached(layer: nn.Module, inputs: Iterable[Any]) -> bool:
    """Whether the backward reaches a layer: it, or something before it, is trained."""
    values = [x.values if isinstance(x, PackedSequence) else x for x in inputs]
    tensors = [x for x in values if isinstance(x, Tensor)]
    return any(x.requires_grad for x in (*tensors, *layer.parameters()))


@contextmanager
def _recomputing() -> Iterator[None]:
    _here.depth = getattr(_here, "depth", 0) + 1
    try:
        with ranges.range("recompute"):
            yield
    finally:
        _here.depth -= 1
