"""What people name and pipe: lists in any encoding, audio on standard input, names that collide."""

import codecs
import io
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from effasr.transcription.inputs.sources import Source, find, with_unique_names
from effasr.transcription.inputs.stdin import sources_on_stdin
from effasr.transcription.outputs.writers import ResultWriter
from effasr.transcription.results import Segment, Transcription

NAMES = ["a.wav", "sub dir/b*.flac", "\u0442\u0435\u0441\u0442 [1].mp3"]


def read(content):
    with tempfile.NamedTemporaryFile() as copy:
        sources = sources_on_stdin(io.BytesIO(content), copy)
        with open(copy.name, "rb") as file:
            return sources, file.read()


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\0"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be"])
def test_lists_in_usual_encodings(encoding, newline):
    content = newline.join([*NAMES, "", " ", ""]).encode(encoding)
    if encoding == "utf-16-be":
        content = codecs.BOM_UTF16_BE + content
    sources, copied = read(content)
    assert [source.audio for source in sources] == NAMES
    assert not copied


def test_a_list_without_a_mark_and_with_bytes_of_the_file_system():
    assert [item.audio for item in read("a.wav\nb.wav\n".encode("utf-16-le"))[0]] == [
        "a.wav",
        "b.wav",
    ]
    (source,), _ = read(b"caf\xe9.wav")
    assert source.audio == "caf\udce9.wav"


def test_names_in_a_list_are_neither_patterns_nor_folders(tmp_path):
    (tmp_path / "x.wav").touch()
    sources, _ = read(f"{tmp_path}/*\n{tmp_path}\n".encode())
    assert [source.audio for source in sources] == [f"{tmp_path}/*", str(tmp_path)]
    assert sources[0].problem is None
    assert "a folder in a list of files" in sources[1].problem


@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG", "MP3", "AIFF", "AU", "CAF", "W64", "NIST"])
def test_audio_is_copied_whole(form):
    file = io.BytesIO()
    file.name = "x"
    soundfile.write(file, np.sin(np.arange(48_000) / 9).astype("f4"), 16_000, format=form)
    (source,), copied = read(file.getvalue())
    assert (source.id, source.name) == ("-", "stdin")
    assert copied == file.getvalue()


def test_an_empty_input_is_refused():
    with pytest.raises(ValueError, match="is empty: name a FILE"):
        read(b"")


def test_the_command_transcribes_audio_and_lists_on_stdin(effasr, workplace, monkeypatch):
    def transcribe(content, *arguments):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        return effasr("transcribe", "--run", workplace.run, *arguments)

    expected = effasr("transcribe", "--run", workplace.run, workplace.wav).out.split("\t")[1]
    assert transcribe(Path(workplace.wav).read_bytes(), "-").out == f"-\t{expected}"
    listed = transcribe(f"{workplace.wav}\r\n".encode("utf-16"), "-")
    assert listed.out == f"{workplace.wav}\t{expected}"
    failed = transcribe(f"{workplace.folder}\n".encode(), "-")
    assert failed.code == 1
    assert "a folder in a list" in failed.err
    assert transcribe(b"", "-").code == 2


def test_recordings_of_one_name_have_their_suffixes(tmp_path):
    for name in ["x.wav", "x.mp3", "y.wav"]:
        (tmp_path / name).touch()
    unique = with_unique_names(find([str(tmp_path)]))
    assert [source.name for source in unique] == ["x.mp3", "x.wav", "y"]
    same = replace(unique[0], id="other")
    with pytest.raises(ValueError, match="must have a file of its own"):
        with_unique_names([unique[0], same])


def test_names_of_ctm_are_different(capsys):
    sources = [
        Source(id_, name, audio)
        for id_, name, audio in (
            ("a b.wav", "a b", "a b.wav"),
            ("a_b.wav", "a_b", "a_b.wav"),
            ("d/a_b.wav", "d/a_b", "d/a_b.wav"),
            ("d_a_b.wav", "d_a_b", "d_a_b.wav"),
        )
    ]
    writer = ResultWriter("ctm", None, sources)
    for source in sources:
        segment = Segment(start=0.0, end=1.0, text="hello")
        writer.write(Transcription(source.id, 1.0, "hello", (segment,)))
    recordings = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert recordings == ["a_b", "a_b.wav", "d_a_b.wav", "d_a_b"]
