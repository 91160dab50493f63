"""Map from raw confidences to probabilities that a word is right."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from effasr.data.checksums import verify_content
from effasr.untrusted.documents import read_json_object

_LEAST = 1e-6


def logit(confidence: float) -> float:
    """Return the log-odds of a confidence, which is taken to be at least 1e-6 from 0 and 1."""
    inner = min(max(confidence, _LEAST), 1 - _LEAST)
    return math.log(inner / (1 - inner))


@dataclass(frozen=True, slots=True)
class ConfidenceCalibration:
    """An affine map of log-odds: ``slope`` is an inverse temperature."""

    slope: float
    intercept: float
    method: str  # of decoding, to whose confidences it was fitted

    def __call__(self, confidence: float) -> float:
        odds = self.slope * logit(confidence) + self.intercept
        return 1 / (1 + math.exp(-odds)) if odds > -700 else 0.0

    @classmethod
    def load(cls, path: str | Path) -> Self:
        try:
            row = read_json_object(path)
            verify_content(row, str(path))
        except ValueError as error:
            raise ValueError(
                f"`calibration`: {error} Fit it again by `effasr evaluate --confidence`."
            ) from error
        numbers = [row.get(name) for name in ("slope", "intercept")]
        valid = all(isinstance(x, int | float) and math.isfinite(x) for x in numbers)
        if not valid or not isinstance(row.get("method"), str):
            raise ValueError(
                f"`calibration` {path} must have numbers `slope` and `intercept` and the `method`, "
                "but has not: fit it by `effasr evaluate --confidence` on a dev set."
            )
        return cls(float(row["slope"]), float(row["intercept"]), row["method"])


def load_calibration(path: Path | None, method: str) -> ConfidenceCalibration | None:
    if path is None:
        return None
    calibration = ConfidenceCalibration.load(path)
    if calibration.method != method:
        raise ValueError(
            f"`calibration` {path} must be of the method {method}, but is of "
            f"{calibration.method}: confidences of different methods do not compare."
        )
    return calibration
