import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
from lhotse import Recording, SupervisionSegment

from effasr.cli.main import main
from effasr.data.audio.waveform import load_audio
from effasr.data.features.frame_geometry import Framing
from effasr.data.filters.rules import Limits
from effasr.data.manifest import prepare as module
from effasr.data.manifest.prepare import prepare
from effasr.data.manifest.reader import read
from effasr.data.prompt import Prompt
from effasr.evaluation.evaluate import openable_cuts
from tests.data.test_layouts import RATE, hertz, tone, write
from tests.support.corpora import read_lines, write_lines
from tests.support.real_ffmpeg import real_ffmpeg


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
    monkeypatch.chdir(nemo(3).parent)
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


def call(folder: Path, *rows: dict) -> Path:
    """Write a manifest of a recording whose second channel is louder."""
    soundfile.write(folder / "call.wav", np.stack([0.2 * tone(300), tone(500)], 1), RATE)
    write(folder / "mono.wav", 700)
    lines = [{"audio_filepath": "call.wav", "text": "a", "id": "u"} | row for row in rows]
    return write_lines(folder / "m.jsonl", lines)


@pytest.mark.parametrize(
    ("channel", "expected"), [(None, 500), (0, 300), (1, 500), ("loudest", 500)]
)
def test_the_channel_of_a_call_is_read_ever_after(tmp_path, channel, expected) -> None:
    source = call(tmp_path, {}, {"channel": 0, "id": "named"})
    prepare(source, tmp_path / "out", channel=channel)
    for cuts in (list(read(tmp_path / "out")), openable_cuts(tmp_path / "out", prompt=Prompt())[0]):
        assert [hertz(cut) for cut in cuts] == [expected, 300]
        assert cuts[0].channel == ([0, 1] if channel is None else expected // 500)


def test_antiphase_is_usable_by_its_louder_channel(tmp_path) -> None:
    soundfile.write(tmp_path / "a.wav", np.stack([-0.8 * tone(500), tone(500)], 1), RATE)
    source = write_lines(tmp_path / "m.jsonl", [{"audio_filepath": "a.wav", "text": "a"}])
    assert prepare(source, tmp_path / "mean").by_reason["antiphase_audio"].utterances == 1
    (line,) = read_lines(tmp_path / "mean/dropped.jsonl")
    assert "effasr prepare --channel loudest" in line["details"]
    prepare(source, tmp_path / "out", channel="loudest")
    (cut,) = read(tmp_path / "out")
    np.testing.assert_allclose(load_audio(cut), tone(500), atol=1e-4)


@pytest.mark.parametrize(
    ("channel", "expected"), [(0, 300), ("loudest", 500), (2, "but the cut has [0, 1]")]
)
def test_the_channel_of_a_cut(tmp_path, channel, expected) -> None:
    call(tmp_path)
    cut = Recording.from_file(tmp_path / "call.wav").to_cut()
    span = SupervisionSegment("u", cut.recording_id, 0.0, cut.duration, cut.channel, "a")
    cut.supervisions = [span]
    write_lines(tmp_path / "cuts.jsonl", [cut.to_dict()])
    prepare(tmp_path / "cuts.jsonl", tmp_path / "out", channel=channel)
    if isinstance(expected, str):
        assert expected in read_lines(tmp_path / "out/dropped.jsonl")[0]["details"]
    else:
        (kept,) = read(tmp_path / "out")
        assert (hertz(kept), kept.supervisions[0].channel) == (expected, expected // 500)


@pytest.mark.parametrize("channel", ["-1", "left", "1.5", ""])
def test_a_channel_is_a_number_or_loudest(tmp_path, capsys, channel) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["prepare", "m.jsonl", str(tmp_path), f"--channel={channel}"])
    assert "must be a number from 0, A, B or loudest" in capsys.readouterr().err


FAKE = """#!{python}
import pathlib, sys
name = sys.argv[sys.argv.index("-i") + 1].removeprefix("file:")
pathlib.Path({calls!r}).open("a").write(name + "\\n")
content = pathlib.Path(name).read_bytes()
head, _, audio = content.partition(b"|")
sys.stderr.write(head.decode())
sys.stdout.buffer.write(audio)
"""


@pytest.fixture
def ffmpeg(tmp_path, monkeypatch) -> Path:
    """Puts a program on the PATH that writes what a file holds behind its messages."""
    program = tmp_path / "bin" / "ffmpeg"
    program.parent.mkdir()
    program.write_text(FAKE.format(python=sys.executable, calls=str(tmp_path / "calls")))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    return tmp_path / "calls"


def packed(path: Path, messages: str, seconds: float = 1.0) -> None:
    soundfile.write(path.with_suffix(".au"), np.stack([tone(300, seconds)] * 2, 1), RATE)
    path.write_bytes(messages.encode() + b"|" + path.with_suffix(".au").read_bytes())
    path.with_suffix(".au").unlink()
    path.with_suffix(".txt").write_text("a")


INFO = "[info]   Duration: 00:00:01.{:02}, start: 0.0\n"
MESSAGES = {
    "whole": (INFO.format(0), None),
    "rounded": (INFO.format(40), None),
    "video": (INFO.format(90) + "[info] Stream #0:0: Video: h264\n", None),
    "guessed": ("[aac @ 0x5] [warning] Estimating duration from bitrate\n" + INFO.format(90), None),
    "short": (INFO.format(90), "the file was cut short: 0.900 s are missing"),
    "damaged": ("[aac @ 0x5] [error] Input buffer exhausted\n", "ffmpeg: Input buffer exhausted"),
    "corrupt": ("[flv @ 0x5] [warning] Packet corrupt (stream = 0)\n", "ffmpeg: Packet corrupt"),
}


def test_what_only_ffmpeg_reads_is_copied_on_request(tmp_path, ffmpeg) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for name, (messages, _) in MESSAGES.items():
        packed(folder / f"{name}.m4a", messages)
    prepare(folder, tmp_path / "out")
    lines = read_lines(tmp_path / "out/dropped.jsonl")
    assert len(lines) == len(MESSAGES)
    assert all("`effasr prepare --convert` writes a copy" in line["details"] for line in lines)
    assert not ffmpeg.exists()
    prepare(folder, tmp_path / "out", convert=True)
    lines = {line["id"]: line["details"] for line in read_lines(tmp_path / "out/dropped.jsonl")}
    assert lines.keys() == {name for name, (_, problem) in MESSAGES.items() if problem}
    assert all(str(MESSAGES[name][1]) in details for name, details in lines.items())
    for cut in read(tmp_path / "out"):
        assert (cut.duration, hertz(cut), cut.num_channels) == (1.0, 300, 2)
        assert Path(cut.recording.sources[0].source).parent == tmp_path / "out/audio"
    calls = len(ffmpeg.read_text().splitlines())
    prepare(folder, tmp_path / "out", convert=True)
    # Copies are there.
    assert len(ffmpeg.read_text().splitlines()) == calls + len(lines)


def test_parts_of_a_recording_share_a_copy(tmp_path, ffmpeg) -> None:
    packed(tmp_path / "talk.m4a", "", 3.0)
    rows = [{"audio_filepath": "talk.m4a", "text": "a", "offset": n, "duration": 1} for n in (0, 1)]
    prepare(write_lines(tmp_path / "m.jsonl", rows), tmp_path / "out", convert=True, jobs=4)
    assert [cut.start for cut in read(tmp_path / "out")] == [0.0, 1.0]
    assert len(ffmpeg.read_text().splitlines()) == 1
    cut = Recording.from_file(next((tmp_path / "out/audio").iterdir())).to_cut()
    cut.recording.sources[0].source = "talk.m4a"
    cut.supervisions = [SupervisionSegment("u", cut.recording_id, 1.0, 1.0, cut.channel, "a")]
    write_lines(tmp_path / "cuts.jsonl", [cut.to_dict()])
    prepare(tmp_path / "cuts.jsonl", tmp_path / "cuts", convert=True)
    (kept,) = read(tmp_path / "cuts")
    assert (kept.start, kept.duration, hertz(kept)) == (1.0, 1.0, 300)


def test_a_recording_in_a_tar_file_is_copied(tmp_path, ffmpeg) -> None:
    packed(tmp_path / "a.m4a", "")
    (tmp_path / "a.txt").write_text("a")
    with tarfile.open(tmp_path / "set.tar", "w") as file:
        for name in ("a.m4a", "a.txt"):
            file.add(tmp_path / name, name)
    assert prepare(tmp_path / "set.tar", tmp_path / "out").dropped.utterances == 1
    prepare(tmp_path / "set.tar", tmp_path / "out", convert=True)
    (cut,) = read(tmp_path / "out")
    assert (cut.id, cut.duration, hertz(cut)) == ("a", 1.0, 300)


def test_without_ffmpeg_files_are_listed(tmp_path, monkeypatch) -> None:
    packed(tmp_path / "a.m4a", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    prepare(tmp_path, tmp_path / "out", convert=True)
    (line,) = read_lines(tmp_path / "out/dropped.jsonl")
    assert "ffmpeg might read it, but is not on the PATH: install it" in line["details"]


@pytest.mark.parametrize("suffix", ["m4a", "webm", "wma", "aac", "mka", "ts"])
def test_ffmpeg_itself(tmp_path, monkeypatch, suffix) -> None:
    program = real_ffmpeg()
    if program is None:
        pytest.skip("no ffmpeg")
    folder = tmp_path / "set"
    wav = write(tmp_path / "a.wav", 300, 500, seconds=2.0)
    folder.mkdir()
    path = folder / f"a.{suffix}"
    codec = {"webm": "libopus", "mka": "flac", "wma": "wmav2"}.get(suffix, "aac")
    command = [program, "-loglevel", "error", "-i", wav, "-c:a", codec, path]
    subprocess.run(command, check=True)
    content = path.read_bytes()
    (folder / f"cut.{suffix}").write_bytes(content[: len(content) * 6 // 10])
    for name in ("a", "cut"):
        (folder / f"{name}.txt").write_text("a")
    (tmp_path / "ffmpeg").symlink_to(program)
    monkeypatch.setenv("PATH", str(tmp_path))
    prepare(folder, tmp_path / "out", convert=True)
    (cut,) = read(tmp_path / "out")
    assert cut.duration == pytest.approx(2.0, abs=0.15)
    assert cut.num_channels == 2
    assert [line["id"] for line in read_lines(tmp_path / "out/dropped.jsonl")] == ["cut"]


@pytest.fixture
def corpus(tmp_path) -> Path:
    for number in range(12):
        write(tmp_path / f"{number:02}.wav", 300, 500)
        (tmp_path / f"{number:02}.txt").write_text("a")
    (tmp_path / "12.wav").write_bytes(b"")
    (tmp_path / "12.txt").write_text("a")
    soundfile.write(tmp_path / "13.wav", np.zeros(RATE), RATE)
    (tmp_path / "13.txt").write_text("a")
    return tmp_path


def test_an_interrupted_call_goes_on(corpus, tmp_path_factory, monkeypatch, caplog) -> None:
    out = tmp_path_factory.mktemp("out")
    prepare(corpus, out / "whole")
    measured: list[str] = []
    check = module.check_content

    def count(cut, *known) -> None:
        if len(measured) == 7:
            raise KeyboardInterrupt
        measured.append(cut.id)
        check(cut, *known)

    monkeypatch.setattr(module, "check_content", count)
    with pytest.raises(KeyboardInterrupt):
        prepare(corpus, out / "again", jobs=1, channel="loudest")
    journal = out / "again/.measured.jsonl"
    journal.write_bytes(journal.read_bytes()[:-5])  # killed while it wrote the last line
    write(corpus / "02.wav", 700, 900, seconds=2.0)
    before, measured[:] = list(measured), []
    monkeypatch.setattr(
        module,
        "check_content",
        lambda cut, *known: (measured.append(cut.id), check(cut, *known))[1],
    )
    prepare(corpus, out / "again", jobs=1, channel="loudest")
    assert "goes on after an interruption" in caplog.text
    # The last one may be the line that was not whole.
    assert set(before[:-1]) & set(measured) == {"02"}
    assert set(before) | set(measured) == {f"{number:02}" for number in (*range(12), 13)}
    assert not journal.exists()
    prepare(corpus, out / "whole", channel="loudest")
    for name in ("cuts.jsonl.gz", "dropped.jsonl", "report.json"):
        assert (out / "again" / name).read_bytes() == (out / "whole" / name).read_bytes()


def test_errors_are_known_after_an_interruption(corpus, tmp_path_factory, monkeypatch) -> None:
    out = tmp_path_factory.mktemp("out")
    prepare(corpus, out / "whole")
    write_whole = module._write
    monkeypatch.setattr(module, "_write", lambda *_, **__: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        prepare(corpus, out / "again")
    monkeypatch.setattr(module, "_write", write_whole)
    monkeypatch.setattr(module, "check_content", lambda cut, *_: pytest.fail(cut.id))
    prepare(corpus, out / "again")
    for name in ("cuts.jsonl.gz", "dropped.jsonl"):
        assert (out / "again" / name).read_bytes() == (out / "whole" / name).read_bytes()


def test_fields_that_are_not_read_are_named(tmp_path, capsys) -> None:
    rows = [{"snr": 3, "begin_s": 0.5}, {"snr": 4}]
    assert main(["prepare", str(call(tmp_path, *rows)), str(tmp_path / "out")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "fields that are not read, with their lines: 'snr' (2), 'begin_s' (1)" in text
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["unread_fields"] == {"snr": 2, "begin_s": 1}


@pytest.mark.parametrize(("column", "others"), [(None, {"raw_text": 1}), ("raw_text", {"text": 1})])
def test_other_texts_than_the_one_that_is_read_are_named(tmp_path, column, others) -> None:
    path = call(tmp_path, {"raw_text": "A."})
    assert prepare(path, tmp_path / "out", text_column=column).unread_fields == others
