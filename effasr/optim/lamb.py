"""LAMB for large batches, from a library that implements it."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Sequence
from typing import Any

import torch

from effasr.optim.adamw import OptimizerConfig, apex_unsupported_reason, has_sharded


def build_lamb(
    groups: Sequence[dict[str, Any]], config: OptimizerConfig, device: torch.device
) -> torch.optim.Optimizer:
    """Build the optimizer from the groups of `parameter_groups`.

    The result is that of the paper's third version, without bias correction of the moments and
    without bounds on the norm of weights, with either library. Updates of parameters without weight
    decay are not scaled, as in the authors' code. Gradients are not clipped here. No library can
    skip an update on the device, so `apply_update` synchronizes with it once a step.

    References:
        You et al., 2020, https://arxiv.org/abs/1904.00962.
    """
    settings: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    reason = apex_unsupported_reason(device, "fused_lamb.py", sharded=has_sharded(groups))
    if config.implementation == "apex" and reason is not None:
        raise ValueError(f"`implementation` must not be 'apex' here: {reason}. Use 'auto'.")
    if config.implementation != "torch" and reason is None:
        optimizers = importlib.import_module("apex.optimizers")
        return optimizers.FusedLAMB(
            list(groups), bias_correction=False, max_grad_norm=math.inf, **settings
        )
    if importlib.util.find_spec("pytorch_optimizer") is None:
        raise ValueError(
            "`name` must not be 'lamb' here: `pytorch_optimizer` is not installed, and "
            f"{reason or 'apex is not requested'}. "
            "Install one (pip install 'effasr[lamb]'), or use adamw."
        )
    library = importlib.import_module("pytorch_optimizer")
    # ``adam`` leaves a group's updates unscaled; ``adam_debias`` means no bias correction.
    own = [{**group, "adam": not group["weight_decay"]} for group in groups]
    optimizer = library.Lamb(own, weight_decouple=False, adam_debias=True, **settings)
    optimizer.clamp = math.inf
    return optimizer
