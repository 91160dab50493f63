"""Input and output types of the detectors: validation results and findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from effasr.evaluation.result import Evaluation
from effasr.evaluation.wer import ErrorCounts, total
from effasr.training.diagnostics.probe_sums import ProbeSums


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition that a detector has observed.

    Attributes:
        title: The condition, as a clause.
        cause: The figures that show the condition and their interpretation, as sentences.
        remedy: Suggested changes, as sentences.
    """

    title: str
    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.title}. {self.cause} Remedy: {self.remedy}"


@dataclass(frozen=True, slots=True)
class Validation:
    """Results of a validation over all sets and ranks.

    Attributes:
        epoch: Number of complete epochs.
        errors: Error counts over all utterances.
        loops: Number of utterances whose hypothesis repeats itself although the reference does not.
        probe: Losses of some utterances; zero sums if there are none.
        train: Mean training losses since the previous validation, by their names in metrics.jsonl;
            empty if no line was written since.
    """

    epoch: int
    errors: ErrorCounts
    loops: int = 0
    probe: ProbeSums = field(default_factory=ProbeSums)
    train: Mapping[str, float] = field(default_factory=dict)


def errors_of(evaluations: Mapping[str, Evaluation]) -> ErrorCounts:
    """Return the error counts of several sets together."""
    return total(evaluation.errors for evaluation in evaluations.values())
