"""Learning-rate schedules: pure functions of the number of updates made."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from effasr.checks import check
from effasr.optim.adamw import OptimizerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Learning rate between zero and its peak over the steps of a run.

    Attributes:
        name: ``inverse_sqrt``: falls as one over the square root of the updates since the
            warm-up. ``noam``: the same, with ``optimizer.lr`` as the factor of the formula
            ``lr (width made) ** -0.5``, usually 0.5 to 5. ``constant``: stays at the peak.
            ``cosine``: falls to the floor at the last step, along half a cosine. ``flat_cosine``:
            stays at the peak up to ``flat_fraction`` of all steps, then as ``cosine``. ``wsd``:
            stays at the peak, and falls linearly over the last ``decay_fraction`` of all steps.
        warmup_steps: Updates over which the rate rises linearly from zero to its peak.
        steps: Steps after which ``cosine``, ``flat_cosine`` and ``wsd`` are at their floor, where
            they stay; null for the steps of the run.
        width: The width in the formula of ``noam``; null for that of the encoder.
        flat_fraction: Share of these steps after which ``flat_cosine`` begins to fall.
        decay_fraction: Share of these steps over which ``wsd`` falls.
        min_ratio: Floor of the learning rate as a fraction of the peak.
    """

    name: Literal["inverse_sqrt", "noam", "constant", "cosine", "flat_cosine", "wsd"] = (
        "inverse_sqrt"
    )
    warmup_steps: int = 2000
    steps: int | None = None
    width: int | None = None
    flat_fraction: float = 0.3
    decay_fraction: float = 0.2
    min_ratio: float = 0.0

    def __post_init__(self) -> None:
        check(self.warmup_steps >= 0, "warmup_steps", "be at least 0", self.warmup_steps)
        for name in ("steps", "width"):
            value = getattr(self, name)
            check(value is None or value >= 1, name, "be at least 1 or null", value)
        for name in ("flat_fraction", "decay_fraction", "min_ratio"):
            value = getattr(self, name)
            check(0 <= value <= 1, name, "lie between 0 and 1", value)


def learning_rate_ratio(config: ScheduleConfig, step: int, max_steps: int) -> float:
    """Return the learning rate of update ``step`` of ``max_steps``, as a part of the peak.

    The warm-up ends at update ``warmup_steps - 1`` and the cosine reaches its floor at update
    ``max_steps - 1``: both exactly. Of ``noam`` it is a part of ``optimizer.lr``.
    """
    made, warmup, peak = step + 1, max(config.warmup_steps, 1), 1.0
    if config.name == "noam":
        assert config.width is not None
        peak = 1 / math.sqrt(config.width * warmup)
    if made < config.warmup_steps:
        return peak * made / config.warmup_steps
    if config.name in ("inverse_sqrt", "noam"):
        return peak * max(math.sqrt(warmup / made), config.min_ratio)
    if config.name == "constant":
        return 1.0
    begin, max_steps = config.warmup_steps, config.steps or max_steps
    if config.name == "flat_cosine":
        begin = max(begin, config.flat_fraction * max_steps)
    elif config.name == "wsd":
        begin = max(begin, (1 - config.decay_fraction) * max_steps)
    if made <= begin:
        return 1.0
    progress = min((made - begin) / max(max_steps - begin, 1), 1.0)
    is_linear = config.name == "wsd"
    falling = 1 - progress if is_linear else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_ratio + (1 - config.min_ratio) * falling


# The learning rate of a larger batch than the one a recipe was made for.


def relative_batch(micro_batches: int, reference: int | None) -> float:
    """Return the ratio of a step's batch to the reference; 1 without one."""
    return 1.0 if reference is None else micro_batches / reference


def scaled(config: OptimizerConfig, micro_batches: int) -> OptimizerConfig:
    """Return the settings for a step of ``micro_batches`` of all ranks.

    With k times the reference batch the learning rate is ``lr`` (``none``), k ``lr`` (``linear``:
    Goyal et al. 2017, for SGD), or sqrt(k) ``lr`` (``sqrt``: Krizhevsky 2014). ``sde`` is the
    square-root rule of Malladi et al. (2022) for Adam, in which moments also decay k times as fast,
    and eps is divided by sqrt(k).
    """
    k, rule = relative_batch(micro_batches, config.lr_reference_micro_batches), config.lr_scaling
    if rule == "none":
        return config
    lr = config.lr * (k if rule == "linear" else math.sqrt(k))
    if rule != "sde":
        return replace(config, lr=lr)
    fastest = 1 / (1 - min(config.betas))
    limit = f"be at most {fastest:.4g} times the reference with optimizer.lr_scaling = sde"
    remedy = "above it a moment would have a negative decay: set optimizer.lr_scaling=sqrt"
    check(k <= fastest, "data.micro_batches", limit, f"{k:g} times it", remedy)
    first, second = (1 - k * (1 - beta) for beta in config.betas)
    return replace(config, lr=lr, betas=(first, second), eps=config.eps / math.sqrt(k))


def peak_learning_rate(config: OptimizerConfig, micro_batches: int) -> float:
    return scaled(config, micro_batches).lr
