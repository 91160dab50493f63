"""Calibration error and ROC curve of word confidences."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jiwer
import numpy as np

from effasr.decoding.confidence.calibration import ConfidenceCalibration, logit
from effasr.transcription.results import WordConfidence

Judged = tuple[float, bool]  # confidence of a word of a hypothesis, and whether the word is right

_BINS = 15
_STEPS = 100
_RIDGE = 1e-9


def judge(
    reference: str, words: Sequence[WordConfidence], normalize: Callable[[str], str]
) -> tuple[Judged, ...] | None:
    """Align the words of a hypothesis with a reference: equal ones are right, the others wrong."""
    parts = [(text, item.confidence) for item in words for text in normalize(item.text).split()]
    received = [text for text, _ in parts]
    if received != normalize(" ".join(item.text for item in words)).split():
        return None
    if not received:
        return ()
    right = [False] * len(received)
    (chunks,) = jiwer.process_words(" ".join(reference.split()), " ".join(received)).alignments
    for chunk in chunks:
        if chunk.type == "equal":
            for position in range(chunk.hyp_start_idx, chunk.hyp_end_idx):
                right[position] = True
    return tuple((sure, good) for (_, sure), good in zip(parts, right, strict=True))


@dataclass(frozen=True, slots=True)
class ConfidenceReport:
    """Quality of the confidences of a set; rates that are undefined are None."""

    words: int  # words that were judged
    right: int  # those among them that are right
    # Expected calibration error over 15 bins of equal width: the mean distance of confidence and
    # share of right words, weighted by words.
    ece: float | None
    # Area under the receiver operating characteristic: the probability that a right word has a
    # higher confidence than a wrong one.
    auc: float | None
    skipped: int  # utterances whose words could not be judged

    def as_row(self) -> dict[str, Any]:
        return asdict(self)


def confidence_report(judged: Sequence[Judged], skipped: int = 0) -> ConfidenceReport:
    """Measure the confidences of words.

    Guo et al., 2017, https://arxiv.org/abs/1706.04599 (expected calibration error).
    """
    sure = np.array([value for value, _ in judged], dtype=np.float64)
    right = np.array([good for _, good in judged], dtype=bool)
    return ConfidenceReport(
        words=len(sure),
        right=int(right.sum()),
        ece=_calibration_error(sure, right) if len(sure) else None,
        auc=_area(sure, right) if right.any() and not right.all() else None,
        skipped=skipped,
    )


def _calibration_error(sure: np.ndarray, right: np.ndarray) -> float:
    bins = np.minimum((sure * _BINS).astype(np.int64), _BINS - 1)
    gaps = np.bincount(bins, sure - right, minlength=_BINS)
    return float(np.abs(gaps).sum() / len(sure))


def _area(sure: np.ndarray, right: np.ndarray) -> float:
    """Return the area by ranks; equal values share their mean rank."""
    _, position, counts = np.unique(sure, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum() - (counts - 1) / 2)[position]
    good = int(right.sum())
    wins = ranks[right].sum() - good * (good + 1) / 2
    return float(wins / (good * (len(sure) - good)))


def fit_calibration(judged: Sequence[Judged], method: str) -> ConfidenceCalibration | None:
    """Fit the map from confidences to probabilities by logistic regression.

    Platt, 1999: targets are moved from 0 and 1 by the counts, so that the fit is finite.
    """
    right = np.array([good for _, good in judged], dtype=np.float64)
    good, bad = right.sum(), len(right) - right.sum()
    if not good or not bad:
        return None
    x = np.stack([[logit(value) for value, _ in judged], np.ones(len(right))], 1)
    target = np.where(right > 0, (good + 1) / (good + 2), 1 / (bad + 2))
    weights = np.array([0.0, math.log(good / bad)])
    loss = _loss(x, target, weights)
    for _ in range(_STEPS):
        p = 1 / (1 + np.exp(-np.clip(x @ weights, -500, 500)))
        gradient = x.T @ (p - target)
        curvature = (x * (p * (1 - p))[:, None]).T @ x + _RIDGE * len(x) * np.eye(2)
        step = np.linalg.solve(curvature, gradient)
        size = 1.0
        while size > 1e-8 and _loss(x, target, weights - size * step) > loss:
            size /= 2
        following = _loss(x, target, weights - size * step)
        if following >= loss:
            break
        weights, loss = weights - size * step, following
    return ConfidenceCalibration(float(weights[0]), float(weights[1]), method)


def _loss(x: np.ndarray, target: np.ndarray, weights: np.ndarray) -> float:
    odds = x @ weights
    return float((np.logaddexp(0.0, odds) - target * odds).sum())
