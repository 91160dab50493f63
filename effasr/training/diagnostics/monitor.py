"""Runs the detectors on the metrics of a run, and reports conditions that begin or end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from effasr.decoding.checks import choose_method
from effasr.evaluation.wer import total
from effasr.model.asr import ASRModel
from effasr.training.config import DiagnosticsConfig, TrainConfig
from effasr.training.diagnostics.detectors import (
    AudioUse,
    Blanks,
    CTCBaseline,
    CTCPlateau,
    ErrorBalance,
    Finding,
    Overfitting,
    Repetition,
    StuckErrorRate,
    Validation,
    count_loops,
)
from effasr.training.diagnostics.probe import ProbeSums
from effasr.training.loss import LOSSES

if TYPE_CHECKING:
    from effasr.evaluation.result import Evaluation
    from effasr.training.corpus import TrainingCorpus

_MAX_TRANSCRIPTS = 20_000
"""Utterances for computing the CTC loss without audio."""

_SYMPTOMS = ("blanks_only", "ignores_audio", "stuck_error_rate")
"""Conditions that a model has as long as CTC is at its plateau."""


@dataclass(frozen=True, slots=True)
class Change:
    """A condition that begins, with its finding, or ends."""

    # In metrics.jsonl after ``warning_``.
    name: str
    title: str
    finding: Finding | None

    def row(self) -> dict[str, Any]:
        """Return the fields of the condition in warnings.jsonl."""
        finding = self.finding
        return {
            "warning": self.name,
            "active": finding is not None,
            "title": self.title,
            "cause": None if finding is None else finding.cause,
            "remedy": None if finding is None else finding.remedy,
        }

    def __str__(self) -> str:
        return f"over: {self.title}." if self.finding is None else f"warning: {self.finding}"


class Diagnostics:
    """Detectors and the conditions that currently hold.

    All inputs are the same on every rank, and so are the decisions. ``baseline`` is None where CTC
    is not trained.
    """

    def __init__(
        self,
        config: DiagnosticsConfig,
        method: str,
        baseline: CTCBaseline | None,
        *,
        has_ctc: bool,
        can_subsample_less: bool,
        pass_seconds: float,
        masks_early: bool = False,
    ) -> None:
        self._plateau = None
        if baseline is not None:
            options = {"can_subsample_less": can_subsample_less, "masks_early": masks_early}
            self._plateau = CTCPlateau(config, baseline, **options)
        self._detectors = {
            "blanks_only": Blanks(config),
            "ignores_audio": AudioUse(config, has_ctc=has_ctc),
            "repetition": Repetition(method, has_ctc=has_ctc),
            "insertions_or_deletions": ErrorBalance(method, has_ctc=has_ctc),
            "stuck_error_rate": StuckErrorRate(config),
            "overfitting": Overfitting(config),
        }
        self._initial = {name: part.state_dict() for name, part in self._detectors.items()}
        # Titles of the conditions that hold.
        self._titles: dict[str, str] = {}
        self._sums: dict[str, float] = {}
        self._steps = 0
        self._line = 0
        # Audio heard, and that of the corpus: an epoch has it once for each speed.
        self._heard, self._pass_seconds = 0.0, max(pass_seconds, 1.0)

    def flags(self) -> dict[str, Any]:
        """Return fields of metrics.jsonl: the conditions that hold, and the state of CTC."""
        fields: dict[str, Any] = {}
        if self._plateau is not None:
            fields["ctc_of_no_audio"] = self._plateau.ctc_vs_blind_baseline
            fields["warning_ctc_plateau"] = "ctc_plateau" in self._titles
        return fields | {f"warning_{name}": name in self._titles for name in self._detectors}

    def observe(self, line: Mapping[str, Any]) -> list[Change]:
        """Process a line of metrics.jsonl."""
        steps, self._line = line["step"] - self._line, line["step"]
        self._heard += steps * line["audio_seconds"]
        if line["loss"] is None or steps < 1:
            return []
        for name in LOSSES:
            # Lines of earlier versions lack some.
            self._sums[name] = self._sums.get(name, 0.0) + steps * line.get(name, 0.0)
        self._steps += steps
        if self._plateau is None:
            return []
        passes, warned = int(self._heard / self._pass_seconds), "ctc_plateau" in self._titles
        finding = self._plateau.observe(line["ctc"], steps, line["step"], passes, warned=warned)
        return list(self._changes("ctc_plateau", finding))

    def validated(
        self, evaluations: Mapping[str, Evaluation], probe: ProbeSums, epoch: int
    ) -> list[Change]:
        """Process a validation: results of each set over all ranks, and the sum of all probes."""
        utterances = [row for evaluation in evaluations.values() for row in evaluation.utterances]
        steps = self._steps
        validation = Validation(
            epoch,
            # A translation may have other words than its reference.
            total(row.errors for row in utterances if not row.is_translation),
            len(utterances),
            count_loops(utterances),
            probe,
            {name: value / steps for name, value in self._sums.items()} if steps else {},
        )
        self._sums, self._steps = {}, 0
        changes = []
        for name, detector in self._detectors.items():
            finding = detector.check(validation)
            if name in _SYMPTOMS and "ctc_plateau" in self._titles:
                # The warning about the plateau names the remedy.
                continue
            changes += self._changes(name, finding)
        return changes

    def _changes(self, name: str, finding: Finding | None) -> Iterator[Change]:
        before = self._titles.get(name)
        if finding is not None and finding.title != before:
            self._titles[name] = finding.title
            yield Change(name, finding.title, finding)
        elif finding is None and before is not None:
            del self._titles[name]
            yield Change(name, before, None)

    def state_dict(self) -> dict[str, Any]:
        return {
            "titles": dict(self._titles),
            "sums": dict(self._sums),
            "steps": self._steps,
            "line": self._line,
            "heard": self._heard,
            "parts": {name: part.state_dict() for name, part in self._stateful().items()},
        }

    def forget_validations(self) -> None:
        """Begin anew with what validations are compared with, as the sets have changed."""
        self._titles = {name: of for name, of in self._titles.items() if name == "ctc_plateau"}
        for name, detector in self._detectors.items():
            detector.load_state_dict(self._initial[name])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._titles, self._sums = dict(state["titles"]), dict(state["sums"])
        self._steps, self._line = state["steps"], state["line"]
        self._heard = state.get("heard", 0.0)
        for name, part in self._stateful().items():
            if name in state["parts"]:
                part.load_state_dict(state["parts"][name])

    def _stateful(self) -> dict[str, Any]:
        detectors = {"ctc_plateau": self._plateau, **self._detectors}
        return {name: part for name, part in detectors.items() if part is not None and part.STATE}


def ctc_baseline(config: TrainConfig, corpus: TrainingCorpus) -> CTCBaseline | None:
    if config.model.ctc and (config.loss.ctc_weight or config.loss.ctc_weight_before):
        return CTCBaseline.from_transcripts(corpus.transcripts(_MAX_TRANSCRIPTS))
    return None


def build_diagnostics(
    config: TrainConfig, model: ASRModel, corpus: TrainingCorpus, baseline: CTCBaseline | None
) -> Diagnostics | None:
    settings = config.training.diagnostics
    # They watch the outputs of an encoder-decoder model, CTC or a transducer.
    is_watched = config.model.language_model is None and config.model.best_rq is None
    if settings is None or not is_watched or config.data.text_alone:
        return None
    encoder, masks = config.model.encoder, config.model.spec_augment
    return Diagnostics(
        settings,
        choose_method(model, config.evaluation.decoding.method),
        baseline,
        has_ctc=config.model.ctc,
        can_subsample_less=encoder.kind == "fastconformer" and encoder.subsampling == 8,
        pass_seconds=corpus.seconds / len(config.data.speeds),
        masks_early=masks.after_ctc is None and bool(masks.freq_masks or masks.time_masks),
    )
