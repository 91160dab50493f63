"""Patterns of parameter names, such as ``encoder.layers.[0-9].*``."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from torch import nn


def matching(paths: Collection[str], patterns: Iterable[str], argument: str) -> set[str]:
    """Return the paths that a pattern matches, directly or by a module that contains them."""
    chosen: set[str] = set()
    for pattern in patterns:
        found = {path for path in paths if any(fnmatchcase(x, pattern) for x in _within(path))}
        if not found:
            names = {name: None for path in paths for name in _within(path)}
            near = difflib.get_close_matches(pattern.strip("*."), names, n=1, cutoff=0.0)
            raise ValueError(
                f"`{argument}` must have patterns that each match a part of this model, but "
                f"{pattern!r} matches none: {f'did you mean {near[0]!r}?' if near else 'drop it.'}"
            )
        chosen |= found
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
    """Return a path and those of the modules that contain it, the innermost first."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
