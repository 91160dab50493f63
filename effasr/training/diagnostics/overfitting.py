"""Detects overfitting: the training loss falls, validation loss and error rate do not."""

from __future__ import annotations

import math
from typing import Any

from effasr.training.diagnostics.config import DiagnosticsConfig
from effasr.training.diagnostics.finding import Finding, Validation

_RISE = 0.01
"""Least relative rise of the validation loss above its minimum."""


class Overfitting:
    """Keeps the losses and the error rate at the lowest validation loss.

    The condition holds if ``validations`` validations have followed the lowest loss, the loss is
    above it, no error rate since was better, and the training loss has fallen.
    """

    def __init__(self, config: DiagnosticsConfig) -> None:
        self._count = config.validations
        self._lowest: tuple[float, float, float] | None = None
        self._since = 0
        self._is_better = False

    def check(self, validation: Validation) -> Finding | None:
        """Return a finding for the first loss that the model has: decoder, transducer or CTC."""
        for name in ("cross_entropy", "transducer", "ctc"):
            dev, train = getattr(validation.probe, name), validation.train.get(name)
            if dev is not None and train is not None:
                break
        else:
            return None
        rate = validation.errors.wer
        if math.isnan(rate) or not math.isfinite(dev):
            return None
        if self._lowest is None or dev < self._lowest[0]:
            self._lowest, self._since, self._is_better = (dev, train, rate), 0, False
            return None
        lowest, train_there, rate_there = self._lowest
        self._since += 1
        self._is_better |= rate < rate_there
        risen = dev > lowest * (1 + _RISE)
        if self._since < self._count or not risen or self._is_better or train >= train_there:
            return None
        return Finding(
            "The model overfits",
            f"Since {self._since} validations the training loss has fallen from "
            f"{train_there:.2f} to {train:.2f}, and the validation loss has risen from "
            f"{lowest:.2f} to {dev:.2f} (WER {100 * rate_there:.1f} to {100 * rate:.1f} %).",
            "stop here (the best checkpoint is kept), or begin anew with more data, with "
            "data.speed_perturbation=[0.9,1.0,1.1], with dropout "
            "(model.encoder.residual_dropout=0.1) or with a smaller model.",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the lowest loss and the progress since then."""
        lowest = None if self._lowest is None else list(self._lowest)
        return {"lowest": lowest, "since": self._since, "is_better": self._is_better}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a `state_dict`."""
        lowest = state["lowest"]
        self._lowest = None if lowest is None else (lowest[0], lowest[1], lowest[2])
        self._since, self._is_better = state["since"], state["is_better"]
