"""AdamW, and an update that the device can skip by itself."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from effasr.optim.groups import Exempt


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW.

    Attributes:
        lr: Peak learning rate; the schedule multiplies it.
        betas: Decay of the first and second moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled, multiplied by the learning rate.
        exempt: Kinds of parameters without weight decay: ``biases``, ``norms``, ``embeddings``.
        implementation: ``torch``: fused AdamW of PyTorch. ``apex``: FusedAdam of NVIDIA's apex,
            CUDA only. ``auto``: apex where NVIDIA's is installed and the device is a GPU.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.01
    exempt: tuple[Exempt, ...] = ("biases", "norms")
    implementation: Literal["auto", "torch", "apex"] = "auto"

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"`lr` must be positive, but is {self.lr}.")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"`betas` must lie in [0, 1), but are {self.betas}.")
        if self.eps <= 0:
            raise ValueError(f"`eps` must be positive, but is {self.eps}.")
        if self.weight_decay < 0:
            raise ValueError(f"`weight_decay` must be at least 0, but is {self.weight_decay}.")


def build_adamw(
    groups: Sequence[dict[str, Any]], config: OptimizerConfig, device: torch.device
) -> torch.optim.Optimizer:
    """Make the optimizer.

    Args:
        groups: Of `parameter_groups`.
        config: Which, and how.
        device: Of the parameters.

    Raises:
        ValueError: ``apex`` is asked for, and NVIDIA's apex is missing or the device is no GPU.
    """
    settings: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    reason = why_not_apex(device)
    if config.implementation == "apex" and reason is not None:
        raise ValueError(f"`implementation` must not be 'apex' here: {reason}. Use 'auto'.")
    if config.implementation != "torch" and reason is None:
        optimizers = importlib.import_module("apex.optimizers")
        return optimizers.FusedAdam(list(groups), adam_w_mode=True, **settings)
    return torch.optim.AdamW(list(groups), fused=True, **settings)


def why_not_apex(device: torch.device) -> str | None:
    """The reason for which NVIDIA's apex cannot be used, or None. Nothing of it is imported."""
    if device.type != "cuda":
        return f"apex needs a GPU, and the device is {device.type}"
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return "apex is not installed"
    folders = spec.submodule_search_locations or []
    if not any((Path(folder) / "optimizers" / "fused_adam.py").is_file() for folder in folders):
        return "the installed `apex` is another package of that name (PyPI's), not NVIDIA's"
    if importlib.util.find_spec("amp_C") is None:
        return "NVIDIA's apex is installed without its CUDA extensions"
    return None


def restore(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Take the moments and counts of a saved ``state_dict``, but not its settings.

    PyTorch's ``load_state_dict`` alone would bring back the learning rate, betas, epsilon and
    weight decay of the time of saving, whatever the configuration says now.

    Args:
        optimizer: With the settings that are to apply.
        state: Of an optimizer of the same groups of parameters.
    """
    settings = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(state)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def apply_update(optimizer: torch.optim.Optimizer, finite: Tensor) -> None:
    """Make one update, or none at all where ``finite`` is false.

    PyTorch's fused optimizers decide on the device, so that the host never waits; any other
    optimizer costs one wait for the device.

    Args:
        optimizer: Gradients are in place.
        finite: Bool (), on the device of the parameters.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        # The protocol by which torch.amp.GradScaler hands its verdict to a fused optimizer.
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        optimizer.step()
    elif finite:
        optimizer.step()
