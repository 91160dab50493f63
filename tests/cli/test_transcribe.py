"""What `effasr transcribe` takes, and where it writes."""

import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from contextlib import suppress

import pytest

from effasr.transcription.results import Segment, Transcription


@pytest.fixture
def folder(workplace, tmp_path):
    """in/a.wav, in/deep/b.wav, in/deep/notes.txt, in/deep/.hidden.wav."""
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for name in ("a.wav", "deep/b.WAV", "deep/.hidden.wav"):
        shutil.copy(workplace.wav, tmp_path / "in" / name)
    (tmp_path / "in" / "deep" / "notes.txt").write_text("no recording")
    return tmp_path / "in"


def names(outcome) -> list[str]:
    return [line.split("\t")[0] for line in outcome.out.splitlines()]


def test_folders_and_patterns(effasr, workplace, folder, monkeypatch):
    command = ("transcribe", "--run", workplace.run)
    a, b = str(folder / "a.wav"), str(folder / "deep" / "b.WAV")
    for arguments, expected in (
        ([folder], [a, b]),
        ([f"{folder}/*.wav"], [a]),
        ([f"{folder}/**/*.[wW]*"], [a, b]),
        ([f"{folder}/*/?.WAV", a, folder], [b, a]),
        ([f"{folder}/deep/.h*"], [str(folder / "deep" / ".hidden.wav")]),
    ):
        done = effasr(*command, *arguments)
        assert done.code == 0, done.err
        assert names(done) == expected
    monkeypatch.chdir(folder)
    assert names(effasr(*command, "**/*.WAV", "a.wav")) == ["deep/b.WAV", "a.wav"]
    failed = effasr(*command, "*.mp3", "a.wav")
    assert failed.code == 1
    assert names(failed) == ["a.wav"]
    assert failed.err.startswith("effasr transcribe: *.mp3: no file matches.\n")


def test_results_are_in_folders_as_the_recordings(effasr, workplace, folder, tmp_path):
    out = tmp_path / "out"
    command = ("transcribe", "--run", workplace.run, "--output", out, "--format", "srt")
    done = effasr(*command, folder)
    assert (done.code, done.out) == (0, "")
    written = sorted(str(path.relative_to(out)) for path in out.rglob("*.*"))
    assert written == ["a.srt", "deep/b.srt"]
    shutil.copy(folder / "a.wav", folder / "a.flac")
    assert effasr(*command, folder).code == 0
    written = sorted(str(path.relative_to(out)) for path in out.rglob("*.*"))
    assert written == ["a.flac.srt", "a.srt", "a.wav.srt", "deep/b.srt"]


def test_subtitles_and_cues_in_json_are_the_same(effasr, workplace, monkeypatch):
    """Also of a segment of 20 s without times of words, and in lines of any width."""
    text = "open the curtain in the kitchen and send the key to thomas and play the news " * 4

    def results(self, requests, *_):
        for request in requests:
            segment = Segment(0.0, 20.0, text.strip(), words=None)
            yield Transcription(request.id, 20.0, text, (segment,))

    monkeypatch.setattr("effasr.transcription.recognizer.Recognizer.results", results)
    command = ("transcribe", "--run", workplace.run, workplace.wav, "--line-width", "30")
    row = json.loads(effasr(*command, "--json", "--cues").out)
    assert [segment["text"] for segment in row["segments"]] == [text.strip()]
    assert " ".join(line for cue in row["cues"] for line in cue["lines"]) == text.strip()
    assert max(len(line) for cue in row["cues"] for line in cue["lines"]) <= 30
    assert all(cue["estimated"] and cue["end"] - cue["start"] < 7 for cue in row["cues"])
    blocks = effasr(*command, "--format", "srt").out.removesuffix("\n").split("\n\n")
    assert [block.split("\n")[2:] for block in blocks] == [cue["lines"] for cue in row["cues"]]


def test_subtitles_have_the_times_of_words(effasr, workplace):
    """Without --words, where the model can give them; JSON says where it cannot."""
    command = ("transcribe", "--run", workplace.run, workplace.wav, "--json", "--cues")
    for method in ("ctc", "attention"):
        row = json.loads(effasr(*command, "--method", method).out)
        for segment in row["segments"]:
            assert bool(segment["text"]) == bool(segment.get("words"))
        assert not any("estimated" in cue for cue in row["cues"])


def test_going_on_where_it_was_left(effasr, workplace, folder, tmp_path):
    out = tmp_path / "out"
    command = ("transcribe", "--run", workplace.run, "--output", out, folder)
    assert effasr(*command[:-1], folder / "a.wav").code == 0
    (out / "a.txt").write_text("corrected by hand\n")
    again = effasr(*command, "--continue")
    assert again.code == 0
    assert again.err.startswith(
        "effasr transcribe: skipping 1 of 2 recordings that have an output file\n"
    )
    assert (out / "a.txt").read_text() == "corrected by hand\n"
    assert (out / "deep" / "b.txt").is_file()
    assert effasr(*command, "--continue").code == 0
    # Of another format there is none.
    assert "0 of 2" in effasr(*command, "--continue", "--json").err
    assert effasr(*command).code == 0
    assert (out / "a.txt").read_text() != "corrected by hand\n"


def test_a_manifest(effasr, workplace, manifest, tmp_path):
    path = manifest(
        {"id": "whole", "lang": None},
        {"id": "part/1", "offset": 0.1, "duration": 0.05},
        {"id": "gone", "audio_filepath": "gone.wav"},
        {"id": "french", "lang": "fr"},
    )
    command = ("transcribe", "--run", workplace.run, "--manifest", path)
    done = effasr(*command, "--json")
    assert done.code == 1
    rows = {row["id"]: row for row in map(json.loads, done.out.splitlines())}
    assert rows.keys() == {"whole", "part/1", "gone", "french"}
    assert rows["part/1"]["duration"] == 0.05
    assert rows["whole"]["duration"] > 0.1
    assert "there is no such file" in rows["gone"]["error"]
    assert "must be one of en, but is 'fr'" in rows["french"]["error"]
    assert effasr(*command, "--output", tmp_path / "out").code == 1
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"whole.txt", "part_1.txt"}
    cuts = effasr("transcribe", "--run", workplace.run, "--manifest", workplace.folder / "dev")
    assert cuts.code == 0
    assert names(cuts) == [f"dev-{number}" for number in range(4)]
    files = [workplace.folder / f"dev-{number}.wav" for number in range(4)]
    plain = effasr("transcribe", "--run", workplace.run, *files)
    texts = [[line.split("\t")[1] for line in item.out.splitlines()] for item in (cuts, plain)]
    assert texts[0] == texts[1]


def _at_a_terminal(arguments: list[str], *, out_too: bool) -> tuple[bytes, bytes]:
    """What a command writes to standard output where that is no terminal, and to the terminal."""
    control, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "effasr.cli", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=terminal if out_too else subprocess.PIPE,
        stderr=terminal,
        env=os.environ | {"TERM": "xterm", "OMP_NUM_THREADS": "1"},
    )
    os.close(terminal)
    visible = b""
    # Linux's way of saying that the other end is closed is an error.
    with suppress(OSError):
        while data := os.read(control, 4096):
            visible += data
    os.close(control)
    out, _ = process.communicate(timeout=240)
    return out or b"", visible


@pytest.mark.parametrize("out_too", [False, True])
@pytest.mark.representative(out_too=True)
def test_a_terminal_shows_how_far_it_is(workplace, tmp_path, out_too):
    files = [str(workplace.wav), str(tmp_path / "gone.wav")]
    out, visible = _at_a_terminal(
        ["transcribe", "--run", str(workplace.run), *files], out_too=out_too
    )
    assert b"/2 recordings" in re.sub(rb"\x1b\[[0-9;]*m", b"", visible)
    line = str(workplace.wav).encode() + b"\t"
    results = visible if out_too else out
    assert results.count(line) == 1
    if not out_too:
        assert b"\x1b" not in out
        assert line not in visible
    # Neither a result nor an error is written behind the progress.
    for item in (line, b"effasr transcribe: ") if out_too else (b"effasr transcribe: ",):
        before = visible[: visible.index(item)]
        assert before.endswith((b"\x1b[2K", b"\x1b[K", b"\x1b[?25h", b"\n", b"\r")), before[-40:]
