import json
import math

import jiwer
import numpy as np
import pytest
import soundfile
from lhotse import MonoCut, Recording, SupervisionSegment

from effasr.data.manifest.reader import read
from effasr.decoding.confidence.calibration import ConfidenceCalibration, logit
from effasr.evaluation.evaluate import evaluate, shard
from effasr.evaluation.normalizer import basic
from effasr.evaluation.result import (
    Evaluation,
    ScoredUtterance,
    free_set_name,
    merge,
    save,
)
from effasr.evaluation.tables import report, wer_table, worst_table
from effasr.evaluation.wer import count_errors
from effasr.evaluation.word_confidence import confidence_report, fit_calibration, judge
from effasr.transcription.results import Failure, WordConfidence
from effasr.transcription.transcribe import transcribe
from tests.support.recognition import write_set

RATE = 16_000
TEXTS = ("one two", "Three, four!", "", "five six seven", "eins zwei", "vier", "one")
SOURCES = ("en", "en", "en", "en", "de", "de", "de")
TARGETS = ("en", "en", "en", "en", "de", "de", "en")


@pytest.fixture(scope="module")
def cuts(noise, tmp_path_factory):
    folder = tmp_path_factory.mktemp("audio")
    made = []
    for n, (text, source, target) in enumerate(zip(TEXTS, SOURCES, TARGETS, strict=True)):
        path = folder / f"u{n}.wav"
        soundfile.write(path, noise(0.4 + 0.5 * n, seed=n), RATE, subtype="FLOAT")
        made.append(_cut(path, text, source, target))
    return made


def _cut(path, text: str | None, source: str = "en", target: str = "en") -> MonoCut:
    recording = Recording.from_file(path)
    part = recording.id, 0.0, recording.duration
    supervision = SupervisionSegment(path.stem, *part, text=text, language=source)
    task = "transcribe" if source == target else "translate"
    custom = {"target_lang": target, "task": task, "pnc": True}
    return MonoCut(path.stem, *part[1:], 0, [supervision], recording=recording, custom=custom)


@pytest.fixture(scope="module")
def evaluation(model, tokenizer, cuts):
    return evaluate(model, tokenizer, cuts)


def test_hypotheses_are_those_of_transcribe(evaluation, model, tokenizer, cuts, tmp_path):
    """From cuts as from a manifest."""
    manifest = tmp_path / "manifest.jsonl"
    rows = [
        {"audio_filepath": cut.recording.sources[0].source, "text": text, "lang": source}
        | {name: cut.custom[name] for name in ("target_lang", "task")}
        for cut, text, source in zip(cuts, TEXTS, SOURCES, strict=True)
    ]
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    texts = [x.text for x in transcribe(model, tokenizer, [row["audio_filepath"] for row in rows])]
    listed = evaluate(model, tokenizer, read(manifest))
    assert listed.groups == evaluation.groups
    for result in (evaluation, listed):
        assert not result.failures
        assert [u.hypothesis for u in result.utterances[:4]] == texts[:4]
        assert [u.reference for u in result.utterances] == list(TEXTS)
    assert [u.id for u in evaluation.utterances] == [cut.id for cut in cuts]
    assert [u.hypothesis for u in listed.utterances] == [
        u.hypothesis for u in evaluation.utterances
    ]
    assert evaluation.audio_seconds == pytest.approx(sum(cut.duration for cut in cuts))


def test_the_rate_is_that_of_the_pairs(evaluation):
    """Of the transcriptions: BLEU judges the translations."""
    spoken = [u for u in evaluation.utterances if u.group != "de->en"]
    pairs = [(u.reference.lower(), u.hypothesis.lower()) for u in spoken]
    pairs = [(r.replace(",", "").replace("!", ""), h) for r, h in pairs]
    spoken = [(r, h) for r, h in pairs if r]
    errors = jiwer.process_words([r for r, _ in spoken], [h for _, h in spoken])
    inserted = sum(len(h.split()) for r, h in pairs if not r)
    total = errors.insertions + errors.deletions + errors.substitutions + inserted
    words = sum(len(r.split()) for r, _ in pairs)
    assert evaluation.wer == pytest.approx(total / words)
    assert evaluation.errors.words == words == 10


def test_groups_add_up_to_the_whole(evaluation):
    groups = evaluation.groups
    assert list(groups) == ["de", "de->en", "en"]
    assert [groups[g].utterances for g in groups] == [2, 1, 4]
    assert groups["de"].errors + groups["en"].errors == evaluation.errors.errors
    assert groups["de"].words == 3


def test_only_the_counts_depend_on_the_normaliser(evaluation, model, tokenizer, cuts):
    raw = evaluate(model, tokenizer, cuts[1:2], normalizer="none")
    assert raw.normalizer == "none"
    assert raw.utterances[0].hypothesis == evaluation.utterances[1].hypothesis
    assert raw.utterances[0].errors == count_errors("Three, four!", raw.utterances[0].hypothesis)


def test_what_cannot_be_scored_is_set_aside_and_named(evaluation, model, tokenizer, cuts, tmp_path):
    lost = tmp_path / "lost.wav"
    soundfile.write(lost, np.zeros(RATE), RATE)
    missing = _cut(lost, "one")
    lost.unlink()
    no_text = cuts[0].with_id("no_text")
    no_text.supervisions = []
    unknown = cuts[0].with_id("unknown")
    unknown.supervisions = [cuts[0].supervisions[0].with_alignment("word", [])]
    unknown.supervisions[0].language = "fr"
    unknown.custom = {"target_lang": "fr", "task": "transcribe", "pnc": True}
    contradiction = cuts[0].with_id("contradiction")
    contradiction.custom = {"target_lang": "de", "task": "transcribe", "pnc": True}
    seen = []
    result = evaluate(
        model,
        tokenizer,
        [missing, cuts[0], no_text, unknown, contradiction, cuts[1]],
        on_result=seen.append,
    )
    assert [u.hypothesis for u in result.utterances] == [
        u.hypothesis for u in evaluation.utterances[:2]
    ]
    reasons = {failure.id: failure.reason for failure in result.failures}
    assert set(reasons) == {"lost", "no_text", "unknown", "contradiction"}
    assert "no such file" in reasons["lost"]
    assert "one supervision" in reasons["no_text"]
    assert "'fr'" in reasons["unknown"]
    assert "'de'" in reasons["contradiction"]
    assert [entry.id for entry in seen] == ["lost", "u0", "unknown", "u1"]
    assert "4 failed and are not counted" in wer_table(result)
    assert "lost: " in wer_table(result)


def test_parts_merge_to_the_whole(evaluation, model, tokenizer, cuts):
    parts = [evaluate(model, tokenizer, shard(cuts, rank, 3)) for rank in range(3)]
    merged = merge(parts)
    assert merged.errors == evaluation.errors
    assert merged.groups == evaluation.groups
    assert merged.seconds == max(part.seconds for part in parts)
    by_id = {u.id: u for u in evaluation.utterances}
    assert {u.id: u for u in merged.utterances} == by_id
    with pytest.raises(ValueError, match="must share one normaliser"):
        merge([parts[0], Evaluation("none")])
    with pytest.raises(ValueError, match="must share one normaliser"):
        merge([])


def test_without_cuts_or_words_there_is_no_rate(model, tokenizer):
    empty = evaluate(model, tokenizer, [])
    assert math.isnan(empty.wer)
    assert empty.errors.utterances == 0
    assert empty.summary()["wer"] is None
    text = wer_table(Evaluation("none", (_scored("a", "", ""),), (), 1.0))
    assert " all " not in text
    assert " - " in text
    assert " all " in wer_table(empty)


def test_files(evaluation, tmp_path):
    failed = Evaluation("basic", evaluation.utterances, (Failure("x", "damaged"),), 2.0)
    save(failed, tmp_path / "evaluation" / "dev")
    folder = tmp_path / "evaluation" / "dev"
    names = {"alignments.txt", "hyp.trn", "hypotheses.jsonl", "ref.trn", "wer.json"}
    assert {path.name for path in folder.iterdir()} == names
    rates = json.loads((folder / "wer.json").read_text())
    counts = evaluation.errors
    assert (rates["wer"], rates["cer"]) == pytest.approx((counts.wer, counts.cer))
    whole = {"insertions": counts.insertions, "words": counts.words, "utterances": 6}
    assert rates | whole == rates
    assert rates["deletions"] + rates["substitutions"] + rates["insertions"] == counts.errors
    assert rates["rtfx"] == pytest.approx(evaluation.audio_seconds / 2.0, abs=0.01)
    assert rates["normalizer"] == "basic"
    assert rates["failed"] == 1
    assert rates["failures"] == [{"id": "x", "error": "damaged"}]
    assert rates["groups"]["de->en"]["utterances"] == 1
    lines = (folder / "hypotheses.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["id"] for row in rows] == [u.id for u in evaluation.utterances]
    assert list(rows[1]) == ["id", "reference", "hypothesis", "language", "duration"]
    assert rows[1]["reference"] == "Three, four!"
    assert rows[1]["duration"] == 0.9
    save(Evaluation("none", (_scored("u0", "one two", "one too"),), (), 1.0), tmp_path)
    assert (tmp_path / "ref.trn").read_text() == "one two (u0)\n"
    assert (tmp_path / "hyp.trn").read_text() == "one too (u0)\n"
    aligned = "id: (u0)\nScores: (#C #S #D #I) 1 1 0 0\nREF:  one TWO\n"
    assert aligned in (tmp_path / "alignments.txt").read_text()
    assert json.loads((tmp_path / "wer.json").read_text())["wer_interval"] == [0.5, 0.5]


def test_a_normaliser_that_is_unknown_is_refused_before_any_work(model, tokenizer):
    def cuts():
        raise AssertionError("must not be read")
        yield

    with pytest.raises(ValueError, match="`normalizer` must be one of"):
        evaluate(model, tokenizer, cuts(), normalizer="loud")


def _scored(name: str, reference: str, hypothesis: str, group: str = "en") -> ScoredUtterance:
    errors = count_errors(reference, hypothesis)
    return ScoredUtterance(name, group, reference, hypothesis, 1.0, errors)


def test_tables():
    utterances = (
        _scored("a", "one two three four", "one two three five"),
        _scored("b[red]", "one two", "six"),
        _scored("c", "eins", "eins", group="de"),
    )
    result = Evaluation("basic", utterances, (), 0.5)
    lines = wer_table(result).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[0] == ["set", "utterances", "words", "WER %", "CER %", "ins", "del", "sub"]
    assert cells[2][:4] == ["de", "1", "1", "0.00"]
    assert cells[3][:4] == ["en", "2", "6", "50.00"]
    assert cells[4][:4] == ["all", "3", "7", "42.86"]
    assert cells[4][5:] == ["0", "1", "2"]
    assert lines[5] == "normalizer basic, RTFx 6.0 (3 s of audio in 0.5 s)"
    assert worst_table(result, count=10).splitlines() == [
        "b[red]: 2 errors in 2 words",
        "  REF:  ONE TWO",
        "  HYP:  SIX ***",
        "  Eval: S   D",
        "a: 1 errors in 4 words",
        "  REF:  one two three FOUR",
        "  HYP:  one two three FIVE",
        "  Eval:               S",
    ]
    assert worst_table(result, count=1).count("REF:") == 1
    assert report(result) == wer_table(result)
    assert report(result, 2) == worst_table(result, 2) + "\n" + wer_table(result)


def test_sets_of_one_name_are_numbered_whatever_the_others_are_called():
    used: list[str] = []
    for path in ("a/dev.jsonl", "dev-3", "b/dev.jsonl.gz", "c/dev"):
        used.append(free_set_name(path, used))
    assert used == ["dev", "dev-3", "dev-2", "dev-4"]


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
