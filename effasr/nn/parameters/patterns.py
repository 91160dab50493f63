"""Patterns of paths, such as ``encoder.layers.[0-9].*``, and what of a model they choose."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from torch import nn


def matching(paths: Collection[str], patterns: Iterable[str], argument: str) -> set[str]:
    """The paths that a pattern matches, itself or by a module in which they are.

    Args:
        paths: Dotted, as of ``named_parameters``.
        patterns: As of a shell (`fnmatch`), where ``*`` stands for dots as well.
        argument: Where the patterns come from, for the message.

    Raises:
        ValueError: A pattern matches none, and would be without effect.
    """
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
    """Train no parameter that a pattern matches; `evaluate_frozen` says what else follows.

    Args:
        model: Some of whose parameters become such that require no gradient.
        patterns: See `matching`.
        argument: Where they come from, for the message.

    Raises:
        ValueError: A pattern matches nothing, or nothing is left to train.
    """
    parameters = dict(model.named_parameters())
    for name in matching(parameters, patterns, argument):
        parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ValueError(
            f"`{argument}` must leave something to train, but matches all of the model: use fewer "
            "patterns."
        )


def evaluate_frozen(model: nn.Module) -> None:
    """Put the parts of a model into evaluation mode that have parameters, but none to train.

    There batch norms keep and use their running statistics, and nothing is dropped, as NeMo's
    ``freeze`` does: what does not learn from noise only suffers from it. A part with anything to
    train, be it an adapter, stays in the mode that it has, as do parts without parameters.
    """
    for module in model.children():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            module.eval()
        else:
            evaluate_frozen(module)


def _within(path: str) -> list[str]:
    """A path, and those of the modules in which it is, the innermost first."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
