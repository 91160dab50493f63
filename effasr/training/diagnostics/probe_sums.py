"""Sums of the losses that a probe computes on a validation set."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class ProbeSums:
    """Sums over utterances; ``+`` adds the sums of parts of a set.

    Attributes:
        targets: Number of targets of the decoder; 0 without one.
        own: Cross-entropy of these targets.
        paired_targets: Targets of utterances that were also decoded with other encoder output.
        paired_own: Cross-entropy of the paired targets with their own encoder output.
        paired_other: Cross-entropy of the paired targets with that of another utterance.
        ctc_targets: Targets of transcriptions; 0 without a CTC head.
        ctc_loss: CTC loss of these targets.
        ctc_frames: Encoder frames of transcriptions; 0 without a CTC head.
        ctc_blanks: Number of these frames in which the blank is the likeliest class.
        transducer_targets: Targets of transcriptions; 0 without a transducer.
        transducer_loss: Transducer loss of these targets.
        transducer_frames: Encoder frames of transcriptions; 0 without a transducer, or with
            durations, where a label may also advance the frame.
        labels: Labels that a greedy search of the transducer emits in these frames.
        tokens: Number of tokens of transcriptions.
        frames: Number of encoder frames of transcriptions.
    """

    targets: float = 0.0
    own: float = 0.0
    paired_targets: float = 0.0
    paired_own: float = 0.0
    paired_other: float = 0.0
    ctc_targets: float = 0.0
    ctc_loss: float = 0.0
    ctc_frames: float = 0.0
    ctc_blanks: float = 0.0
    transducer_targets: float = 0.0
    transducer_loss: float = 0.0
    transducer_frames: float = 0.0
    labels: float = 0.0
    tokens: float = 0.0
    frames: float = 0.0

    def __add__(self, other: ProbeSums) -> ProbeSums:
        names = [field.name for field in fields(ProbeSums)]
        return ProbeSums(*(getattr(self, name) + getattr(other, name) for name in names))

    @property
    def cross_entropy(self) -> float | None:
        """Cross-entropy per target, in nats; None without a decoder."""
        return _mean(self.own, self.targets)

    @property
    def own_audio(self) -> float | None:
        """Cross-entropy of the paired utterances, per target, in nats; None without any."""
        return _mean(self.paired_own, self.paired_targets)

    @property
    def other_audio(self) -> float | None:
        """Cross-entropy as in `own_audio`, but with the encoder output of other utterances."""
        return _mean(self.paired_other, self.paired_targets)

    @property
    def ctc(self) -> float | None:
        """CTC loss per target, in nats; None without a CTC head."""
        return _mean(self.ctc_loss, self.ctc_targets)

    @property
    def transducer(self) -> float | None:
        """Transducer loss per target, in nats; None without a transducer."""
        return _mean(self.transducer_loss, self.transducer_targets)

    @property
    def ctc_blank_share(self) -> float | None:
        """Share of frames in which the CTC head chooses the blank; None without one."""
        return _mean(self.ctc_blanks, self.ctc_frames)

    @property
    def transducer_blank_share(self) -> float | None:
        """Share of blanks among the transducer's decisions; each frame ends with one blank."""
        return _mean(self.transducer_frames, self.transducer_frames + self.labels)

    def summary(self) -> dict[str, float]:
        """Return the fields of validation.jsonl that are not None."""
        own, other = self.own_audio, self.other_audio
        found = {
            "cross_entropy": self.cross_entropy,
            "cross_entropy_other_audio": other,
            "audio_gain": None if own is None or other is None else other - own,
            "ctc": self.ctc,
            "transducer": self.transducer,
            "ctc_blank_share": self.ctc_blank_share,
            "transducer_blank_share": self.transducer_blank_share,
        }
        return {name: value for name, value in found.items() if value is not None}


def _mean(value: float, count: float) -> float | None:
    return value / count if count else None
