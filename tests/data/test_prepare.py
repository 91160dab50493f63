import json
import os

import numpy as np
import pytest
import soundfile

from effasr.data.audio.waveform import load_audio
from effasr.data.features.frame_geometry import Framing
from effasr.data.filters.rules import Limits
from effasr.data.manifest.prepare import prepare
from effasr.data.manifest.reader import read
from tests.support.corpora import read_lines, write_lines


@pytest.fixture
def faulty(tmp_path, nemo):
    """Twelve good utterances with a faulty one after every second of them."""
    manifest = nemo(12)
    audio = manifest.parent / "audio"
    good = read_lines(manifest)
    (audio / "zero.wav").write_bytes(b"")
    (audio / "noise.wav").write_bytes(b"not audio" * 50)
    soundfile.write(audio / "silent.wav", np.zeros(8000), 16_000)
    whole = (audio / "u0.wav").read_bytes()
    soundfile.write(audio / "cut.flac", np.random.default_rng(0).normal(0, 0.1, 32_000), 16_000)
    (audio / "cut.flac").write_bytes((audio / "cut.flac").read_bytes()[:9000])
    (audio / "long.wav").write_bytes(whole)
    names = ("gone.wav", "zero.wav", "noise.wav", "silent.wav", "cut.flac", "long.wav")
    rows = []
    for index, name in enumerate(names):
        duration = {"gone.wav": 1.0, "zero.wav": 1.0, "long.wav": 9.0}.get(name)
        fault = {"audio_filepath": f"audio/{name}", "text": "one"}
        rows += good[2 * index : 2 * index + 2]
        rows.append(fault | ({"duration": duration} if duration else {}))
    return write_lines(manifest, rows)


def test_every_fault_is_dropped_counted_and_listed(faulty, tmp_path):
    report = prepare(faulty, tmp_path / "out", jobs=2)
    assert [cut.id for cut in read(tmp_path / "out")] == [f"u{index}" for index in range(12)]
    lines = read_lines(tmp_path / "out/dropped.jsonl")
    assert [(line["id"], line["reason"]) for line in lines] == [
        ("gone", "missing_audio"),
        ("zero", "empty_audio"),
        ("noise", "unreadable_audio"),
        ("silent", "silent_audio"),
        ("cut", lines[4]["reason"]),
        ("long", "duration_mismatch"),
    ]
    assert lines[4]["reason"] in ("duration_mismatch", "unreadable_audio")
    assert all(line["audio"].startswith(str(faulty.parent)) and line["details"] for line in lines)
    assert (report.kept.utterances, report.dropped.utterances) == (12, 6)
    seconds = sum(cut.duration for cut in read(tmp_path / "out"))
    assert report.kept.hours == pytest.approx(seconds / 3600, abs=1e-6)
    assert sum(share.utterances for share in report.by_reason.values()) == 6
    assert report.by_language["en"].utterances == 12
    assert json.loads((tmp_path / "out/report.json").read_text())["kept"]["utterances"] == 12


def test_the_output_can_be_read_from_anywhere(nemo, tmp_path, monkeypatch):
    manifest = nemo(3)
    monkeypatch.chdir(manifest.parent)
    prepare("train.jsonl", tmp_path / "out")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    moved = (tmp_path / "out").rename(tmp_path / "elsewhere" / "moved")
    assert [load_audio(cut).shape for cut in read(moved)] == [(8000,), (9600,), (11_200,)]


def test_the_same_source_gives_the_same_files(faulty, tmp_path):
    for name, jobs in (("a", 1), ("b", 4)):
        prepare(faulty, tmp_path / name, jobs=jobs)
    prepare(faulty, tmp_path / "b", jobs=3)
    for file in ("cuts.jsonl.gz", "dropped.jsonl", "report.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert len(list((tmp_path / "b").iterdir())) == 3
    prepare(tmp_path / "a", tmp_path / "c")
    assert read(tmp_path / "c") == read(tmp_path / "a")


def test_checks_that_need_a_tokenizer(nemo, tmp_path, tokenizer):
    manifest = nemo(6)
    rows = read_lines(manifest)
    rows[1]["lang"] = "fr"
    rows[2]["text"] = "жжж"
    rows[3]["text"] = "one two three four five six"
    rows[4] |= {"source_lang": "de", "target_lang": "en", "lang": None, "text": "one ж"}
    write_lines(manifest, rows)
    report = prepare(manifest, tmp_path / "out", tokenizer=tokenizer)
    reasons = [line["reason"] for line in read_lines(tmp_path / "out/dropped.jsonl")]
    assert reasons == ["unknown_language", "unknown_text", "ctc_infeasible"]
    assert {k: v.utterances for k, v in report.by_language.items()} == {"en": 2, "de>en": 1}
    limits = Limits(framing=Framing(subsampling=4))
    prepare(manifest, tmp_path / "four", tokenizer=tokenizer, limits=limits)
    four = [line["reason"] for line in read_lines(tmp_path / "four/dropped.jsonl")]
    assert four == reasons[:2]
    assert report.unknown_tokens == 1
    assert report.tokens > 6
    assert report.examples["unknown_language"].startswith("u1: the language of the speech must be ")
    mapped = prepare(
        manifest, tmp_path / "map", tokenizer=tokenizer, language_map={"French": "en", "xx": "de"}
    )
    dropped = [line["reason"] for line in read_lines(tmp_path / "map/dropped.jsonl")]
    assert dropped == reasons[1:]
    assert {k: v.utterances for k, v in mapped.by_language.items()} == {"en": 3, "de>en": 1}
    assert mapped.mapped_languages == {"fr": 1, "xx": 0}
    back = prepare(manifest, tmp_path / "back", language_map={"en": "de"})
    assert {k: v.utterances for k, v in back.by_language.items()} == {"de": 4, "fr": 1}
    assert back.by_reason["unwanted_language"].utterances == 1


def test_limits_and_progress(nemo, tmp_path):
    seen = []
    limits = Limits(min_duration=0.6, max_duration=1.0)
    report = prepare(nemo(7), tmp_path / "out", limits=limits, progress=seen.append)
    assert seen == [1, 2, 3, 4, 5, 6, 7]
    assert [report.by_reason[name].utterances for name in ("too_short", "too_long")] == [1, 1]


def test_a_malformed_line_is_listed_and_an_empty_source_stops_it(nemo, tmp_path):
    manifest = nemo(2)
    with manifest.open("a") as file:
        file.write("{\n")
    report = prepare(manifest, tmp_path / "listed")
    assert (report.kept.utterances, report.by_reason["malformed_row"].utterances) == (2, 1)
    assert "train.jsonl:3: not valid JSON" in (tmp_path / "listed" / "dropped.jsonl").read_text()
    manifest.write_text("{\n")
    with pytest.raises(ValueError, match=r"train\.jsonl:1: not valid JSON"):
        prepare(manifest, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    manifest.write_text("")
    with pytest.raises(ValueError, match="holds no utterances"):
        prepare(manifest, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []  # A folder that was there stays.


def test_the_source_is_never_written_over(nemo, tmp_path):
    manifest = nemo(2)
    prepare(manifest, tmp_path / "out")
    for out in (tmp_path / "out", manifest):
        with pytest.raises(ValueError, match="`out` must be a folder of its own"):
            prepare(tmp_path / "out", out)


def test_a_path_that_is_not_utf8_is_dropped_and_listed(tmp_path):
    folder, name = tmp_path / "set", os.fsdecode(b"caf\xe9")
    folder.mkdir()
    for stem in ("plain", name):
        with (folder / f"{stem}.wav").open("wb") as file:
            soundfile.write(file, np.sin(np.arange(16_000) / 9), 16_000, format="WAV")
        (folder / f"{stem}.txt").write_text("a b")
    report = prepare(folder, tmp_path / "out", jobs=1)
    assert (report.kept.utterances, report.by_reason["unreadable_audio"].utterances) == (1, 1)
    (line,) = read_lines(tmp_path / "out/dropped.jsonl")
    assert line["id"] == name
