"""Parameter groups with and without weight decay."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

from torch import nn

Exempt = Literal["biases", "norms", "embeddings"]


def parameter_groups(
    model: nn.Module, weight_decay: float, exempt: Collection[Exempt]
) -> list[dict[str, Any]]:
    """Split the parameters in two groups for an optimizer: with and without weight decay.

    A shared parameter is listed once, by the first module that has it. The order is that of
    ``model.named_parameters()``, so it is the same in every process.
    """
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen or not parameter.requires_grad:
                continue
            seen.add(parameter)
            (spared if _kind(module, name) in exempt else decayed).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _kind(module: nn.Module, name: str) -> Exempt | None:
    if "Norm" in type(module).__name__:
        return "norms"
    if isinstance(module, nn.Embedding):
        return "embeddings"
    if name == "bias" or name.endswith("_bias") or name.startswith(("bias_ih", "bias_hh")):
        return "biases"
    return None
