"""Each row and each recording of every kind of source is kept or listed, whatever is damaged."""

import gzip
import json
import os
import random
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.data.test_layouts import RATE, hertz, prepared, texts, tone, write

CUE = "{}\n00:00:{:02},000 --> 00:00:{:02},000\n{}\n\n"


def content(files: Mapping[str, str | bytes], folder: Path) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def talk(folder: Path, seconds: int = 4, name: str = "talk.wav") -> None:
    """Write a recording with another tone in each second."""
    folder.mkdir(parents=True, exist_ok=True)
    tones = [tone(300 + 200 * number) for number in range(seconds)]
    soundfile.write(folder / name, np.concatenate(tones), RATE)


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
        talk(folder)
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
    "language in the name": ({"talk.de.srt": SRT, "talk.en.srt": SRT}, ["t0", "t1"], []),
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
    talk(tmp_path)
    path = content({"m.csv": header + header}, tmp_path) / "m.csv"
    with pytest.raises(ValueError, match=message):
        prepared(path, tmp_path)
