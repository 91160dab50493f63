"""Detects a decoder that ignores the audio."""

from __future__ import annotations

from effasr.training.diagnostics.config import DiagnosticsConfig
from effasr.training.diagnostics.finding import Finding, Validation

_LEAST_GAIN = 0.05
"""Least relative rise of the cross-entropy with the encoder output of another utterance."""


class AudioUse:
    """Compares the decoder's cross-entropy with that for other utterances' encoder output.

    A decoder that uses the audio becomes much worse with other speech. A language model over
    the transcripts does not.
    """

    def __init__(self, config: DiagnosticsConfig, *, has_ctc: bool) -> None:
        self._epochs = config.ctc_epochs
        self._has_ctc = has_ctc

    def check(self, validation: Validation) -> Finding | None:
        """Return a finding if the decoder ignores the audio in a validation."""
        own, other = validation.probe.own_audio, validation.probe.other_audio
        if own is None or other is None or validation.epoch < self._epochs:
            return None
        if other - own >= _LEAST_GAIN * own:
            return None
        first = (
            "CTC must align first: raise loss.ctc_weight, or loss.ctc_weight_before with "
            "loss.guided_after_ctc; a warning about CTC names what else hinders it. "
            if self._has_ctc
            else "set model.ctc=true and loss.ctc_weight=0.3, which teach the encoder to align. "
        )
        return Finding(
            "The decoder ignores the audio",
            f"Its cross-entropy is {own:.2f} a token, and {other:.2f} with the encoder output of "
            "other utterances: it has become a language model of the transcripts.",
            f"{first}With little data, start from a trained model (init_from).",
        )
