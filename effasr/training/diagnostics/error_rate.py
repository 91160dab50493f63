"""Detects a word error rate that stays near 100 %."""

from __future__ import annotations

import math
from typing import Any

from effasr.training.diagnostics.config import DiagnosticsConfig
from effasr.training.diagnostics.finding import Finding, Validation

_STUCK = 0.9
_PROGRESS = 0.05
"""Least decrease from the oldest to the newest rate that counts as progress."""


class StuckErrorRate:
    """Keeps the word error rates of the latest validations."""

    def __init__(self, config: DiagnosticsConfig) -> None:
        self._count = config.validations
        self._rates: list[float] = []

    def check(self, validation: Validation) -> Finding | None:
        """Return a finding if the error rate does not decrease."""
        rate = validation.errors.wer
        if math.isnan(rate):
            return None
        self._rates = [*self._rates, rate][-self._count :]
        rates = self._rates
        if len(rates) < self._count or min(rates) <= _STUCK or rates[-1] < rates[0] - _PROGRESS:
            return None
        shown = ", ".join(f"{100 * each:.0f}" for each in rates)
        return Finding(
            "The word error rate stays over 90 %",
            f"The latest {self._count} validations gave {shown} %.",
            "if other warnings are shown, follow those first. Otherwise check on the hypotheses "
            "that texts, languages and audio belong together; lower optimizer.lr; or start from a "
            "trained model (init_from).",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the rates."""
        return {"rates": list(self._rates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the rates from a `state_dict`."""
        self._rates = list(state["rates"])
