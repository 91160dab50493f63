"""Detects error rates that are mostly insertions, or mostly deletions."""

from __future__ import annotations

from typing import Any

from effasr.training.diagnostics.finding import Finding, Validation

_LEAST = 0.15
"""Least share of the words that are errors of the more frequent kind."""

_TIMES = 3.0
"""Least ratio of the more frequent kind of error to the other."""

_STREAK = 2
"""Successive validations after which the condition holds."""

_RECOGNISED = 0.8
"""Largest word error rate for a warning about deletions: every model begins with few words."""


class ErrorBalance:
    """Compares insertions and deletions once words are recognised.

    Args:
        method: The decoding method in validation.
        has_ctc: Whether the model has a CTC head.
    """

    def __init__(self, method: str, *, has_ctc: bool) -> None:
        self._method = method
        self._has_ctc = has_ctc
        self._streaks = {"insertions": 0, "deletions": 0}

    def check(self, validation: Validation) -> Finding | None:
        """Return a finding if insertions or deletions dominate in successive validations."""
        errors = validation.errors
        least = _LEAST * errors.words
        for more, less in (("insertions", "deletions"), ("deletions", "insertions")):
            count, other = getattr(errors, more), getattr(errors, less)
            holds = errors.words and count >= least and count >= _TIMES * other
            if more == "deletions":
                holds = holds and errors.wer < _RECOGNISED
            self._streaks[more] = self._streaks[more] + 1 if holds else 0
        for kind, streak in self._streaks.items():
            if streak >= _STREAK:
                share = 100 * getattr(errors, kind) / errors.words
                return Finding(
                    f"Most errors are {kind}",
                    f"There are {errors.insertions} insertions and {errors.deletions} deletions: "
                    f"{kind} alone are {share:.0f} % of the words.",
                    self._remedy(kind),
                )
        return None

    def _remedy(self, kind: str) -> str:
        if kind == "insertions":
            if self._method == "attention" and self._has_ctc:
                return (
                    "decode with evaluation.decoding.ctc_weight=0.3, which keeps the decoder to "
                    "the speech; check that references are complete."
                )
            return "check that references are complete, and that audio ends where its text does."
        if self._method == "attention":
            return (
                "decode with evaluation.decoding.beam=4 and "
                "evaluation.decoding.coverage_penalty=0.5, which favour transcripts that leave out "
                "less; check that texts have no more than is spoken."
            )
        return (
            "train longer, or give tokens more frames: a larger vocabulary or less subsampling; "
            "check that texts have no more than is spoken."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the number of successive validations with each imbalance."""
        return {"streaks": dict(self._streaks)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counts from a `state_dict`."""
        self._streaks = dict(state["streaks"])
