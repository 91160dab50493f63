"""Result of an evaluation, and the files that record it."""

import math
import os
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from effasr.data.checksums import checksum, verify_content, with_checksum
from effasr.evaluation.alignment import align, trn_line
from effasr.evaluation.bootstrap import interval
from effasr.evaluation.metric import BY_NAME, Metric
from effasr.evaluation.normalizer import get_normalizer
from effasr.evaluation.translation import bleu_of, check_package, count_ngrams
from effasr.evaluation.wer import ErrorCounts, total
from effasr.evaluation.word_confidence import (
    ConfidenceReport,
    Judged,
    confidence_report,
    fit_calibration,
)
from effasr.transcription.json_files import one_line, write_json, write_json_lines, write_text
from effasr.transcription.results import Alternative, Failure
from effasr.untrusted.documents import read_json_object

SUMMARY, HYPOTHESES = "wer.json", "hypotheses.jsonl"
CALIBRATION = "calibration.json"


@dataclass(frozen=True, slots=True)
class ScoredUtterance:
    id: str
    group: str  # language, or ``SOURCE->TARGET`` for a translation
    reference: str
    hypothesis: str
    duration: float
    errors: ErrorCounts  # word errors after normalisation of both texts
    truncated: bool = False
    # The best texts of the search, the best first, if requested.
    alternatives: tuple[Alternative, ...] = ()
    oracle: ErrorCounts | None = None  # errors of the alternative with the fewest
    judged: tuple[Judged, ...] | None = None  # confidence of each word, and whether it is right

    @property
    def language(self) -> str:
        return self.group.rpartition("->")[2]

    @property
    def is_translation(self) -> bool:
        return "->" in self.group


@dataclass(frozen=True, slots=True)
class TranslationScore:
    utterances: int
    bleu: float  # of all utterances together, 0 to 100
    chrf: float
    bleu_interval: tuple[float, float]  # 95 % confidence, by the bootstrap over utterances
    signatures: dict[str, str]  # of sacrebleu, which say how both were computed


@lru_cache(maxsize=32)
def score_translations(
    references: tuple[str, ...], hypotheses: tuple[str, ...], language: str
) -> TranslationScore:
    """Score texts of one language as they are: casing and punctuation count."""
    check_package()
    from sacrebleu.metrics.chrf import CHRF

    metrics = {"bleu": bleu_of(language), "chrf": CHRF()}
    scores = {k: metric.corpus_score(hypotheses, [references]) for k, metric in metrics.items()}
    pairs = zip(references, hypotheses, strict=True)
    return TranslationScore(
        len(references),
        bleu=scores["bleu"].score,
        chrf=scores["chrf"].score,
        bleu_interval=interval([count_ngrams(*pair, language) for pair in pairs]),
        signatures={name: str(metric.get_signature()) for name, metric in metrics.items()},
    )


@dataclass(frozen=True, slots=True)
class Evaluation:
    normalizer: str
    utterances: tuple[ScoredUtterance, ...] = ()
    failures: tuple[Failure, ...] = ()  # recordings that were not transcribed
    seconds: float = 0.0  # duration of the whole call, loading of audio included
    method: str = ""  # method of decoding; empty for evaluations without one
    search: str = ""  # method and width of the beam; empty for evaluations without one
    calibrated: bool | None = None  # whether the confidences of words are calibrated
    vad: str | None = None  # name of the detector of speech; None without audio

    @property
    def transcriptions(self) -> list[ScoredUtterance]:
        """The utterances whose word errors count: a set of translations alone has none else."""
        chosen = [utterance for utterance in self.utterances if not utterance.is_translation]
        return chosen or list(self.utterances)

    @property
    def errors(self) -> ErrorCounts:
        return total(utterance.errors for utterance in self.transcriptions)

    @property
    def translations(self) -> dict[str, TranslationScore]:
        """BLEU and chrF of each pair of languages, in alphabetical order."""
        texts: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for utterance in self.utterances:
            if utterance.is_translation:
                texts[utterance.group].append((utterance.reference, utterance.hypothesis))
        return {
            group: score_translations(*zip(*texts[group], strict=True), group.rpartition("->")[2])
            for group in sorted(texts)
        }

    @property
    def metric(self) -> Metric:
        """The metric of the set: BLEU of translations alone, CER without spaces, or WER."""
        if self.utterances and all(utterance.is_translation for utterance in self.utterances):
            return BY_NAME["bleu"]
        return BY_NAME[self.errors.main_rate[0].lower()]

    def value(self, name: str) -> float:
        """Return a metric by its name: of translations the mean over pairs of languages."""
        if name in ("wer", "cer"):
            return getattr(self.errors, name)
        values = [getattr(score, name) for score in self.translations.values()]
        return math.fsum(values) / len(values) if values else math.nan

    @property
    def groups(self) -> dict[str, ErrorCounts]:
        """Errors of each language, or pair of languages, in alphabetical order."""
        parts: dict[str, list[ErrorCounts]] = defaultdict(list)
        for utterance in self.utterances:
            parts[utterance.group].append(utterance.errors)
        return {group: total(parts[group]) for group in sorted(parts)}

    @property
    def nbest(self) -> int:
        """The most alternatives of an utterance; 0 where they were not requested."""
        return max((len(utterance.alternatives) for utterance in self.utterances), default=0)

    @property
    def oracle(self) -> ErrorCounts:
        """Errors of the whole set, if the best alternative of each utterance were chosen."""
        return total(utterance.oracle or utterance.errors for utterance in self.transcriptions)

    @property
    def judged(self) -> list[Judged]:
        return [pair for utterance in self.utterances for pair in utterance.judged or ()]

    @property
    def confidence(self) -> ConfidenceReport | None:
        """Quality of the confidences of words, if they were requested."""
        if self.calibrated is None:
            return None
        skipped = sum(utterance.judged is None for utterance in self.utterances)
        return confidence_report(self.judged, skipped)

    @property
    def wer(self) -> float:
        return self.errors.wer

    @property
    def interval(self) -> list[float] | None:
        """The 95 % confidence interval of the word error rate; None where it is undefined."""
        low, high = interval([utterance.errors for utterance in self.transcriptions])
        return None if math.isnan(low) else [low, high]

    @property
    def truncated(self) -> int:
        return sum(utterance.truncated for utterance in self.utterances)

    @property
    def audio_seconds(self) -> float:
        return math.fsum(utterance.duration for utterance in self.utterances)

    @property
    def rtfx(self) -> float:
        return self.audio_seconds / self.seconds if self.seconds else 0.0

    def worst(self, count: int = 10) -> list[ScoredUtterance]:
        """Return the utterances with most word errors; among equals, shorter references first."""
        order = sorted(self.utterances, key=lambda u: (-u.errors.errors, u.errors.words))
        return [utterance for utterance in order[:count] if utterance.errors.errors]

    def summary(self) -> dict[str, Any]:
        translations, groups = self.translations, self.groups
        rows = {group: _rates(errors) for group, errors in groups.items()}
        for group, score in translations.items():
            rows[group] |= asdict(score)
        return {
            **_rates(self.errors),
            "rate": self.metric.name,
            **({name: self.value(name) for name in ("bleu", "chrf")} if translations else {}),
            "wer_interval": self.interval,
            **({"oracle": {"nbest": self.nbest, **_rates(self.oracle)}} if self.nbest else {}),
            **self._confidence_row(),
            "rtfx": round(self.rtfx, 2),
            "audio_seconds": round(self.audio_seconds, 3),
            "seconds": round(self.seconds, 3),
            "normalizer": self.normalizer,
            **({"search": self.search} if self.search else {}),
            "truncated": self.truncated,
            **({} if self.vad is None else {"vad": self.vad}),
            "failed": len(self.failures),
            "failures": [failure.as_row() for failure in self.failures],
            "groups": rows,
        }

    def _confidence_row(self) -> dict[str, Any]:
        result = self.confidence
        if result is None:
            return {}
        return {"word_confidence": {"calibrated": self.calibrated, **result.as_row()}}


def merge(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Merge evaluations of parts of a set, made at the same time: the slowest counts."""
    normalizers = {evaluation.normalizer for evaluation in evaluations}
    if len(normalizers) != 1:
        raise ValueError(
            f"`evaluations` must share one normaliser, but have {sorted(normalizers)}."
        )
    return replace(
        evaluations[0],
        utterances=tuple(u for evaluation in evaluations for u in evaluation.utterances),
        failures=tuple(f for evaluation in evaluations for f in evaluation.failures),
        seconds=max(evaluation.seconds for evaluation in evaluations),
    )


def set_name(manifest: str | Path) -> str:
    return Path(os.path.abspath(manifest)).name.removesuffix(".gz").removesuffix(".jsonl")


def free_set_name(manifest: str | Path, taken: Collection[str]) -> str:
    """Return `set_name`, with a number if another set has that name."""
    name = stem = set_name(manifest)
    number = 1
    while name in taken:
        number += 1
        name = f"{stem}-{number}"
    return name


def save(
    evaluation: Evaluation,
    folder: str | Path,
    *,
    model: str | None = None,
    of_set: str | None = None,
    averaged: Sequence[str] = (),
    manifest: str | None = None,
) -> None:
    """Write the files of an evaluation, each atomically; ``wer.json`` is the last.

    ``hypotheses.jsonl`` has the original texts. The normalised texts are in ``ref.trn`` and
    ``hyp.trn``, which sclite reads, and in ``alignments.txt``. With raw confidences of right and
    wrong words, ``calibration.json`` is the map that makes them probabilities.
    """
    folder = Path(folder)
    rows = (
        {
            "id": utterance.id,
            "reference": utterance.reference,
            "hypothesis": utterance.hypothesis,
            "language": utterance.language,
            **({"group": utterance.group} if utterance.is_translation else {}),
            "duration": round(utterance.duration, 3),
            **_listed(utterance.alternatives),
        }
        for utterance in evaluation.utterances
    )
    write_json_lines(folder / HYPOTHESES, rows)
    references, hypotheses, lines = [], [], []
    for utterance in evaluation.utterances:
        normalize = get_normalizer(evaluation.normalizer, utterance.language)
        reference, hypothesis = normalize(utterance.reference), normalize(utterance.hypothesis)
        name = one_line(utterance.id)
        references.append(trn_line(reference, name))
        hypotheses.append(trn_line(hypothesis, name))
        aligned = align(reference, hypothesis)
        lines += [f"id: ({name})", aligned.scores(), *aligned.lines(), ""]
    write_text(folder / "ref.trn", "".join(references))
    write_text(folder / "hyp.trn", "".join(hypotheses))
    write_text(folder / "alignments.txt", "\n".join(lines))
    if evaluation.calibrated is False:
        fitted = fit_calibration(evaluation.judged, evaluation.method)
        if fitted is not None:
            write_json(folder / CALIBRATION, with_checksum(asdict(fitted)))
    # A process may be killed between the files, and what is read must be of one evaluation.
    files = {HYPOTHESES: checksum(folder / HYPOTHESES)}
    summary = evaluation.summary() | {"model": model, "files": files}
    if of_set is not None:
        summary["set"] = of_set
    if averaged:
        summary["averaged"] = list(averaged)
    if manifest is not None:
        summary["manifest"] = manifest
    write_json(folder / SUMMARY, with_checksum(summary))


def read_summary(folder: Path) -> dict[str, Any]:
    path = folder / SUMMARY
    result = read_json_object(path)
    verify_content(result, str(path))
    return result


def _listed(alternatives: Sequence[Alternative]) -> dict[str, Any]:
    return {"alternatives": [item.as_row() for item in alternatives]} if alternatives else {}


def _rates(errors: ErrorCounts) -> dict[str, Any]:
    return {
        "wer": None if math.isnan(errors.wer) else errors.wer,
        "cer": None if math.isnan(errors.cer) else errors.cer,
        "insertions": errors.insertions,
        "deletions": errors.deletions,
        "substitutions": errors.substitutions,
        "words": errors.words,
        "utterances": errors.utterances,
    }
