"""Manifests and folders as people have them: every row and every recording is kept or listed."""

import gzip
import json
import os
import random
import shutil
import tarfile
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import soundfile

from effasr.data.audio.augmentation.augmenter import Clips
from effasr.data.audio.waveform import AudioError, load_audio
from effasr.data.manifest.cuts import prompt_of
from effasr.data.manifest.prepare import parse_clean, prepare
from effasr.data.manifest.reader import read
from effasr.data.prompt import Prompt
from effasr.transcription.inputs.sources import of_manifest
from effasr.transcription.transcribe import _load as load
from tests.support.corpora import read_lines, write_lines, write_tone

RATE = 16_000
TEXTS = ["one", "two, three", "fo\u2028ur", '"five and six', 'say "seven"', 'eight" nine', "x y"]

READ_TEXTS = [text.replace("\u2028", " ") for text in TEXTS]


def tone(hertz: float, seconds: float = 1.0) -> np.ndarray:
    return (0.3 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * RATE)) / RATE)).astype("f4")


def write(path: Path, *tones: float, seconds: float = 1.0) -> Path:
    """Write a recording with a tone in each channel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.stack([tone(hertz, seconds) for hertz in tones], 1), RATE)
    return path


def hertz(cut) -> int:
    """Return the frequency of the loudest tone of a cut."""
    audio = load_audio(cut)
    return round(np.abs(np.fft.rfft(audio)).argmax() * RATE / len(audio) / 10) * 10


def prepared(source: Path, tmp_path: Path) -> tuple[list, list[dict]]:
    """Return the kept cuts and the lines of dropped.jsonl."""
    out = tmp_path / "prepared"
    shutil.rmtree(out, ignore_errors=True)
    report = prepare(source, out, jobs=1)
    dropped = read_lines(out / "dropped.jsonl")
    selected = list(read(out)) if report.kept.utterances else []
    assert (len(selected), len(dropped)) == (report.kept.utterances, report.dropped.utterances)
    return selected, dropped


def talk(path: Path, *tones: float) -> Path:
    """Write a recording with a tone of a second after another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.concatenate([tone(hertz) for hertz in tones]), RATE)
    return path


def texts(cuts) -> list[str]:
    return [cut.supervisions[0].text for cut in cuts]


@pytest.fixture
def folder(tmp_path):
    for number in range(len(TEXTS)):
        write(tmp_path / "set" / f"c{number}.wav", 200 + 100 * number)
    return tmp_path / "set"


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("delimiter", ["\t", ";", "|"])
@pytest.mark.parametrize("names", ["file_name text", "path sentence", "audio transcription"])
def test_tables_keep_all_rows(folder, tmp_path, names, delimiter, mark, ending) -> None:
    """Whatever the delimiter, and whatever quotes are in the texts."""
    rows = [names.split(), *([f"c{number}.wav", text] for number, text in enumerate(TEXTS))]
    content = mark + "".join(delimiter.join(row) + ending for row in rows)
    (folder / "metadata.csv").write_bytes(content.encode())
    selected, dropped = prepared(folder, tmp_path)
    assert (texts(selected), dropped) == (READ_TEXTS, [])
    assert [hertz(cut) for cut in selected] == [200 + 100 * number for number in range(len(TEXTS))]


def test_quotes_of_csv_and_quotes_of_a_text(folder, tmp_path) -> None:
    (folder / "metadata.csv").write_text(
        'file_name,text\nc0.wav,"a, b"\nc1.wav,"never closed\nc2.wav,"say ""c"""\n'
        'c3.wav,"two\nlines"\nc4.wav,d, e\nc5.wav,closed"\n'
    )
    selected, dropped = prepared(folder, tmp_path)
    assert texts(selected) == ["a, b", '"never closed', 'say "c"', "two lines", 'closed"']
    row, *recordings = dropped
    assert [row["id"] for row in recordings] == ["c4", "c6"]
    assert (row["reason"], row["id"]) == ("malformed_row", "metadata.csv:7")
    assert "metadata.csv:7: has 3 columns, but the first line has 2" in row["details"]


def test_a_huge_field_is_listed(folder, tmp_path) -> None:
    huge = "x" * 200_000
    (folder / "metadata.csv").write_text(f'file_name,text\nc0.wav,"a, {huge}"\nc1.wav,b\n')
    kept, dropped = prepared(folder, tmp_path)
    assert texts(kept) == ["b"]
    assert [row["id"] for row in dropped][:2] == ["metadata.csv:2", "c0"]


def test_columns_that_are_not_read_are_named(folder, tmp_path, caplog) -> None:
    (folder / "metadata.csv").write_text("file_name,text,begin_s,up_votes\nc0.wav,a,1.0,2\n")
    prepared(folder, tmp_path)
    assert "metadata.csv: columns that are not read: 'begin_s'." in caplog.text


@pytest.mark.parametrize("is_folder", [True, False])
def test_common_voice(tmp_path, is_folder) -> None:
    folder = tmp_path / "set"
    rows = ["client_id\tpath\tsentence\tup_votes\tlocale\tsegment"]
    for number, text in enumerate(TEXTS):
        write(folder / "clips" / f"v{number}.mp3", 300)
        rows.append(f"c{number % 2}\tv{number}.mp3\t{text}\t2\tcy\t")
    (folder / "train.tsv").write_text("\n".join(rows))
    selected, dropped = prepared(folder if is_folder else folder / "train.tsv", tmp_path)
    assert (texts(selected), dropped) == (READ_TEXTS, [])
    assert {cut.supervisions[0].language for cut in selected} == {"cy"}
    assert {cut.supervisions[0].speaker for cut in selected} == {"c0", "c1"}


def test_every_recording_of_a_folder_is_kept_or_listed(tmp_path) -> None:
    folder = write(tmp_path / "set" / "without.wav", 300).parent
    suffixes = ("wav", "aiff", "aif", "au", "caf", "w64", "ogg", "oga", "flac", "mp3")
    for suffix in suffixes:
        kind = {"oga": "OGG", "aif": "AIFF"}.get(suffix, suffix.upper())
        with (folder / f"r_{suffix}.{suffix}").open("wb") as f:
            soundfile.write(f, tone(400), RATE, format=kind)
        (folder / f"r_{suffix}.txt").write_text(suffix)
    (folder / "video.m4a").write_bytes(b"\0\0\0\x20ftypM4A " + bytes(99))
    (folder / "video.txt").write_text("m4a")
    selected, dropped = prepared(folder, tmp_path)
    assert sorted(texts(selected)) == sorted(suffixes)
    reasons = {row["id"]: row["reason"] for row in dropped}
    assert reasons == {"video": "unreadable_audio", "without": "malformed_row"}


@pytest.mark.parametrize("channels", [(0, 1), ("A", "B"), ([0], [1])])
def test_channels_of_a_call(tmp_path, channels) -> None:
    write(tmp_path / "call.wav", 300, 500)
    lines = [
        {"audio_filepath": "call.wav", "text": text, "channel": channel, "id": text}
        for text, channel in zip("abc", (*channels, 2), strict=True)
    ]
    selected, dropped = prepared(write_lines(tmp_path / "m.jsonl", lines), tmp_path)
    assert [hertz(cut) for cut in selected] == [300, 500]
    assert "`channel` is 2, but the file has 2, counted from 0" in dropped[0]["details"]


@pytest.mark.parametrize(("first", "second"), ["AB", "12"])
def test_kaldi_channels_and_segments(tmp_path, first, second) -> None:
    folder = tmp_path / "set"
    write(folder / "call.wav", 300, 500)
    (folder / "wav.scp").write_text("call-A call.wav\ncall-B call.wav\n")
    (folder / "reco2file_and_channel").write_text(f"call-A call {first}\ncall-B call {second}\n")
    (folder / "segments").write_text(
        "a call-A 0 0.5\nb call-B 0.5 -1\nzero call-A 0.5 0.5\nfar call-A 0.5 1.9\n"
    )
    (folder / "text").write_text("a one two\nb\tdrei\nzero three\nfar four\nnowhere five\n")
    (folder / "utt2spk").write_text("a anna\nb ben\n")
    (folder / "utt2lang").write_text("b de\n")
    selected, dropped = prepared(folder, tmp_path)
    assert [(hertz(cut), cut.duration) for cut in selected] == [(300, 0.5), (500, 0.5)]
    assert texts(selected) == ["one two", "drei"]
    assert [cut.supervisions[0].speaker for cut in selected] == ["anna", "ben"]
    assert [prompt_of(cut).source for cut in selected] == ["en", "de"]
    reasons = {row["id"]: row["reason"] for row in dropped}
    malformed = dict.fromkeys(("zero", "nowhere"), "malformed_row")
    assert reasons == malformed | {"far": "duration_mismatch"}


def supervised(begin: float, length: float, **cut: object) -> dict:
    supervision = {"id": "s", "recording_id": "r", "channel": 0, "text": "a", "language": "en"}
    source = {"type": "file", "channels": [0], "source": "r.wav"}
    return {
        **{"id": "u", "type": "MonoCut", "start": 0.0, "duration": 3.0, "channel": 0},
        "supervisions": [supervision | {"start": begin, "duration": length}],
        "recording": {
            **{"id": "r", "sources": [source], "sampling_rate": RATE, "num_samples": 3 * RATE},
            **{"duration": 3.0, "channel_ids": [0]},
        },
        **cut,
    }


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (supervised(0.0, 3.0), (0, 3.0)),
        (supervised(0.0, 2.95), (0, 3.0)),
        (supervised(1.0, 1.0), (500, 1.0)),
        (supervised(2.0, 1.05), (700, 1.0)),
        (supervised(-0.5, 2.0, start=1.0, duration=2.0), None),
        (supervised(0.0, 2.0, duration=1.0), None),
    ],
)
def test_a_text_has_the_span_of_its_supervision(tmp_path, line, expected) -> None:
    talk(tmp_path / "r.wav", 300, 500, 700)
    selected, dropped = prepared(write_lines(tmp_path / "cuts.jsonl", [line]), tmp_path)
    if expected is None:
        assert selected == []
        assert "has only a part of what its supervision says" in dropped[0]["details"]
    else:
        loudest, duration = expected
        assert [cut.duration for cut in selected] == [pytest.approx(duration)]
        assert not loudest or hertz(selected[0]) == loudest


@pytest.mark.parametrize("tones", [2, 3, 4])
def test_a_file_is_as_long_as_its_cut_says(tmp_path, tones) -> None:
    """A file that was replaced is not read at the times of another."""
    talk(tmp_path / "r.wav", *range(300, 300 + 100 * tones, 100))
    line = supervised(0.0, 1.0, start=1.0, duration=1.0)
    selected, dropped = prepared(write_lines(tmp_path / "cuts.jsonl", [line]), tmp_path)
    assert [hertz(cut) for cut in selected] == ([400] if tones == 3 else [])
    message = f"`recording.duration` is 3 s, but the file holds {tones} s"
    assert all(message in row["details"] for row in dropped)
    if not dropped:  # training does not open the files of a prepared folder before it reads them
        talk(tmp_path / "r.wav", 300, 300, 400, 500, 600)
        (source,) = of_manifest(tmp_path / "prepared", prompt=Prompt())
        for reading in (lambda: load_audio(selected[0]), lambda: load(source, RATE)):
            with pytest.raises(AudioError, match="holds 5 s, and its cut was made when it had few"):
                reading()


NAMES = ["na\u00efve caf\u00e9.wav", "sub/a.wav", "b.wav", "c d.wav"]


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_names_that_differ_in_spelling(tmp_path, form) -> None:
    for number, name in enumerate(NAMES):
        write(tmp_path / unicodedata.normalize(form, name), 300 + 100 * number)
    spelled = [unicodedata.normalize("NFC" if form == "NFD" else "NFD", NAMES[0])]
    spelled += ["sub\\a.wav", "b.wav ", "c d.wav", "file:///a.wav"]
    lines = [{"audio_filepath": name, "text": "a"} for name in spelled]
    selected, dropped = prepared(write_lines(tmp_path / "m.jsonl", lines), tmp_path)
    assert [hertz(cut) for cut in selected] == [300, 400, 500, 600]
    assert "file:///a.wav: a URL must be of a store or a server" in dropped[0]["details"]


BAD = [
    *({"text": float("nan")}, {"text": 5}, {"duration": 0.0}, {"duration": "long"}),
    *({"offset": -0.01}, {"audio_filepath": ["a"]}, {"channel": "left"}, {"pnc": "perhaps"}),
    *({"id": ["u"]}, {"start": 0.5, "end": 0.2}),
]
GOOD = [{"id": 7}, {"speaker": 17}, {"duration": "1.0"}, {"channel": None}, {"extra": {}}]


@pytest.mark.parametrize("first", [False, True])
def test_a_bad_row_stops_no_other(tmp_path, first) -> None:
    """Those at the beginning of a file do not decide its format, either."""
    write(tmp_path / "a.wav", 300)
    lines = [json.dumps({"audio_filepath": "a.wav", "text": "a"} | row) for row in (*GOOD, *BAD)]
    good = lines[: len(GOOD)]
    lines[len(GOOD) : len(GOOD)] = ["{", "[]", '{"other": 1}']
    lines = lines[::-1] if first else lines
    (tmp_path / "m.jsonl").write_text("\n".join(lines))
    selected, dropped = prepared(tmp_path / "m.jsonl", tmp_path)
    assert len(selected) == len(GOOD)
    assert {row["reason"] for row in dropped} == {"malformed_row"}
    assert len(dropped) == len(BAD) + 3
    numbers = sorted(int(row["details"].split("m.jsonl:")[1].split(":")[0]) for row in dropped)
    expected = [n for n, line in enumerate(lines, 1) if line not in good]
    assert numbers == expected


def test_two_texts_of_one_span_are_counted(tmp_path) -> None:
    write(tmp_path / "call.wav", 300, 500)
    rows = [("a", 0), ("b", 1), ("c", None), ("d", None), ("a", 0)]
    lines = [{"audio_filepath": "call.wav", "text": text, "channel": side} for text, side in rows]
    report = prepare(write_lines(tmp_path / "m.jsonl", lines), tmp_path / "out", jobs=1)
    assert (report.kept.utterances, report.conflicting_texts) == (5, 1)


def test_far_too_little_text_is_an_outlier(tmp_path) -> None:
    rng = np.random.default_rng(0)
    lines = []
    for number in range(120):
        write(tmp_path / f"{number}.wav", 300, seconds=1.0)
        text = "a" if number == 60 else "x" * int(rng.integers(14, 19))
        lines.append({"audio_filepath": f"{number}.wav", "text": text})
    kept, dropped = prepared(write_lines(tmp_path / "m.jsonl", lines), tmp_path)
    (row,) = dropped
    assert (row["id"], row["reason"], len(kept)) == ("60", "character_rate_outlier", 119)
    assert row["details"] == "1.0 per second, far less than others of 1.0 s"


@pytest.mark.parametrize(
    ("names", "text", "expected"),
    [
        ("lower", "It IS. İ", "it is. i̇"),
        ("no-punctuation", "Don't, he: well-known! (Yes) 'so'", "Don't he well-known Yes so"),
        ("tags=<...>", "<noise> one <unk>two", "one two"),
        ("tags=[...],lower,no-punctuation", "[laughs] ONE, Two.", "one two"),
        ("", "  a   B ", "a B"),
    ],
)
def test_texts_are_cleaned(tmp_path, names, text, expected) -> None:
    write(tmp_path / "a.wav", 300)
    line = {"audio_filepath": "a.wav", "text": text}
    manifest = write_lines(tmp_path / "m.jsonl", [line, line | {"text": "<x>"}])
    prepare(manifest, tmp_path / "out", jobs=1, clean=parse_clean(names))
    kept = texts(read(tmp_path / "out"))
    assert kept[0] == expected
    assert len(kept) == (1 if "tags=<" in names else 2)


def test_an_unknown_transform_is_named() -> None:
    with pytest.raises(ValueError, match=r"must be some of lower, .* but one is 'upper'"):
        parse_clean("lower,upper")


KALDI = {"wav.scp": "u u.wav\n", "text": "u one\n"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (KALDI | {"wav.scp": "u raw.ark:17\n"}, r"scp:1: .*'u' is in an archive.*files\.scp"),
        (KALDI | {"wav.scp": "u\n"}, r"wav\.scp:1: recording 'u' has no path"),
        (KALDI | {"text": "v one\n"}, r"text:1: utterance 'v' is not in wav\.scp: run utils/fix_"),
        (KALDI | {"segments": "v u 0 1\n"}, "text:1: utterance 'u' is not in segments"),
        (KALDI | {"segments": "u u 0\n"}, "segments:1: must be `utterance recording start end`"),
        (KALDI | {"segments": "u w 0 1\n"}, r"segments:1: recording 'w' is not in wav\.scp"),
        (KALDI | {"segments": "u u 1 0.5\n"}, r"segments:1: `end` must exceed .*0\.5, 1\.0"),
        (KALDI | {"segments": "u u 0 x\n"}, "segments:1: times must be numbers of seconds, .*'x'"),
        ({"wav.scp": "u u.wav\n"}, "there is no `text`"),
        ({"v.wav": "", "v.txt": ""}, r"u\.wav: there is no u\.txt beside it"),
        ({"metadata.csv": "file_name,words\na.wav,one\n"}, r"metadata\.csv:2: `text` is missing"),
        ({"metadata.csv": "file_name,text\nu.wav,one\nb.wav\n"}, r"csv:3: has 1 columns"),
        ({"notes.md": "nothing"}, "not a folder of utterances"),
    ],
)
def test_malformed_folders(tmp_path, files, message):
    if "notes.md" not in files:
        write_tone(tmp_path / "u.wav", 1.0)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read(tmp_path)


def test_linked_folders_are_entered_once(tmp_path):
    corpus, elsewhere = tmp_path / "corpus", tmp_path / "elsewhere"
    for path in (corpus / "b/one.wav", elsewhere / "two.wav", corpus / ".hidden/three.wav"):
        write_tone(path, 0.5).with_suffix(".txt").write_text(path.stem)
    (corpus / "linked").symlink_to(elsewhere)
    (corpus / "a").symlink_to(corpus / "b")
    (corpus / "loop").symlink_to(corpus)
    result = read(corpus)
    assert [cut.recording.sources[0].source for cut in result] == [
        str(corpus / "b/one.wav"),
        str(corpus / "linked/two.wav"),
    ]
    assert len(Clips.load([corpus], "noise").samples) == 2


CUE = "{}\n00:00:{:02},000 --> 00:00:{:02},000\n{}\n\n"


def content(files: Mapping[str, str | bytes], folder: Path) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def recording(name: str = "r") -> dict:
    source = {"type": "file", "channels": [0], "source": "talk.wav"}
    return {"id": name, "sources": [source], "sampling_rate": RATE, "num_samples": 4 * RATE,
            "duration": 4.0, "channel_ids": [0]}  # fmt: skip


def supervision(number: int) -> dict:
    return {"id": str(number), "recording_id": "r", "start": float(number), "duration": 1.0,
            "channel": 0, "text": f"t{number}", "language": "en"}  # fmt: skip


def cut(number: int, kind: str = "file") -> dict:
    audio = recording()
    audio["sources"][0]["type"] = kind
    return {"id": f"c{number}", "type": "MonoCut", "start": float(number), "duration": 1.0,
            "channel": 0, "supervisions": [supervision(number) | {"start": 0.0}],
            "recording": audio}  # fmt: skip


def shar(folder: Path, lines: list[str]) -> Path:
    with tarfile.open(folder / "recording.000000.tar", "w") as tar:
        for number in range(4):
            tar.add(folder / "talk.wav", f"c{number}.wav")
    return content({"cuts.000000.jsonl": "".join(lines)}, folder)


def compressed(lines: list[str]) -> bytes:
    return gzip.compress("".join(lines).encode())


CSV = ["file_name\ttext\tstart\tend\n", *(f"talk.wav\tt{n}\t{n}\t{n + 1}\n" for n in range(4))]
SEGMENTS = {
    "wav.scp": "r talk.wav\n",
    "segments": "".join(f"u{n} r {n} {n + 1}\n" for n in range(4)),
}
TEXT = "".join(f"u{n} t{n}\n" for n in range(4))
# Lines, how many of them are no rows, and what makes a source of them.
READERS: dict[str, tuple[list[str], int, Callable[[Path, list[str]], Path]]] = {
    "nemo": (
        [json.dumps({"audio_filepath": "talk.wav", "text": f"t{n}", "offset": n, "duration": 1})
         + "\n" for n in range(4)], 0,
        lambda folder, lines: content({"m.json": "".join(lines)}, folder) / "m.json"),
    "cuts": ([json.dumps(cut(n)) + "\n" for n in range(4)], 0,
             lambda folder, lines: content({"cuts.jsonl.gz": compressed(lines)}, folder)),
    "shar": ([json.dumps(cut(n, "shar")) + "\n" for n in range(4)], 0, shar),
    "supervisions": (
        [json.dumps(supervision(n)) + "\n" for n in range(4)], 0,
        lambda folder, lines: content(
            {"a_supervisions_b.jsonl.gz": compressed(lines),
             "a_recordings_b.jsonl": json.dumps(recording()) + "\n"}, folder)),
    "recordings": (
        [json.dumps(recording(name)) + "\n" for name in "rstu"], 0,
        lambda folder, lines: content(
            {"recordings.jsonl.gz": compressed(lines),
             "supervisions.jsonl": json.dumps(supervision(0)) + "\n"}, folder)),
    "table": (CSV, 1, lambda folder, lines: content({"metadata.csv": "".join(lines)}, folder)),
    "csv": (["file_name,text\n", *(f"talk.wav,t{n}\n" for n in range(4))], 1,
            lambda folder, lines: content({"metadata.csv": "".join(lines)}, folder)),
    "common voice": (
        ["client_id\tpath\tsentence\tlocale\n", *(f"s\ttalk\tt{n}\ten\n" for n in range(4))], 1,
        lambda folder, lines: (
            content({"clips/talk.wav": (folder / "talk.wav").read_bytes()}, folder)
            and content({"train.tsv": "".join(lines)}, folder))),
    "ljspeech": ([f"talk|t{n}|t{n}\n" for n in range(4)], 0,
                 lambda folder, lines: content({"metadata.csv": "".join(lines)}, folder)),
    "metadata.jsonl": (
        [json.dumps({"file_name": "talk.wav", "text": f"t{n}"}) + "\n" for n in range(4)], 0,
        lambda folder, lines: content({"metadata.jsonl": "".join(lines)}, folder)),
    "librispeech": ([f"{name} t\n" for name in ("talk", "no", "none")], 0,
                    lambda folder, lines: content({"a.trans.txt": "".join(lines)}, folder)),
    "kaldi text": (
        TEXT.splitlines(True), 0,
        lambda folder, lines: content(SEGMENTS | {"text": "".join(lines)}, folder)),
    "kaldi segments": (
        SEGMENTS["segments"].splitlines(True), 0,
        lambda folder, lines: content(
            SEGMENTS | {"text": TEXT, "segments": "".join(lines)}, folder)),
    "kaldi wav.scp": (
        [f"u{n} talk.wav\n" for n in range(4)], 0,
        lambda folder, lines: content({"wav.scp": "".join(lines), "text": TEXT}, folder)),
    "srt": ([CUE.format(n + 1, n, n + 1, f"t{n}") for n in range(4)], 0,
            lambda folder, lines: content({"talk.en.srt": "".join(lines)}, folder)),
    "vtt": (["WEBVTT\n\n", *(CUE.format("", n, n + 1, f"t{n}") for n in range(4))], 1,
            lambda folder, lines: content({"talk.vtt": "".join(lines)}, folder)),
    "ctm": ([f"talk 1 {n}.0 0.2 t{n}\n" for n in range(4)], 0,
            lambda folder, lines: content({"talk.ctm": "".join(lines)}, folder)),
}  # fmt: skip


def damaged(lines: list[str], fixed: int, rng: random.Random) -> list[str]:
    lines = list(lines)
    for _ in range(rng.randint(1, 3)):
        number = rng.randrange(fixed, len(lines))
        line = lines[number]
        at = rng.randrange(len(line) - 1)
        insertion = rng.choice(['"', ",", "\t", "{", "9", "-", "|", "\udce9", "\u200b", ""])
        lines[number] = line[:at] + insertion + line[at + rng.randint(0, 3) :].rstrip("\n") + "\n"
        if line.endswith("\n\n"):
            lines[number] += "\n"
    return lines


@pytest.mark.parametrize("name", READERS)
def test_damage_loses_no_row(tmp_path, monkeypatch, name) -> None:
    lines, fixed, make = READERS[name]
    rng = random.Random(name)
    # A byte that is not UTF-8 stands as half of a character in the lines.
    encode = lambda text: text.encode("utf-8", "surrogateescape")
    compared = 0
    for trial in range(int(os.environ.get("EFFASR_DAMAGES", 8))):
        folder = tmp_path / str(trial)
        talk(folder / "talk.wav", 300, 500, 700, 900)
        rows = damaged(lines, fixed, rng) if trial else list(lines)
        raw = [encode(row).decode("latin-1") for row in rows]
        source = make(folder, raw)
        for path in folder.iterdir():
            if path.is_file() and path.suffix not in (".wav", ".tar"):
                binary = path.read_bytes()
                unpacked = gzip.decompress(binary) if path.suffix == ".gz" else binary
                again = unpacked.decode().encode("latin-1")
                path.write_bytes(gzip.compress(again) if path.suffix == ".gz" else again)
        try:
            kept, dropped = prepared(source, tmp_path / "out")
        except ValueError:  # nothing is read, which is said
            continue
        compared += 1
        present = sum(bool(row.strip()) for row in rows[fixed:])
        details = [row["details"] for row in dropped]
        if name == "ctm":  # words are joined
            present -= sum(text.count(" ") for text in texts(kept))
        assert len(kept) + len(dropped) >= present, details
        assert set(texts(kept)) or dropped
        for utterance in kept:
            assert utterance.duration <= 4.0 + 1e-6
        if trial == 0:
            expected = {"kaldi wav.scp": 4, "librispeech": 1, "recordings": 1}.get(name, 4)
            assert len(kept) == expected, details
    assert compared >= 5, compared


SRT = "".join(CUE.format(n + 1, n, n + 1, f"t{n}") for n in range(2))
ROLLING = """00:00:00.000 --> 00:00:00.500
 \na<00:00:00.200><c> b</c>\n
00:00:00.500 --> 00:00:00.510\na b\n \n
00:00:00.510 --> 00:00:01.000\na b\nc\n
00:00:01.000 --> 00:00:01.010\nc\n \n
00:00:01.010 --> 00:00:02.000\nc\nd\n"""
WORDS = "talk A 0.0 0.5 a\nother 1 0.5 0.5 b\ntalk B 1.0 0.5 c\ntalk 2 3.0 0.5 d\n"
# Files beside a recording of one second for each of two channels, the texts, and what is listed.
SOURCES: dict[str, tuple[dict[str, str | bytes], list[str], list[str]]] = {
    "utf-16": ({"metadata.csv": "file_name;text\ntalk.wav;é\n".encode("utf-16")}, ["é"], []),
    "latin-1": (
        {"metadata.csv": b"file_name;text\ntalk.wav;\xe9\ntalk.wav;b\n"}, ["b"],
        ["metadata.csv:2: must be UTF-8, but has the byte 0xe9"]),
    "a text in latin-1": (
        {"talk.txt": b"\xe9", "b.wav": b"", "b.txt": "b"}, [],
        ["b.wav: the file is empty", "talk.txt:1: must be UTF-8"]),
    "names of columns": ({"metadata.csv": "Audio_File,ID,Sentence\ntalk.wav,1,a\n"}, ["a"], []),
    "milliseconds": (
        {"metadata.csv": "path,text,start_ms,end_ms\ntalk.wav,a,1000,1500\n"}, ["a"], []),
    "an end without a start": (
        {"metadata.csv": "path,text,end\ntalk.wav,a,1.5\n"}, [],
        ["`end` needs `offset` or `start` beside it", "talk.wav: no line names it"]),
    "not in the table": (
        {"metadata.csv": "path,text\ntalk,a\n", "sub/b.mp3": b"x"}, ["a"],
        ["b.mp3: no line names it"]),
    "not in metadata.jsonl": (
        {"metadata.jsonl": '{"file_name": "./talk.wav", "text": "a"}\n', "b.wav": b"x"}, ["a"],
        ["b.wav: no line names it"]),
    "an unbalanced quote in the first row": (
        {"metadata.csv": 'talk|"a|"b\ntalk|c|d\n'}, ['"b', "d"], []),
    "no second spelling": ({"metadata.csv": "talk|a|\n"}, ["a"], []),
    "two suffixes": (
        {"talk.flac": b"", "a.trans.txt": "talk a\n"}, [],
        ["talk.flac: the file is empty", "talk.wav: is in no *.trans.txt"]),
    "a code of three letters": ({"talk.ger.srt": SRT}, ["t0", "t1"], []),
    "a code of three parts": ({"talk.sr-Latn-RS.srt": SRT}, ["t0", "t1"], []),
    "a region in digits": ({"talk.es-419.vtt": "WEBVTT\n\n" + SRT}, ["t0", "t1"], []),
    "language in the name": ({"talk.de.srt": SRT, "talk.en.srt": SRT}, ["t0", "t1"], []),
    "samples before a text": ({"talk.TXT": "0 32000 She had 0 3200.\n"}, ["She had 0 3200."], []),
    "two other languages": (
        {"talk.de.srt": SRT, "talk.fr.srt": SRT}, [],
        ["talk.de.srt, talk.fr.srt are beside it: choose by `--language`"]),
    "suffix of the recording": ({"talk.wav.SRT": SRT}, ["t0", "t1"], []),
    "upper case": ({"talk.TXT": "a"}, ["a"], []),
    "other suffix": (
        {"talk.txt": "a", "b.xyz": b"x", "b.txt": "b"}, ["a"],
        ["b.xyz: .xyz is no known suffix of audio"]),
    "a blank line in a cue": (
        {"talk.srt": SRT + "3\n00:00:01,500 --> 00:00:01,900\na\n\nb\n"}, ["t0", "t1", "a"],
        ["talk.srt:13: has no times that can be read: 'b'"]),
    "no cues": ({"talk.vtt": "WEBVTT\n"}, [], ["talk.vtt: has no times and texts"]),
    "words of two recordings": (
        {"talk.ctm": WORDS}, ["a", "c"],
        ["talk.ctm:2: is of recording 'other'", "talk.wav: `offset` is 3 s"]),
    "kaldi": (
        {"wav.scp": "a talk.wav\nb sph2pipe b.sph |\nc talk.wav\na other.wav\n",
         "text": "a a\nb b\na again\n"}, ["a"],
        ["wav.scp:2: recording 'b' is a command", "wav.scp:3: utterance 'c' has no line",
         "wav.scp:4: 'a' appears twice", "text:3: 'a' appears twice"]),
    "kaldi segments": (
        {"wav.scp": "a talk.wav\nb talk.wav\n", "segments": "u a 0 1\nv a 1 2\n", "text": "u a\n"},
        ["a"], ["segments:2: utterance 'v' has no line", "wav.scp:2: no segment is of"]),
    "kaldi, a channel missing": (
        {"wav.scp": "a talk.wav\nb talk.wav\n", "text": "a a\nb b\n",
         "reco2file_and_channel": "a talk A\n"}, ["a"],
        ["'b' has no line in reco2file_and_channel"]),
    "times that disagree": (
        {"metadata.csv": "path,text,start,end,duration,offset\ntalk.wav,a,0,1,2,\n"
         "talk.wav,b,0,1,,1\ntalk.wav,e,9:30,,1,1\ntalk.wav,c,0.5,1,0.5,0.5\ntalk.wav,d,,,1,1\n"},
        ["e", "c", "d"],
        ["`duration` is 2 s, but `end` is 1 s after `start`", "`offset` is 1 s, but `start` 0 s"]),
    "white space": (
        {"metadata.csv": 'path,text\ntalk.wav,"a\tb\n c"\ntalk.wav,bon\u202fjour\u00a0!\n'},
        ["a b c", "bon jour !"], []),
    "missing texts": (
        {"metadata.csv": "path,sentence,text\ntalk.wav,a,nan\ntalk.wav,NaN,\ntalk.wav,,None\n"
         "talk.wav,NULL,<NA>\ntalk.wav,nan bread,\ntalk.wav,Nan,\n"},
        ["a", "nan bread", "Nan"], ["the text is empty"] * 3),
    "an object of Hugging Face": (
        {"metadata.jsonl": '{"audio": {"path": "talk.wav", "bytes": null}, "text": "a"}\n'},
        ["a"], []),
    "a word in JSON": (
        {"metadata.jsonl": '{"file_name": "talk.wav", "text": "nan"}\n'}, ["nan"], []),
    "marks of cues": (
        {"talk.vtt": "WEBVTT\n\n00:00.000 --> 00:01.000\n<v Al>1 &lt; 2 &amp; <00:00.5><c>R&D</c>\n"
         "\n00:01.000 --> 00:02.000\n{\\an8}if a < b and c > d\n \n&#39;tis &foo;\n"},
        ["1 < 2 & R&D", "if a < b and c > d 'tis &foo;"], []),
    "captions that roll up": ({"talk.vtt": "WEBVTT\n\n" + ROLLING}, ["a b", "c", "d"], []),
    "said twice": ({"talk.srt": SRT.replace("t1", "t0")}, ["t0", "t0"], []),
    "kaldi channels from 0": (
        {"wav.scp": "a talk.wav\nb talk.wav\n", "text": "a a\nb b\n",
         "reco2file_and_channel": "a talk 0\nb talk 1\n"}, ["a", "b"], []),
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_kept_or_listed(tmp_path, name) -> None:
    files, expected, listed = SOURCES[name]
    folder = tmp_path / "set"
    write(folder / "talk.wav", 300, 500, seconds=2.0)
    content(files, folder)
    kept, dropped = prepared(folder, tmp_path)
    assert texts(kept) == expected
    details = " ".join(row["details"] for row in dropped)
    assert len(dropped) == len(listed), details
    assert all(text in details for text in listed), details
    codes = {"three letters": "de", "three parts": "sr", "region in digits": "es"}
    language = next((code for text, code in codes.items() if name.endswith(text)), "en")
    assert {prompt_of(cut).source for cut in kept} <= {language}
    if name in ("words of two recordings", "kaldi channels from 0"):
        assert [hertz(cut) for cut in kept] == [300, 500]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("talk.wav|a|speaker\n", "the first line must name the columns"),
        ("path,text,text\n", "column 'text' comes twice: remove or rename one"),
        ("track,words\n", "the first line must name the columns, among them one of audio_file"),
    ],
)
def test_a_table_that_cannot_be_understood_is_refused(tmp_path, header, message) -> None:
    """A speaker is never taken for the text."""
    talk(tmp_path / "talk.wav", 300, 500, 700, 900)
    path = content({"m.csv": header + header}, tmp_path) / "m.csv"
    with pytest.raises(ValueError, match=message):
        prepared(path, tmp_path)
