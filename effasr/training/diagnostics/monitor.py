"""Runs the detectors on the metrics of a run, and reports conditions that begin or end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from effasr.evaluation.result import Evaluation
from effasr.training.diagnostics.audio_use import AudioUse
from effasr.training.diagnostics.blanks import Blanks
from effasr.training.diagnostics.config import DiagnosticsConfig
from effasr.training.diagnostics.ctc_plateau import CTCBaseline, CTCPlateau
from effasr.training.diagnostics.error_balance import ErrorBalance
from effasr.training.diagnostics.error_rate import StuckErrorRate
from effasr.training.diagnostics.finding import Finding, Validation, errors_of
from effasr.training.diagnostics.overfitting import Overfitting
from effasr.training.diagnostics.probe_sums import ProbeSums
from effasr.training.diagnostics.repetition import Repetition, count_loops

_LOSSES = ("cross_entropy", "transducer", "ctc")


@dataclass(frozen=True, slots=True)
class Change:
    """A condition that begins or ends.

    Attributes:
        name: Name of the condition, in metrics.jsonl after ``warning_``.
        title: Condition as a clause.
        finding: Finding of the detector; None if the condition ends.
    """

    name: str
    title: str
    finding: Finding | None

    def row(self) -> dict[str, Any]:
        """Return the fields of the condition in warnings.jsonl."""
        found = self.finding
        return {
            "warning": self.name,
            "active": found is not None,
            "title": self.title,
            "cause": None if found is None else found.cause,
            "remedy": None if found is None else found.remedy,
        }

    def __str__(self) -> str:
        return f"over: {self.title}." if self.finding is None else f"warning: {self.finding}"


class Diagnostics:
    """Detectors and the conditions that currently hold.

    All inputs are the same on every rank, and so are the decisions.

    Args:
        config: Settings.
        method: The decoding method in validation: attention, transducer or ctc.
        baseline: The CTC loss without audio; None where CTC is not trained.
        has_ctc: Whether the model has a CTC head.
        can_subsample_less: Whether the encoder can subsample by 4 instead of by 8.
    """

    def __init__(
        self,
        config: DiagnosticsConfig,
        method: str,
        baseline: CTCBaseline | None,
        *,
        has_ctc: bool,
        can_subsample_less: bool,
    ) -> None:
        self._plateau = None
        if baseline is not None:
            self._plateau = CTCPlateau(config, baseline, can_subsample_less=can_subsample_less)
        self._stuck, self._overfitting = StuckErrorRate(config), Overfitting(config)
        self._balance = ErrorBalance(method, has_ctc=has_ctc)
        self._detectors = {
            "blanks_only": Blanks(config),
            "ignores_audio": AudioUse(config, has_ctc=has_ctc),
            "repetition": Repetition(method, has_ctc=has_ctc),
            "insertions_or_deletions": self._balance,
            "stuck_error_rate": self._stuck,
            "overfitting": self._overfitting,
        }
        self._titles: dict[str, str] = {}
        self._sums: dict[str, float] = {}
        self._steps = 0
        self._line = 0

    def flags(self) -> dict[str, Any]:
        """Return fields of metrics.jsonl: the conditions that hold, and the state of CTC."""
        fields: dict[str, Any] = {}
        if self._plateau is not None:
            fields["ctc_of_no_audio"] = self._plateau.ratio
            fields["warning_ctc_plateau"] = "ctc_plateau" in self._titles
        return fields | {f"warning_{name}": name in self._titles for name in self._detectors}

    def observe(self, line: Mapping[str, Any]) -> list[Change]:
        """Process a line of metrics.jsonl and return the changes."""
        steps, self._line = line["step"] - self._line, line["step"]
        if line["loss"] is None or steps < 1:
            return []
        for name in _LOSSES:
            self._sums[name] = self._sums.get(name, 0.0) + steps * line[name]
        self._steps += steps
        if self._plateau is None:
            return []
        found = self._plateau.observe(line["ctc"], steps, line["step"], line["epoch"])
        return list(self._changes("ctc_plateau", found))

    def validated(
        self, evaluations: Mapping[str, Evaluation], probe: ProbeSums, epoch: int
    ) -> list[Change]:
        """Process a validation and return the changes.

        Args:
            evaluations: Evaluation of each set, over all ranks.
            probe: Sums of losses over all sets and ranks.
            epoch: Number of complete epochs.
        """
        utterances = [one for each in evaluations.values() for one in each.utterances]
        steps = self._steps
        validation = Validation(
            epoch,
            errors_of(evaluations),
            count_loops(utterances),
            probe,
            {name: value / steps for name, value in self._sums.items()} if steps else {},
        )
        self._sums, self._steps = {}, 0
        changes = []
        for name, detector in self._detectors.items():
            found = detector.check(validation)
            if name == "blanks_only" and "ctc_plateau" in self._titles:
                # A CTC plateau has these symptoms, and its warning names the remedy.
                found = None
            changes += self._changes(name, found)
        return changes

    def _changes(self, name: str, found: Finding | None) -> Iterator[Change]:
        before = self._titles.get(name)
        if found is not None and found.title != before:
            self._titles[name] = found.title
            yield Change(name, found.title, found)
        elif found is None and before is not None:
            del self._titles[name]
            yield Change(name, before, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the conditions that hold and the state of the detectors."""
        return {
            "titles": dict(self._titles),
            "sums": dict(self._sums),
            "steps": self._steps,
            "line": self._line,
            "parts": {name: part.state_dict() for name, part in self._parts().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore conditions and detectors from a `state_dict`."""
        self._titles, self._sums = dict(state["titles"]), dict(state["sums"])
        self._steps, self._line = state["steps"], state["line"]
        for name, part in self._parts().items():
            if name in state["parts"]:
                part.load_state_dict(state["parts"][name])

    def _parts(self) -> dict[str, Any]:
        """Return the detectors with state."""
        parts = {
            "ctc_plateau": self._plateau,
            "stuck_error_rate": self._stuck,
            "overfitting": self._overfitting,
            "insertions_or_deletions": self._balance,
        }
        return {name: part for name, part in parts.items() if part is not None}
