"""Detects CTC heads and transducers that emit hardly anything but blanks."""

from __future__ import annotations

from effasr.training.diagnostics.config import DiagnosticsConfig
from effasr.training.diagnostics.finding import Finding, Validation

_EMITTED = 0.1
"""Least share of the reference's tokens that must be emitted."""

_REMEDIES = {
    "CTC head": "lower optimizer.lr, lengthen schedule.warmup_steps and raise loss.ctc_weight.",
    "transducer": "lower optimizer.lr, lengthen schedule.warmup_steps, or add CTC, which aligns "
    "sooner (model.ctc=true, loss.ctc_weight=0.3).",
}


class Blanks:
    """Compares the share of blanks with the number of tokens in the references."""

    def __init__(self, config: DiagnosticsConfig) -> None:
        self._epochs = config.ctc_epochs

    def check(self, validation: Validation) -> Finding | None:
        """Return a finding if a head emits almost only blanks in a validation."""
        probe = validation.probe
        if validation.epoch < self._epochs or not probe.frames:
            return None
        needed = probe.tokens / probe.frames
        for head, share in (
            ("CTC head", probe.ctc_blank_share),
            ("transducer", probe.transducer_blank_share),
        ):
            if share is not None and 1 - share < _EMITTED * min(needed, 1.0):
                return Finding(
                    f"The {head} emits blanks only",
                    f"{100 * share:.1f} % of its decisions are blanks, and the references have "
                    f"{needed:.2f} tokens a frame.",
                    _REMEDIES[head],
                )
        return None
