"""Labels of recordings: confidences, thresholds, and continuing after an interruption."""

import dataclasses
import itertools
import json
import math
import os

import numpy as np
import pytest
import soundfile
import torch

from effasr.data.collate import Example, collate
from effasr.data.manifest.reader import read
from effasr.data.prompt import Prompt
from effasr.decoding.config import DecodingConfig
from effasr.decoding.decoded import Decoded, EncodedBatch, Score, with_details, with_scores
from effasr.training.run_dir.run_directory import read_lines
from effasr.transcription.inputs.audio_stream import open_stream
from effasr.transcription.inputs.sources import Source, of_manifest
from effasr.transcription.label import LabelFolder, checked
from effasr.transcription.results import Failure, Transcription, confidence
from effasr.transcription.transcribe import transcribe
from tests.support.corpora import write_lines

RATE = 16_000


@pytest.fixture
def recordings(tmp_path, noise):
    folder = tmp_path / "audio"
    folder.mkdir()
    for number, seconds in enumerate((1.0, 2.0, 1.5, 0.8)):
        soundfile.write(folder / f"r{number}.wav", noise(seconds, seed=number), RATE)
    return folder


def encode(model, tokenizer, audio):
    examples = [
        Example(str(number), item, tokenizer.prompt(Prompt()), [], monotonic=False)
        for number, item in enumerate(audio)
    ]
    framing = model.config.features.framing
    return collate(examples, eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id, framing=framing)


@torch.no_grad()
def test_ctc_scores_sum_over_all_alignments(model, tokenizer, noise) -> None:
    model.eval()
    batch = encode(model, tokenizer, [noise(0.32, seed=1), noise(0.4, seed=2)])
    encoded = model.encode(batch)
    texts = [(5,), (6, 6)]
    result = with_scores(EncodedBatch(model, "ctc", encoded, [], 1), [Decoded(t) for t in texts])
    for item, rows, text in zip(result, encoded.unpack(), texts, strict=True):
        logs = model.ctc_logits(rows).log_softmax(-1).double()
        total, blank = 0.0, model.vocab_size
        for path in itertools.product({blank, *text}, repeat=len(rows)):
            merged = [symbol for symbol, _ in itertools.groupby(path)]
            if tuple(symbol for symbol in merged if symbol != blank) == text:
                total += math.exp(sum(float(logs[t, s]) for t, s in enumerate(path)))
        assert item.score is not None
        assert item.score.symbols == len(text)
        assert item.score.log_prob == pytest.approx(math.log(total), rel=1e-5)


def test_continuous_batching_gives_the_scores_of_a_batch(model, tokenizer, recordings) -> None:
    files = sorted(recordings.iterdir())
    config = DecodingConfig(method="attention", confidence=True, extra_tokens=5)
    # Two thirds of a beam: the same greedy search, but by `decode`.
    other = dataclasses.replace(config, no_repeat_ngram=50)
    item, two = (
        [result.segments[0].confidence for result in transcribe(model, tokenizer, files, config=c)]
        for c in (config, other)
    )
    assert item == pytest.approx(two, rel=1e-4)
    assert all(0 < value < 1 for value in item)


@pytest.mark.parametrize(
    ("failing", "expected"), [([2], Transcription), (range(1, 99), Failure)], ids=["once", "always"]
)
def test_no_recording_is_lost_when_memory_runs_out_after_the_search(
    failing, expected, model, tokenizer, recordings, monkeypatch
) -> None:
    calls = itertools.count(1)

    def limited(*arguments):
        if next(calls) in failing:
            raise torch.OutOfMemoryError
        return with_details(*arguments)

    monkeypatch.setattr("effasr.transcription.decode_queue.with_details", limited)
    files = sorted(recordings.iterdir())
    config = DecodingConfig(method="attention", confidence=True, frame_budget=30)
    results = list(transcribe(model, tokenizer, files, config=config))
    assert [(item.id, type(item)) for item in results] == [(str(item), expected) for item in files]
    assert next(calls) > 3


def test_confidence_is_a_geometric_mean_over_symbols() -> None:
    assert confidence([Score(math.log(0.25), 2)]) == pytest.approx(0.5)
    both = confidence([Score(math.log(0.25), 2), Score(math.log(0.125), 1)])
    assert both == pytest.approx((0.25 * 0.125) ** (1 / 3))
    assert confidence([Score(-math.inf, 3)]) == 0.0
    assert confidence([]) is None
    assert confidence([Score(0.0, 1), None]) is None


@pytest.fixture
def label(effasr, saved, recordings, tmp_path):
    """Runs `effasr label` into a folder; returns its outcome."""

    def run(*options, audio=recordings, out="labels"):
        options = options if "--method" in options else (*options, "--method", "ctc")
        return effasr("label", saved, audio, tmp_path / out, "--device", "cpu", *options)

    return run


@pytest.mark.parametrize("method", ["ctc", "attention"])
def test_labels_are_a_manifest_to_train_on(label, tmp_path, method) -> None:
    out = tmp_path / "labels"
    assert label("--method", method).code == 0
    rows = read_lines(out / "manifest.jsonl")
    report = json.loads((out / "report.json").read_text())
    assert report["recordings"] == 4
    assert report["kept"]["utterances"] == len(rows)
    assert report["dropped"]["utterances"] == 4 - len(rows)
    assert len(read_lines(out / "dropped.jsonl")) == 4 - len(rows)
    if method == "ctc":
        assert len(rows) >= 2
    for row in rows:
        assert row["pseudo"] is True
        assert 0 < row["confidence"] <= 1
        assert row["text"]
    if rows:
        cuts = list(read(out / "manifest.jsonl"))
        assert [cut.supervisions[0].text for cut in cuts] == [row["text"] for row in rows]
        assert [cut.duration for cut in cuts] == [row["duration"] for row in rows]


def test_another_threshold_needs_no_transcription(label, tmp_path, monkeypatch) -> None:
    out = tmp_path / "labels"
    assert label().code == 0
    rows = read_lines(out / "manifest.jsonl")
    monkeypatch.setattr(
        "effasr.transcription.recognizer.Recognizer._collated",
        lambda *_: pytest.fail("transcribed"),
    )
    most = max(row["confidence"] for row in rows)
    assert label("--min-confidence", most).code == 0
    (selected,) = read_lines(out / "manifest.jsonl")
    assert selected["confidence"] == most
    low = [x for x in read_lines(out / "dropped.jsonl") if x["reason"] == "low_confidence"]
    assert len(low) == len(rows) - 1
    assert all(item["text"] and item["confidence"] < most for item in low)


def test_an_interrupted_command_goes_on(label, tmp_path, monkeypatch) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert label(out="whole").code == 0
    add, count = LabelFolder.add, itertools.count()

    def stopping(self, *arguments) -> None:
        if next(count) == 2:
            raise KeyboardInterrupt
        add(self, *arguments)

    monkeypatch.setattr(LabelFolder, "add", stopping)
    assert label(out="parts").code == 130
    assert not (parts / "manifest.jsonl").exists()
    with (parts / "journal.jsonl").open("a") as file:
        file.write('{"id": "torn')
    monkeypatch.setattr(LabelFolder, "add", add)
    assert label(out="parts").code == 0
    for name in ("manifest.jsonl", "dropped.jsonl", "report.json", "journal.jsonl"):
        assert (parts / name).read_text() == (whole / name).read_text()


def test_refusals(label, tmp_path) -> None:
    """Labels are not mixed with those of another model, nor with other files."""
    assert label().code == 0
    assert "its `method` was 'ctc' and is 'attention'" in label("--method", "attention").error
    # The detector, which `--vad auto` chooses by what is installed.
    assert json.loads((tmp_path / "labels/labels.json").read_text())["vad"] == "loudness"
    assert "its `fallback` was True and is False" in label("--no-fallback").error
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    assert label(out="other").code == 2
    path = tmp_path / "decoding.yaml"
    path.write_text(f"beam: 8\nsecond_lm: {tmp_path / 'lm'}\n")
    message = label("--decoding", path).error
    assert "`second_lm` in `--decoding` must be left out for labels" in message
    assert f"remove it from {path}" in message


def test_failures_are_listed_and_manifests_may_lack_texts(label, recordings, tmp_path) -> None:
    (recordings / "r1.wav").write_bytes(b"no audio")
    rows = [{"audio_filepath": f"audio/r{n}.wav", "id": f"u{n}"} for n in range(3)]
    manifest = tmp_path / "audio.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert label(audio=manifest).code == 1
    dropped = read_lines(tmp_path / "labels/dropped.jsonl")
    assert [item["id"] for item in dropped if item["reason"] == "failed"] == ["u1"]
    assert {row["id"] for row in read_lines(tmp_path / "labels/manifest.jsonl")} <= {"u0", "u2"}


def test_what_training_cannot_read_is_left_out_without_a_transcription(
    label, recordings, tmp_path, monkeypatch
) -> None:
    (recordings / "a.m4a").write_bytes(bytes(range(256)) * 20)
    monkeypatch.setattr(
        "effasr.transcription.inputs.audio_stream.ffmpeg_blocks", lambda *_: pytest.fail("read")
    )
    assert label().code == 1
    dropped = read_lines(tmp_path / "labels/dropped.jsonl")
    (failed,) = (item for item in dropped if item["reason"] == "failed")
    assert failed["id"].endswith("a.m4a")
    assert "convert the file to WAV or FLAC" in failed["details"]


def test_channels_that_a_line_cannot_name_are_a_problem(tmp_path) -> None:
    path = str(tmp_path / "stereo.wav")
    soundfile.write(path, np.zeros((RATE, 3), np.float32), RATE)
    assert checked(Source("a", "a", path, channels=(0, 1, 2))).problem is None
    assert checked(Source("a", "a", path, channels=(1,))).problem is None
    result = checked(Source("a", "a", path, channels=(1, 2))).problem or ""
    assert "channels [1, 2] are neither one nor all 3 of the file: save them as" in result
    assert "only lhotse reads this audio" in (checked(Source("a", "a")).problem or "")
    assert checked(Source("a", "a", problem="damaged")).problem == "damaged"


def test_a_line_names_the_channel_that_is_labelled(label, noise, tmp_path) -> None:
    """Also of a file whose name is spelled otherwise, as on macOS."""
    audio = np.stack([noise(1.0, seed=1), noise(1.0, seed=2)], 1)
    soundfile.write(tmp_path / "e\u0301.wav", audio, RATE, "FLOAT")
    rows = [{"audio_filepath": "\u00e9.wav", "id": str(x), "channel": x} for x in (0, "B", None)]
    path = write_lines(tmp_path / "m.jsonl", rows)
    for source, expected in zip(
        of_manifest(path, prompt=Prompt()), (*audio.T, audio.mean(1)), strict=True
    ):
        stream = open_stream(source.audio, RATE, channels=source.channels)
        assert np.allclose(np.concatenate(list(stream.blocks)), expected)
    assert label(audio=path).code == 0
    lines = read_lines(tmp_path / "labels/journal.jsonl")
    assert [part.get("channel") for row in lines for part in row["segments"]] == [0, 1, None]


def test_a_path_that_is_not_utf8_is_refused_before_the_work(tmp_path) -> None:
    labels = LabelFolder(tmp_path / "labels", {"method": "ctc"})
    name = os.fsdecode(b"caf\xe9.wav")
    with pytest.raises(ValueError, match=r"caf\\udce9\.wav: .*rename the file"):
        labels.missing([Source(name, "caf", name)])


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        '{"id": ["a"]}',
        '{"id": "a"}',
        '{"id": "a", "segments": 3}',
        '{"id": "a", "segments": [true]}',
        '{"id": "a", "segments": [{"id": "a", "duration": "1"}]}',
        '{"id": "a", "problem": 1, "audio": "a"}',
    ],
)
def test_a_damaged_journal_is_refused(tmp_path, line) -> None:
    LabelFolder(tmp_path, {"method": "ctc"})
    (tmp_path / "journal.jsonl").write_text(f"{line}\n")
    with pytest.raises(ValueError, match=r"journal\.jsonl:1: ") as refused:
        LabelFolder(tmp_path, {"method": "ctc"}).finish(0.5)
    assert "\n" not in str(refused.value)


def test_a_journal_that_leads_elsewhere_is_not_written_to(tmp_path) -> None:
    other = tmp_path / "other"
    other.write_text("a text without an end of line")
    folder = tmp_path / "labels"
    LabelFolder(folder, {"method": "ctc"})
    journal = folder / "journal.jsonl"
    for make in (lambda: journal.symlink_to(other), lambda: os.mkfifo(journal)):
        make()
        with pytest.raises(ValueError, match=r"journal\.jsonl must be a regular file"):
            LabelFolder(folder, {"method": "ctc"})
        journal.unlink()
    assert other.read_text() == "a text without an end of line"


@pytest.mark.parametrize("torn", ["", '{"id": "b", ', "x" * 200_000])
def test_a_torn_line_is_removed(tmp_path, torn) -> None:
    LabelFolder(tmp_path, {"method": "ctc"})
    whole = '{"id": "a", "problem": "damaged", "audio": "a"}\n'
    (tmp_path / "journal.jsonl").write_text(whole + torn)
    assert LabelFolder(tmp_path, {"method": "ctc"}).done == {"a"}
    assert (tmp_path / "journal.jsonl").read_text() == whole
