"""Settings of a calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationConfig:
    """How `data.frame_budget: auto` is decided.

    Attributes:
        target_share: Share of the memory of the GPU, or of this process's part of the host's where
            there is none, that training may take.
        target_bytes: The same in bytes, in place of a share.
        objective: ``throughput``: the smallest budget that trains nearly as much audio per second
            as the best; ``memory``: the largest that fits.
        tolerance: What ``nearly`` is: 0.02 gives up at most 2 %.
        margin: Share by which the predicted peak must stay below the target. It is for what trials
            do not see: buffers of communication, fragments, validation.
    """

    target_share: float = 0.9
    target_bytes: int | None = None
    objective: Literal["throughput", "memory"] = "throughput"
    tolerance: float = 0.02
    margin: float = 0.05

    def __post_init__(self) -> None:
        if not 0 < self.target_share <= 1:
            raise ValueError(
                f"`target_share` must be above 0 and at most 1, but is {self.target_share}."
            )
        if self.target_bytes is not None and self.target_bytes < 1:
            raise ValueError(
                f"`target_bytes` must be at least 1 or null, but is {self.target_bytes}."
            )
        for name in ("tolerance", "margin"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"`{name}` must lie in [0, 1), but is {getattr(self, name)}.")
