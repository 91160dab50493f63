"""The learning rate of a larger batch than the one a recipe was made for."""

from __future__ import annotations

import math

from effasr.optim.adamw import OptimizerConfig


def relative_batch(micro_batches: int, reference: int | None) -> float:
    """Return the ratio of a step's batch to the reference; 1 without one."""
    return 1.0 if reference is None else micro_batches / reference


def peak_learning_rate(config: OptimizerConfig, micro_batches: int) -> float:
    """Return the peak learning rate for a step of ``micro_batches`` of all ranks.

    With k times the reference batch it is ``lr`` (``none``), k ``lr`` (``linear``: Goyal et al.
    2017, for SGD), or sqrt(k) ``lr`` (``sqrt``: Krizhevsky 2014, and for Adam Malladi et al. 2022,
    who change betas and epsilon as well, which stay here).
    """
    ratio = relative_batch(micro_batches, config.lr_reference_micro_batches)
    if config.lr_scaling == "linear":
        return config.lr * ratio
    if config.lr_scaling == "sqrt":
        return config.lr * math.sqrt(ratio)
    return config.lr
