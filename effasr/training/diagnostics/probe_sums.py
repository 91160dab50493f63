"""Sums of the losses that a probe of a validation set measures."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class ProbeSums:
    """Sums over utterances; those of parts of a set are added with ``+``.

    Attributes:
        targets: Targets of the decoder; 0 without one.
        own: Their cross-entropy.
        paired_targets: Targets of utterances that were also given other encoder output.
        paired_own: Their cross-entropy with their own.
        paired_other: Their cross-entropy with that of another utterance.
        ctc_targets: Targets of transcriptions; 0 without a CTC head.
        ctc_loss: Their CTC loss.
        ctc_frames: Encoder frames of transcriptions; 0 without a CTC head.
        ctc_blanks: Those of them in which the blank is the likeliest class.
        transducer_targets: Targets of transcriptions; 0 without a transducer.
        transducer_loss: Their transducer loss.
        transducer_frames: Encoder frames of transcriptions; 0 without a transducer, or with
            durations, where a label may also move on.
        labels: What a greedy search of the transducer emits in them.
        tokens: Tokens of transcriptions.
        frames: Their encoder frames.
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
        """Per target, in nats; None without a decoder."""
        return _mean(self.own, self.targets)

    @property
    def own_audio(self) -> float | None:
        """Cross-entropy of the paired utterances, per target, in nats; None without any."""
        return _mean(self.paired_own, self.paired_targets)

    @property
    def other_audio(self) -> float | None:
        """The same with the encoder output of other utterances."""
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
        """Share of blanks among the transducer's decisions, of which one leaves each frame."""
        return _mean(self.transducer_frames, self.transducer_frames + self.labels)

    def summary(self) -> dict[str, float]:
        """Fields of validation.jsonl, those that there are."""
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
