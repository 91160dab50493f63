"""Corpora in tar files and tables are those of plain files."""

import bz2
import gzip
import io
import os
import re
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from effasr.data.audio.waveform import load_audio
from effasr.data.manifest.prepare import prepare
from effasr.data.manifest.reader import read
from tests.support.corpora import make_loader, read_lines, take_steps, write_lines, write_tone
from tests.support.sources import SOURCES, add, make_source, nemo_tarred


@pytest.fixture(params=SOURCES)
def source(request, nemo, tmp_path):
    manifest = nemo(20)
    return make_source(request.param, manifest, tmp_path / "source"), manifest


def batches(path, tokenizer, first=0, **options):
    steps = take_steps(
        make_loader(path, tokenizer, seed=4, micro_batches=1, **options), 2, step=first
    )
    return [
        (batch.audio.values, batch.tokens.values, batch.targets)
        for step in steps
        for batch in step.batches
    ]


def assert_equal(first, second):
    assert len(first) == len(second) > 0
    for a, b in zip(first, second, strict=True):
        assert all(map(torch.equal, a, b))


def test_batches_are_those_of_plain_files(source, tokenizer, tmp_path):
    path, manifest = source
    plain = batches(manifest, tokenizer)
    assert_equal(batches(path, tokenizer), plain)
    assert_equal(batches(path, tokenizer, first=1, workers=1), batches(manifest, tokenizer, 1))
    report = prepare(path, tmp_path / "prepared", tokenizer=tokenizer)
    assert (report.kept.utterances, report.dropped.utterances) == (20, 0)
    assert_equal(batches(tmp_path / "prepared", tokenizer), plain)
    names = [cut.id.rpartition("/")[2] for cut in read(path)]
    assert names == [cut.id for cut in read(manifest)]


def outcome(source, tmp_path):
    """Return the kept names, and what is said of each dropped utterance."""
    report = prepare(source, tmp_path / "out")
    lines = read_lines(tmp_path / "out/dropped.jsonl")
    kept = read(tmp_path / "out") if report.kept.utterances else []
    return [cut.id for cut in kept], [line["details"] for line in lines]


def assert_listed(details, patterns):
    assert len(details) == len(patterns), details
    for text, pattern in zip(details, patterns, strict=True):
        assert re.search(pattern, text)


PAIR = ("a.wav", "a.txt")
TWO = (*PAIR, "b.wav", "b.txt")


@pytest.fixture
def pack(tmp_path):
    """Writes a tar file of members, whose suffixes say what they hold."""
    wav = write_tone(tmp_path / "tone.wav", 0.5).read_bytes()
    contents = {"wav": wav, "mp3": wav, "txt": b"one", "json": b"{", "flac": b"f" * 99}

    def write(*names, path=tmp_path / "set.tar"):
        with tarfile.open(path, "w") as file:
            for name in names:
                add(file, name, contents.get(name.rpartition(".")[2].lower(), b"x"))
        return path

    return write


@pytest.mark.parametrize(
    ("members", "kept", "dropped"),
    [
        ([*PAIR, "b.wav"], ["a"], [r"b\.wav: there is no text of its key"]),
        ([*PAIR, "b.txt"], ["a"], [r"b\.txt: there is no audio of its key"]),
        ([*PAIR, "b.txt", "b.flac"], ["a"], ["not a readable audio file"]),
        ([*PAIR, "b.wav", "b.json"], ["a"], ["b: not valid JSON"]),
        ([*PAIR, *PAIR], ["a"], ["comes twice"] * 2),
        ([*PAIR, "a.mp3"], ["a"], [r"a\.mp3: its key comes twice"]),
        (["a.1.wav", "a.1.txt", "a.2.wav", "a.2.txt"], ["a.1", "a.2"], []),
        (["x/a.wav", "x/a.txt", "y/a.wav", "y/a.txt"], ["x/a", "y/a"], []),
        (["a.audio.wav", "a.words.txt", "b.wav", "b.wav.txt"], ["a.audio", "b"], []),
        (["./._a.wav", "./a.WAV", "./a.txt", "__MACOSX/a.wav", ".DS_Store"], ["a"], []),
    ],
)
def test_every_member_is_read_or_listed(tmp_path, pack, members, kept, dropped):
    names, details = outcome(pack(*members), tmp_path)
    assert names == kept
    assert_listed(details, dropped)


def add_links(path):
    with tarfile.open(path, "a") as file:
        for name, kind in (("folder.wav", tarfile.DIRTYPE), ("c.wav", tarfile.SYMTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "a.wav"
            file.addfile(info)


def add_sparse(path):
    with tarfile.open(path, "a", format=tarfile.PAX_FORMAT) as file:
        info = tarfile.TarInfo("c.wav")
        info.size, info.pax_headers = 9, {"GNU.sparse.map": "0,9", "GNU.sparse.size": "99"}
        file.addfile(info, io.BytesIO(b"123456789"))


def damage_header(path):
    content = bytearray(path.read_bytes())
    with tarfile.open(path) as file:
        content[file.getmember("b.wav").offset + 5] ^= 0xFF
    path.write_bytes(content)


DAMAGE = {
    "links": (add_links, "ab", [r"c\.wav: is a link"]),
    "sparse": (add_sparse, "ab", [r"c\.wav: is stored with holes"]),
    "last member cut": (lambda path: os.truncate(path, 20_000), "a", ["cut short inside of it"]),
    "end cut": (lambda path: os.truncate(path, 35_840), "ab", ["ends without its end mark"]),
    "joined": (lambda path: path.write_bytes(path.read_bytes() * 2), "ab", ["joined to it"]),
    "header": (damage_header, "a", ["either damage or another tar file"]),
    "empty": (lambda path: path.write_bytes(b""), "", ["the tar file is empty"]),
    "no members": (lambda path: path.write_bytes(bytes(10_240)), "", ["there is no audio in"]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_damage_loses_is_listed(tmp_path, pack, damage):
    change, kept, details = DAMAGE[damage]
    change(path := pack(*TWO))
    names, listed = outcome(path, tmp_path)
    assert names == list(kept)
    assert_listed(listed, details)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "set.tar.gz",
            gzip.compress,
            r"compressed by gzip.*`gunzip -c .*set\.tar\.gz > .*set\.tar`",
        ),
        ("set.tar", bz2.compress, r"compressed by bzip2.*set-plain\.tar"),
        ("set.tar", lambda content: b"no tar" * 200, "cannot be read as a tar file"),
        ("{0..3}.tar", None, r"stands for 4 files, but 3 are missing, such as 1\.tar"),
        ("*-x.tar", None, r"\*-x\.tar: matches no file"),
        ("folder", None, r"several splits, test, train: name .* 'folder/test\*\.tar'"),
    ],
)
def test_refused(tmp_path, pack, monkeypatch, name, change, message):
    monkeypatch.chdir(tmp_path)
    path = pack(*PAIR)
    if change is not None:
        Path(name).write_bytes(change(path.read_bytes()))
    Path("folder").mkdir()
    for other in ("0.tar", "folder/train-0.tar", "folder/test-0.tar"):
        shutil.copy(path, other)
    with pytest.raises(ValueError, match=message) as caught:
        prepare(name, "out")
    assert "\n" not in str(caught.value)
    assert not Path("out").exists()


def test_texts_that_differ_are_chosen_by_name(tmp_path, pack):
    path = tmp_path / "set.tar"
    with tarfile.open(pack("a.wav"), "a") as file:
        fields = b'{"text": "One.", "raw_text": "one", "path": "/of/another.wav", "begin_time": 9}'
        add(file, "a.json", fields)
    with pytest.raises(ValueError, match=r"differ, 'text' and 'raw_text'.*--text-column text"):
        prepare(path, tmp_path / "out")
    prepare(path, tmp_path / "out", text_column="raw_text")
    assert [cut.supervisions[0].text for cut in read(tmp_path / "out")] == ["one"]


def test_parts_of_recordings_of_nemo(nemo, tmp_path):
    """The second part of a recording is named -sub1, and is not in the tar file."""
    (tmp_path / "set").mkdir()
    folder = nemo_tarred(nemo(4), tmp_path / "set")
    manifest = folder / "tarred_audio_manifest.json"
    rows = read_lines(manifest)
    rows[1] |= {"audio_filepath": "u0-sub1.wav", "offset": 0.3, "duration": 0.2}
    rows[0] |= {"offset": 0.0, "duration": 0.3}
    rows[3]["shard_id"] = 7
    rows.append({"audio_filepath": "gone.wav", "text": "one", "shard_id": 0})
    write_lines(manifest, rows)
    names, details = outcome(manifest, tmp_path)
    assert names == ["u0", "u0-sub1", "u2"]
    assert_listed(
        details,
        ["no tar file of shard 7", r"'gone\.wav' is not in .*audio_0", r"u1\.wav: no line names it",
         r"u3\.wav: no line names it"],
    )  # fmt: skip
    parts = [load_audio(cut) for cut in list(read(tmp_path / "out"))[:2]]
    whole = load_audio(next(iter(read(tmp_path / "corpus/train.jsonl"))))
    assert np.array_equal(np.concatenate(parts), whole)
