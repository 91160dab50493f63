"""Detects conditions in the metrics of a run, and reports conditions that begin or end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from effasr.data.statistics.survey import least_median
from effasr.decoding.checks import choose_method
from effasr.evaluation.wer import ErrorCounts, total
from effasr.model.asr import ASRModel
from effasr.training.config import DiagnosticsConfig, TrainConfig
from effasr.training.diagnostics.probe import ProbeSums
from effasr.training.loss import LOSSES

if TYPE_CHECKING:
    from effasr.evaluation.result import Evaluation
    from effasr.training.corpus import TrainingCorpus


# Conditions of a model that does not learn as it should, each with its cause and remedy.


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition that a detector has observed: a clause, and sentences."""

    title: str
    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.title}. {self.cause} Remedy: {self.remedy}"


@dataclass(frozen=True, slots=True)
class Validation:
    """Results of a validation over all sets and ranks."""

    # Complete epochs.
    epoch: int
    # Of the transcriptions.
    errors: ErrorCounts
    # Number of all, with translations.
    utterances: int
    # Hypotheses that repeat themselves although the reference does not.
    loops: int = 0
    probe: ProbeSums = field(default_factory=ProbeSums)
    # Mean training losses since the previous validation, by their names in metrics.jsonl.
    train: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CTCBaseline:
    """The CTC loss that can be reached without the audio.

    The best head that ignores it gives in each frame the same distribution: the blank with the
    share of frames that no token needs, and the tokens by their frequency. Its loss is the unigram
    entropy of the tokens, plus a little for the places of the blanks. CTC falls to this value at
    once, and stays there until it begins to align.
    """

    # Per target, in nats, as metrics.jsonl counts the CTC loss.
    loss: float
    # Unigram entropy of the tokens, in nats.
    entropy: float
    # Median over the utterances.
    frames_per_token: float
    # Different tokens.
    pieces: int = 0

    @classmethod
    def from_transcripts(cls, transcripts: Iterable[tuple[int, np.ndarray]]) -> CTCBaseline | None:
        """Compute the baseline from encoder frames and token ids; None without tokens."""
        pairs = [(max(count, len(tokens)), tokens) for count, tokens in transcripts if len(tokens)]
        if not pairs:
            return None
        counts = np.bincount(np.concatenate([tokens for _, tokens in pairs])).astype(np.float64)
        shares = counts[counts > 0] / counts.sum()
        entropy = float(-(shares * np.log(shares)).sum())
        lengths = [(count, len(tokens)) for count, tokens in pairs]
        frames, tokens = np.array(lengths, dtype=np.float64).T
        emitted = tokens.sum() / frames.sum()
        placements = sum(_log_placements(t, u, emitted) for t, u in lengths)
        # The loss is divided by the targets of the decoder, of which the end token is one.
        loss = (entropy * tokens.sum() - placements) / (tokens + 1).sum()
        median = float(np.median(frames / tokens))
        return cls(float(loss), entropy, median, int((counts > 0).sum()))


def _log_placements(frames: int, tokens: int, emitted: float) -> float:
    """Return the log-probability that ``tokens`` of the frames emit, each with a fixed chance."""
    ways = math.lgamma(frames + 1) - math.lgamma(tokens + 1) - math.lgamma(frames - tokens + 1)
    blanks = 0.0 if frames == tokens else (frames - tokens) * math.log1p(-emitted)
    return ways + tokens * math.log(emitted) + blanks


class Detector:
    # Attributes that a checkpoint has.
    STATE: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        return {name: copy(getattr(self, name)) for name in self.STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.STATE:
            # Checkpoints of earlier versions lack some.
            setattr(self, name, copy(state.get(name, getattr(self, name))))


@dataclass
class CTCPlateau(Detector):
    """Compares the running average of the CTC loss with the loss without audio."""

    STATE = ("average",)

    SHARE = 0.9
    """Share of the loss without audio below which the model counts as using the audio."""

    CLEAR = 0.8
    """The same after a warning, which would else begin and end with every noisy loss."""

    FEW_PIECES = 40
    """Pieces, little more than characters, with which CTC begins to align soonest."""

    LEAST_STEPS = 10
    """Steps before which nothing is said: an epoch of a small corpus may be one step."""

    MEMORY_STEPS = 25.0
    """Steps after which a loss has a weight of 1 / e in the running average."""

    config: DiagnosticsConfig
    baseline: CTCBaseline
    can_subsample_less: bool
    masks_early: bool = False  # whether SpecAugment masks from the first step on
    average: float | None = None

    @property
    def ctc_vs_blind_baseline(self) -> float | None:
        return None if self.average is None else self.average / self.baseline.loss

    def observe(
        self, ctc: float, steps: int, step: int, passes: int, *, warned: bool = False
    ) -> Finding | None:
        """Check the mean CTC loss per target over the latest ``steps``, after so many passes."""
        decay = math.exp(-steps / self.MEMORY_STEPS)
        before = ctc if self.average is None else self.average
        self.average = decay * before + (1 - decay) * ctc
        baseline, config = self.baseline, self.config
        is_short = baseline.frames_per_token < self._least_frames
        if step < self.LEAST_STEPS:
            return None
        if passes < config.ctc_epochs or (not is_short and step < config.ctc_steps):
            return None
        if self.average < (self.CLEAR if warned else self.SHARE) * baseline.loss:
            return None
        return Finding(
            "CTC has not begun to align",
            f"After {passes} passes over the corpus its loss is {self.average:.2f} a token, and "
            f"without the audio it would be {baseline.loss:.2f} (unigram entropy of the tokens "
            f"{baseline.entropy:.2f}). Half of the utterances have fewer than "
            f"{baseline.frames_per_token:.1f} encoder frames a token"
            f"{', which are too few' if is_short else ', which are enough'}.",
            self._remedy(is_short),
        )

    @property
    def _least_frames(self) -> float:
        # Only an encoder at 8x can subsample less.
        return least_median(8 if self.can_subsample_less else 4)

    def _remedy(self, is_short: bool) -> str:
        if not is_short:
            late = "let masks begin later (model.spec_augment.after_ctc=0.7); "
            first = late if self.masks_early else ""
            # 40 pieces have two thirds of the frames a token that 128 have.
            many, frames = 2 * self.FEW_PIECES, 1.6 * self._least_frames
            if self.baseline.pieces > many and self.baseline.frames_per_token >= frames:
                fewer = f"effasr tokenizer DATA OUT --vocab-size {self.FEW_PIECES}"
                first += f"begin anew with fewer pieces ({fewer}); "
            return (
                f"{first}lower optimizer.lr, such as to 6e-4 with 20 s of audio a step; start "
                "from a trained model (init_from); check that the texts belong to the audio."
            )
        if self.can_subsample_less:
            # Of an hour of speech, larger vocabularies at 8x left the plateau later or not at all.
            return "set model.encoder.subsampling=4, and begin anew."
        return (
            "train a tokenizer with a larger vocabulary (effasr tokenizer --vocab-size), and "
            "begin anew."
        )


@dataclass
class Blanks(Detector):
    """Detects CTC heads and transducers that emit hardly anything but blanks."""

    LEAST_EMITTED = 0.1
    """Least share of the reference's tokens that must be emitted."""

    config: DiagnosticsConfig

    def check(self, validation: Validation) -> Finding | None:
        probe = validation.probe
        if validation.epoch < self.config.ctc_epochs or not probe.frames:
            return None
        needed = probe.tokens / probe.frames
        slower = "lower optimizer.lr, lengthen schedule.warmup_steps"
        for head, share, remedy in (
            ("CTC head", probe.ctc_blank_share, f"{slower} and raise loss.ctc_weight."),
            (
                "transducer",
                probe.transducer_blank_share,
                f"{slower}, or add CTC, which aligns sooner (model.ctc=true, loss.ctc_weight=0.3).",
            ),
        ):
            if share is not None and 1 - share < self.LEAST_EMITTED * min(needed, 1.0):
                return Finding(
                    f"The {head} emits blanks only",
                    f"{100 * share:.1f} % of its decisions are blanks, and the references have "
                    f"{needed:.2f} tokens a frame.",
                    remedy,
                )
        return None


@dataclass
class AudioUse(Detector):
    """Compares the decoder's cross-entropy with that for other utterances' encoder output.

    A decoder that uses the audio becomes much worse with other speech. A language model over
    the transcripts does not.
    """

    LEAST_GAIN = 0.05
    """Least relative rise of the cross-entropy with the encoder output of another utterance."""

    config: DiagnosticsConfig
    has_ctc: bool

    def check(self, validation: Validation) -> Finding | None:
        matched, mismatched = validation.probe.own_audio, validation.probe.other_audio
        if matched is None or mismatched is None or validation.epoch < self.config.ctc_epochs:
            return None
        if not mismatched - matched < self.LEAST_GAIN * matched:  # Also where one is not finite.
            return None
        first = (
            "CTC must align first: raise loss.ctc_weight, or loss.ctc_weight_before with "
            "loss.guided_after_ctc; a warning about CTC names what else hinders it. "
            if self.has_ctc
            else "set model.ctc=true and loss.ctc_weight=0.3, which teach the encoder to align. "
        )
        return Finding(
            "The decoder ignores the audio",
            f"Its cross-entropy is {matched:.2f} a token, and {mismatched:.2f} with the encoder "
            "output of other utterances: it has become a language model of the transcripts.",
            f"{first}With little data, start from a trained model (init_from).",
        )


_COPIES = 4
"""Number of successive copies of an n-gram that count as a loop."""


def is_loop(text: str) -> bool:
    """Return whether n-grams of words or characters are repeated four times, without a gap."""
    words = text.split()
    # A loop of characters has at least 16: "hahaha" is a word.
    return _has_run(words, longest=8) or _has_run("".join(words), longest=16, least=16)


def _has_run(units: Sequence[str], *, longest: int, least: int = 0) -> bool:
    """Return whether an n-gram, of at most ``longest`` units, has enough successive copies."""
    for period in range(1, min(longest, len(units) // _COPIES) + 1):
        needed = max(period * _COPIES, least) - period
        equal = 0
        for unit, earlier in zip(units[period:], units, strict=False):
            equal = equal + 1 if unit == earlier else 0
            if equal >= needed:
                return True
    return False


@dataclass
class Repetition(Detector):
    """Checks the share of hypotheses that loop."""

    LEAST_SHARE = 0.05
    LEAST_COUNT = 2

    method: str
    has_ctc: bool

    def check(self, validation: Validation) -> Finding | None:
        count, total = validation.loops, validation.utterances
        if count < self.LEAST_COUNT or count < self.LEAST_SHARE * total:
            return None
        return Finding(
            "Hypotheses repeat themselves",
            f"In {count} of {total} a part is repeated {_COPIES} times or more, and not in the "
            "reference.",
            self._remedy(),
        )

    def _remedy(self) -> str:
        if self.method != "attention":
            return "train longer: more updates, or a lower optimizer.lr."
        joint = "evaluation.decoding.ctc_weight=0.3 (--ctc-weight), which follows the speech, or "
        return (
            f"decode with {joint if self.has_ctc else ''}evaluation.decoding.no_repeat_ngram=4 "
            "(--no-repeat-ngram), which forbids a second copy of 4 tokens. If the decoder ignores "
            "the audio, too, no decoding helps: see that warning."
        )


@dataclass
class ErrorBalance(Detector):
    """Detects error rates that are mostly insertions, or mostly deletions."""

    STATE = ("streaks",)

    LEAST_SHARE = 0.15
    """Least share of the words that are errors of the more frequent kind."""

    LEAST_RATIO = 3.0
    """Least ratio of the more frequent kind of error to the other."""

    STREAK = 2
    """Successive validations after which the condition holds."""

    MAX_WER = 0.8
    """Largest word error rate for a warning about deletions: every model begins with few words."""

    method: str
    has_ctc: bool
    streaks: dict[str, int] = field(default_factory=lambda: {"insertions": 0, "deletions": 0})

    def check(self, validation: Validation) -> Finding | None:
        errors = validation.errors
        least = self.LEAST_SHARE * errors.words
        for more, less in (("insertions", "deletions"), ("deletions", "insertions")):
            count, other = getattr(errors, more), getattr(errors, less)
            holds = errors.words and count >= least and count >= self.LEAST_RATIO * other
            if more == "deletions":
                holds = holds and errors.wer < self.MAX_WER
            self.streaks[more] = self.streaks[more] + 1 if holds else 0
        for kind, streak in self.streaks.items():
            if streak >= self.STREAK:
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
            if self.method == "attention" and self.has_ctc:
                return (
                    "decode with evaluation.decoding.ctc_weight=0.3, which keeps the decoder to "
                    "the speech; check that references are complete."
                )
            return "check that references are complete, and that audio ends where its text does."
        if self.method == "attention":
            return (
                "decode with evaluation.decoding.beam=4 and "
                "evaluation.decoding.coverage_penalty=0.5, which favour transcripts that leave out "
                "less; check that texts have no more than is spoken."
            )
        return (
            "train longer, or give tokens more frames: a larger vocabulary or less subsampling; "
            "check that texts have no more than is spoken."
        )


@dataclass
class StuckErrorRate(Detector):
    """Detects a word error rate that stays near 100 %."""

    STATE = ("rates", "is_stuck")

    STUCK = 0.9
    PROGRESS = 0.05
    """Least decrease from the oldest to the newest rate that counts as progress."""

    config: DiagnosticsConfig
    rates: list[float] = field(default_factory=list)
    is_stuck: bool = False

    def check(self, validation: Validation) -> Finding | None:
        rate = validation.errors.wer
        if math.isnan(rate):
            return None
        self.rates = [*self.rates, rate][-self.config.validations :]
        if len(self.rates) < self.config.validations or min(self.rates) <= self.STUCK:
            self.is_stuck = False
        elif self.rates[-1] >= self.rates[0] - self.PROGRESS:
            self.is_stuck = True
        if not self.is_stuck:
            return None
        percentages = ", ".join(f"{100 * rate:.0f}" for rate in self.rates)
        return Finding(
            "The word error rate stays over 90 %",
            f"The latest {self.config.validations} validations gave {percentages} %.",
            "if other warnings are shown, follow those first. Otherwise check on the hypotheses "
            "that texts, languages and audio belong together; lower optimizer.lr; or start from a "
            "trained model (init_from).",
        )


@dataclass
class Overfitting(Detector):
    """Compares losses and error rate with those at the lowest validation loss.

    The condition holds if ``validations`` validations have followed the lowest loss, the loss is
    above it, no error rate since was better, and the training loss has fallen.
    """

    STATE = ("lowest", "since", "is_better")

    RISE = 0.01
    """Least relative rise of the validation loss above its minimum."""

    config: DiagnosticsConfig
    # Validation loss, training loss and error rate.
    lowest: list[float] | None = None
    since: int = 0
    is_better: bool = False

    def check(self, validation: Validation) -> Finding | None:
        # The first loss that the model has.
        for name in ("cross_entropy", "transducer", "ctc"):
            dev, train = getattr(validation.probe, name), validation.train.get(name)
            if dev is not None and train is not None:
                break
        else:
            return None
        rate = validation.errors.wer
        if math.isnan(rate) or not math.isfinite(dev):
            return None
        if self.lowest is None or dev < self.lowest[0]:
            self.lowest, self.since, self.is_better = [dev, train, rate], 0, False
            return None
        lowest, lowest_train, lowest_rate = self.lowest
        self.since += 1
        self.is_better |= rate < lowest_rate
        has_risen = dev > lowest * (1 + self.RISE)
        is_early = self.since < self.config.validations
        if is_early or not has_risen or self.is_better or train >= lowest_train:
            return None
        return Finding(
            "The model overfits",
            f"Since {self.since} validations the training loss has fallen from "
            f"{lowest_train:.2f} to {train:.2f}, and the validation loss has risen from "
            f"{lowest:.2f} to {dev:.2f} (WER {100 * lowest_rate:.1f} to {100 * rate:.1f} %).",
            "stop here (the best checkpoint is kept), or begin anew with more data, with "
            "data.speed_perturbation=[0.9,1.0,1.1], with dropout "
            "(model.encoder.residual_dropout=0.1) or with a smaller model.",
        )


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
            sum(is_loop(row.hypothesis) and not is_loop(row.reference) for row in utterances),
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
    if settings is None or not is_watched:
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
