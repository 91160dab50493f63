"""Metrics of evaluations and validations: which values are better, and how they are written."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    name: str  # field of validation.jsonl and wer.json
    label: str
    higher_is_better: bool = False
    factor: int = 100
    unit: str = " %"

    def is_better(self, value: float, best: float) -> bool:
        """Compare a value with the best so far, infinity where there is none; NaN never is better.

        Every choice of a best checkpoint is made here.
        """
        if math.isnan(value) or math.isinf(best):
            return not math.isnan(value)
        return value > best if self.higher_is_better else value < best

    def figure(self, value: float | None) -> str:
        """Return a value without its unit; a dash where it is undefined."""
        return "-" if value is None or math.isnan(value) else f"{self.factor * value:.2f}"

    def text(self, value: float | None) -> str:
        return f"{self.figure(value)}{self.unit}"


BY_NAME = {
    metric.name: metric
    for metric in (
        Metric("wer", "WER"),
        Metric("cer", "CER"),
        Metric("loss", "loss", factor=1, unit=""),
        Metric("bleu", "BLEU", higher_is_better=True, factor=1, unit=""),
        Metric("chrf", "chrF", higher_is_better=True, factor=1, unit=""),
    )
}
