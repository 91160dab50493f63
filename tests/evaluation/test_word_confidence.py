"""Judgement of words, calibration error, area under the curve, and calibration."""

import json
import math

import numpy as np
import pytest

from effasr.decoding.confidence.calibration import ConfidenceCalibration, logit
from effasr.evaluation.normalizer import basic
from effasr.evaluation.word_confidence import confidence_report, fit_calibration, judge
from effasr.transcription.results import WordConfidence
from tests.support.recognition import write_set


def words(*pairs: tuple[str, float]) -> list[WordConfidence]:
    return [WordConfidence(*pair) for pair in pairs]


def test_words_are_right_where_the_alignment_has_them_equal():
    message = words(("One,", 0.9), ("too", 0.2), ("well-known", 0.5), ("-", 0.1), ("three", 0.8))
    assert judge("one two well known four three", message, basic) == (
        (0.9, True), (0.2, False), (0.5, True), (0.5, True), (0.8, True),
    )  # fmt: skip
    assert judge("", words(("a", 0.5)), basic) == ((0.5, False),)
    assert judge("a", [], basic) == ()
    # A normaliser that joins neighbours leaves no word to judge.
    assert judge("ab", words(("a", 0.5), ("b", 0.5)), lambda text: text.replace(" ", "")) is None


def test_calibration_error_and_area_are_those_of_their_definitions():
    draw = np.random.default_rng(0)
    sure = draw.random(400).round(2)
    right = draw.random(400) < sure**2
    result = confidence_report(list(zip(sure.tolist(), right.tolist(), strict=True)))
    error = 0.0
    for low in range(15):
        inside = (sure * 15 >= low) & ((sure * 15 < low + 1) | (low == 14))
        if inside.any():
            error += inside.mean() * abs(sure[inside].mean() - right[inside].mean())
    assert result.ece == pytest.approx(error)
    pairs = [(a > b) + 0.5 * (a == b) for a in sure[right] for b in sure[~right]]
    assert result.auc == pytest.approx(np.mean(pairs))
    assert (result.words, result.right) == (400, right.sum())
    # The last of the bins ends with 1.
    assert confidence_report([(1.0, False), (0.95, True)]).ece == pytest.approx(0.475)
    perfect = confidence_report([(1.0, True), (0.0, False)])
    assert (perfect.ece, perfect.auc) == (0.0, 1.0)
    empty = confidence_report([], 3)
    assert (empty.ece, empty.auc, empty.skipped) == (None, None, 3)
    assert confidence_report([(0.5, True)]).auc is None


def test_a_fit_finds_the_map_that_made_the_words():
    draw = np.random.default_rng(1)
    true = ConfidenceCalibration(0.4, 1.5, "ctc")
    sure = draw.random(20_000)
    right = draw.random(20_000) < np.array([true(value) for value in sure])
    judged = list(zip(sure.tolist(), right.tolist(), strict=True))
    result = fit_calibration(judged, "ctc")
    assert result is not None
    assert result.method == "ctc"
    assert (result.slope, result.intercept) == pytest.approx((0.4, 1.5), abs=0.08)
    mapped = confidence_report([(result(value), good) for value, good in judged])
    raw = confidence_report(judged)
    assert mapped.ece < 0.02 < 0.2 < raw.ece
    # A rising map changes no order.
    assert mapped.auc == pytest.approx(raw.auc)


def test_a_fit_of_separable_words_is_finite():
    result = fit_calibration([(0.9, True)] * 5 + [(0.1, False)] * 5, "ctc")
    assert result is not None
    assert result(0.9) == pytest.approx(6 / 7, abs=1e-3)
    assert result(0.1) == pytest.approx(1 / 7, abs=1e-3)
    assert math.isfinite(logit(0.0))
    assert math.isfinite(logit(1.0))
    assert ConfidenceCalibration(1e3, 0.0, "ctc")(0.0) == 0.0
    assert fit_calibration([(0.5, True)] * 3, "ctc") is None


def test_commands_report_and_apply_confidences(effasr, tmp_path, saved, noise):
    sounds, wave = [noise(2.6, seed=6)], tmp_path / "u0.wav"
    write_set(tmp_path, sounds, [""])
    options = ("--run", saved, "--device", "cpu", "--method", "ctc", "--confidence")
    received = ("transcribe", *options, wave, "--json")
    segment = effasr(*received).segment
    message = [item["word"] for item in segment["word_confidences"]]
    raw = [item["confidence"] for item in segment["word_confidences"]]
    assert message == segment["text"].split()
    assert segment["mean_word_confidence"] == pytest.approx(sum(raw) / len(raw))
    assert len(message) > 1, "the test needs several words"

    # The first word is right, and the others are wrong.
    manifest = write_set(tmp_path, sounds, [message[0] + " zz" * (len(message) - 1)])
    scored = ("evaluate", *options, "--manifest", manifest, "--normalizer", "none")
    scored += ("--output", tmp_path / "out")
    assert "confidence of" in effasr(*scored).out
    result = json.loads((tmp_path / "out/wer.json").read_text())["word_confidence"]
    assert result["words"] == len(message)
    assert result["right"] >= 1
    assert result["calibrated"] is False

    file, other = tmp_path / "out/calibration.json", tmp_path / "c.json"
    map_of = ConfidenceCalibration.load(file)
    segment = effasr(*received, "--calibration", file).segment
    mapped = [item["confidence"] for item in segment["word_confidences"]]
    assert mapped == pytest.approx([map_of(value) for value in raw])
    file.unlink()
    values = {"slope": 1.0, "intercept": 0.0, "method": "ctc"}
    other.write_text(json.dumps(values))
    assert effasr(*scored, "--calibration", other).code == 0
    assert not file.exists(), "a map of mapped values would be taken for one of raw values"
    for change, message in (
        ({"method": "attention"}, "must be of the method ctc, but is of attention"),
        ({"slope": "1"}, "c.json"),
    ):
        other.write_text(json.dumps(values | change))
        assert message in effasr(*received, "--calibration", other).error
    without = [item for item in received if item != "--confidence"]
    assert "`calibration` must be left out" in effasr(*without, "--calibration", other).error
