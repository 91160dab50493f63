"""What a larger batch than the one a recipe was made for means for its learning rate."""

from __future__ import annotations

import math

from effasr.optim.adamw import OptimizerConfig


def relative_batch(micro_batches: int, reference: int | None) -> float:
    """By how much a step's batch is larger than the reference; 1 without one."""
    return 1.0 if reference is None else micro_batches / reference


def peak_learning_rate(config: OptimizerConfig, micro_batches: int) -> float:
    """The peak for a step of ``micro_batches``, over all ranks and accumulation.

    With k times the reference batch it is ``lr`` (``none``), k ``lr`` (``linear``: Goyal et al.
    2017, for SGD), or sqrt(k) ``lr`` (``sqrt``: Krizhevsky 2014, and for Adam by its stochastic
    differential equation Malladi et al. 2022; theirs changes the betas and epsilon, too, which
    stay as they are here).

    Args:
        config: Of the optimizer.
        micro_batches: Of a step.
    """
    ratio = relative_batch(micro_batches, config.lr_reference_micro_batches)
    if config.lr_scaling == "linear":
        return config.lr * ratio
    if config.lr_scaling == "sqrt":
        return config.lr * math.sqrt(ratio)
    return config.lr
