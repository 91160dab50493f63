"""Patterns of parameter names, frozen, sharded and unused parameters, and evaluation mode."""

import difflib
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the length of a context; restores the mode of each module."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def matching(paths: Collection[str], patterns: Iterable[str], argument: str) -> set[str]:
    """The paths that a shell pattern matches, directly or by a module that contains them."""
    chosen: set[str] = set()
    for pattern in patterns:
        matches = {path for path in paths if any(fnmatchcase(x, pattern) for x in _within(path))}
        if not matches:
            names = {name: None for path in paths for name in _within(path)}
            near = difflib.get_close_matches(pattern.strip("*."), names, n=1, cutoff=0.0)
            raise ValueError(
                f"`{argument}` must have patterns that each match a part of this model, but "
                f"{pattern!r} matches none: {f'did you mean {near[0]!r}?' if near else 'drop it.'}"
            )
        chosen |= matches
    return chosen


def freeze(model: nn.Module, patterns: Iterable[str], argument: str = "freeze") -> None:
    """Freeze the parameters that a pattern matches; see also `evaluate_frozen`."""
    parameters = dict(model.named_parameters())
    for name in matching(parameters, patterns, argument):
        parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ValueError(
            f"`{argument}` must leave something to train, but matches all of the model: use fewer "
            "patterns."
        )


def evaluate_frozen(model: nn.Module) -> None:
    """Put modules whose parameters are all frozen into evaluation mode.

    There batch norms use their running statistics without updating them, and dropout is off, as
    after NeMo's ``freeze``. Modules with any trainable parameter, such as an adapter, and modules
    without parameters keep their mode.
    """
    for module in model.children():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            module.eval()
        else:
            evaluate_frozen(module)


def _within(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def is_sharded_tensor(value: object) -> "TypeGuard[DTensor]":
    """Whether FSDP2 has sharded a parameter.

    If nobody has imported the module, it has not: the import takes half a second, for which a
    command that only reads a model should not wait.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def touch_unused_parameters(x: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """``x``, whose backward gives these parameters a zero gradient, for which DDP would wait.

    Sharded ones are skipped: their layer, which gathers them for its own forward, must touch them.
    """
    reached = [parameter for parameter in parameters if not is_sharded_tensor(parameter)]
    return _TouchParameters.apply(x, *reached)  # type: ignore[return-value]


class _TouchParameters(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.forms = [(parameter.shape, parameter.dtype) for parameter in parameters]
        # Not a view, of which FSDP2 warns; x is as small as a loss.
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        (dx,) = grad_outputs
        # One zero each, however large the parameter.
        return dx, *(dx.new_zeros((), dtype=dtype).expand(shape) for shape, dtype in ctx.forms)
