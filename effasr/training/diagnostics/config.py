"""Configuration of the training diagnostics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DiagnosticsConfig:
    """Warnings during training about a model that does not learn as it should.

    They change nothing in training. Each is shown once when its condition begins, with cause and
    remedy, and again only if it comes back; warnings.jsonl has the same.

    Attributes:
        ctc_epochs: Epochs after which the CTC loss must be lower than that of a CTC head that
            ignores the audio.
        ctc_steps: Least number of steps before that is asked of a corpus whose audio has enough
            encoder frames for each token; without them, CTC stays where it is.
        validations: Successive validations after which an error rate counts as stuck, and a
            validation loss that has risen since as overfitting.
        probe_utterances: Utterances of each validation set, and of each rank, whose losses are
            computed, among them that of the decoder with the encoder output of another utterance;
            0 for none.
        examples: Number of hypotheses shown at each validation, each with its reference.
    """

    ctc_epochs: int = 2
    ctc_steps: int = 1000
    validations: int = 3
    probe_utterances: int = 32
    examples: int = 2

    def __post_init__(self) -> None:
        for name, least in (
            ("ctc_epochs", 1),
            ("ctc_steps", 0),
            ("validations", 2),
            ("probe_utterances", 0),
            ("examples", 0),
        ):
            value = getattr(self, name)
            if value < least:
                remedy = "set training.diagnostics=null for no warnings at all"
                raise ValueError(f"`{name}` must be at least {least}, but is {value}: {remedy}.")
