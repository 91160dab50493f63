"""Settings of a calibration."""

from dataclasses import dataclass
from typing import Literal

from effasr.checks import check


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationConfig:
    """Settings of ``data.frame_budget: auto``.

    Attributes:
        target_share: Share of the memory that training may use: of the GPU's memory, or without a
            GPU of this process's part of the host's.
        target_bytes: Memory that training may use, in bytes, instead of a share.
        objective: ``throughput``: the smallest budget that trains nearly as much audio per second
            as the best, on a GPU the smallest such budget that fills all multiprocessors evenly, if
            there is one; ``memory``: the largest that fits.
        tolerance: Loss of speed that ``throughput`` accepts: 0.02 gives up at most 2 %.
        margin: Share by which the predicted peak must stay below the target, for memory that trials
            do not measure: communication buffers, fragmentation, validation.
    """

    target_share: float = 0.9
    target_bytes: int | None = None
    objective: Literal["throughput", "memory"] = "throughput"
    tolerance: float = 0.02
    margin: float = 0.05

    def __post_init__(self) -> None:
        rule = "be above 0 and at most 1"
        check(0 < self.target_share <= 1, "target_share", rule, self.target_share)
        if self.target_bytes is not None and self.target_bytes < 1:
            raise ValueError(
                f"`target_bytes` must be at least 1 or null, but is {self.target_bytes}."
            )
        for name in ("tolerance", "margin"):
            check(0 <= getattr(self, name) < 1, name, "lie in [0, 1)", getattr(self, name))
