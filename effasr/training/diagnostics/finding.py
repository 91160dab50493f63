"""What the detectors see, and what they find."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from effasr.evaluation.result import Evaluation
from effasr.evaluation.wer import ErrorCounts, total
from effasr.training.diagnostics.probe_sums import ProbeSums


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition that holds now.

    Attributes:
        title: The condition, as a clause.
        cause: The figures that show it, and what they mean, as sentences.
        remedy: What to change, as sentences.
    """

    title: str
    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.title}. {self.cause} Remedy: {self.remedy}"


@dataclass(frozen=True, slots=True)
class Validation:
    """A validation, over all sets and ranks.

    Attributes:
        epoch: Complete epochs.
        errors: Of all utterances.
        loops: Number of utterances whose hypothesis repeats itself, and whose reference does not.
        probe: Losses of some utterances; empty sums without any.
        train: Mean training losses since the validation before, by their names in metrics.jsonl;
            empty where no line was written since.
    """

    epoch: int
    errors: ErrorCounts
    loops: int = 0
    probe: ProbeSums = field(default_factory=ProbeSums)
    train: Mapping[str, float] = field(default_factory=dict)


def errors_of(evaluations: Mapping[str, Evaluation]) -> ErrorCounts:
    """Return the errors of several sets together."""
    return total(evaluation.errors for evaluation in evaluations.values())
