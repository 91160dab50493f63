"""Corpora in tar files and tables are those of plain files."""

import bz2
import gzip
import io
import json
import os
import re
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import soundfile
import torch
from lhotse import CutSet, MonoCut, Recording
from pyarrow import parquet as pq

from effasr.data.audio import embedded
from effasr.data.audio.table_rows import TableRow
from effasr.data.audio.waveform import AudioError, AudioSegment, load_audio, read_audio
from effasr.data.filters.config import Limits
from effasr.data.index.corpus_cache import CorpusCache
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


@pytest.mark.representative(
    source=["nemo sharded", "webdataset", "parquet", "saved to disk", "shar"]
)
def test_batches_are_those_of_plain_files(source, tokenizer, tmp_path):
    path, manifest = source
    plain = batches(manifest, tokenizer)
    assert_equal(batches(path, tokenizer), plain)
    resumed = {"first": 1, "workers": int(path.name == "source")}
    assert_equal(batches(path, tokenizer, **resumed), batches(manifest, tokenizer, first=1))
    for name, shards in (("prepared", None), ("sharded", 3)):
        report = prepare(path, tmp_path / name, shards=shards)
        assert (report.kept.utterances, report.dropped.utterances) == (20, 0)
        assert_equal(batches(tmp_path / name, tokenizer), plain)
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


def test_the_id_of_a_sentence_that_several_read(tmp_path, pack):
    """As in FLEURS: an id that comes twice takes no recording away."""
    with tarfile.open(path := pack("a.wav", "b.wav"), "a") as file:
        for name in "ab":
            add(file, f"{name}.json", b'{"text": "one", "id": 7}')
    assert outcome(path, tmp_path) == (["7", "7-2"], [])
    audio = [{"bytes": (tmp_path / "tone.wav").read_bytes(), "path": name} for name in "ab"]
    pq.write_table(
        pa.table({"audio": audio, "text": ["one"] * 2, "id": [7] * 2}), tmp_path / "a.parquet"
    )
    assert outcome(tmp_path / "a.parquet", tmp_path) == (["7", "7-2"], [])


def test_parts_of_recordings_of_nemo(nemo, tmp_path):
    """The second part of a recording is named -sub1, and is not in the tar file."""
    (tmp_path / "set").mkdir()
    manifest = nemo_tarred(nemo(4), tmp_path / "set") / "tarred_audio_manifest.json"
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


def test_large_row_groups_are_said(nemo, tmp_path, monkeypatch, caplog):
    source = make_source("parquet", nemo(12), tmp_path / "set")
    prepare(source, tmp_path / "out")
    assert not caplog.records
    monkeypatch.setattr("effasr.data.manifest.datasets._LARGE_GROUP", 1 << 10)
    prepare(source, tmp_path / "again")
    (record,) = caplog.records
    assert f"effasr prepare {source} OUT --shards 64" in record.getMessage()


def test_rows_of_a_table(tmp_path):
    """Nulls, other types and other names of columns; 44.1 kHz stereo of MP3."""
    wav = write_tone(tmp_path / "a.wav", 0.5).read_bytes()
    mp3 = write_tone(tmp_path / "b.mp3", 0.5, rate=44_100, channels=2).read_bytes()
    contents = [wav, wav, None, b"", b"no audio" * 99, mp3, None]
    paths = [None, "clips/x.wav", None, None, None, "b.mp3", "a.wav"]
    table = pa.table(
        {
            "clip": pa.array(
                [
                    {"bytes": content, "path": path}
                    for content, path in zip(contents, paths, strict=True)
                ],
                pa.struct([("bytes", pa.large_binary()), ("path", pa.large_string())]),
            ),
            "transcript": pa.array(["one", None, *["two"] * 5], pa.large_string()),
            "speaker_id": [7] * 7,
            "begin_time": [*[99.0] * 6, None],
            "gender": ["x"] * 7,
        }
    )
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    report = prepare(tmp_path / "a.parquet", tmp_path / "out")
    cuts = list(read(tmp_path / "out"))
    assert [cut.id for cut in cuts] == ["a-0", "b", "a"]
    assert {cut.supervisions[0].speaker for cut in cuts} == {"7"}
    assert_listed(
        [line["details"] for line in read_lines(tmp_path / "out/dropped.jsonl")],
        [
            "the text is empty",
            "row 2: `clip` is empty",
            "the cell is empty",
            "not a readable audio file",
        ],
    )
    assert report.unread_fields == {"begin_time": 5, "gender": 7}
    for cut, name in ((cuts[0], "a.wav"), (cuts[1], "b.mp3"), (cuts[2], "a.wav")):
        assert np.array_equal(load_audio(cut), read_audio(tmp_path / name, duration=cut.duration))


def save(folder, table, name="data.arrow"):
    folder.mkdir()
    with pa.ipc.new_stream(folder / name, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    (folder / "dataset_info.json").write_text("{}")


def test_tables_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wav = write_tone(tmp_path / "a.wav", 0.5).read_bytes()
    audio, texts = pa.array([{"bytes": wav}] * 3), ["one", "two", "three"]
    good = pa.table({"audio": audio, "text": texts})
    save(Path("saved"), good)
    os.truncate("saved/data.arrow", os.path.getsize("saved/data.arrow") * 2 // 3)
    names, details = outcome("saved", tmp_path)
    assert names == ["data-0", "data-1"][: len(names)]
    assert names
    assert_listed(details, [r"data\.arrow: cannot be read to its end"])
    Path("splits/test").mkdir(parents=True)
    Path("splits/test/state.json").write_text("{}")
    Path("splits/dataset_dict.json").write_text("{}")
    for name in ("train-0", "test-0"):
        pq.write_table(good, f"{name}.parquet")
    Path("empty").mkdir()
    tables = {
        "two.parquet": {"audio": audio, "text": texts, "raw_text": ["one", "two", "Three"]},
        "none.parquet": {"audio": audio, "words": texts},
        "mute.parquet": {"text": texts},
        "both.parquet": {"a": audio, "b": audio, "text": texts},
    }
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), Path("empty") / name)
    Path("empty/cut.parquet").write_bytes(Path("train-0.parquet").read_bytes()[:-9])
    for source, options, message in (
        (".", {}, r"several splits, test, train: name one, such as 'test\*\.parquet'"),
        ("splits", {}, "several splits, test: name one, such as splits/test"),
        ("empty/two.parquet", {}, r"row 2: has texts that differ, 'text' and 'raw_text'"),
        ("empty/none.parquet", {}, "no text column: name one of audio, words by `--text-column`"),
        ("empty/two.parquet", {"text_column": "x"}, "no text column 'x': name one of audio, text"),
        ("empty/mute.parquet", {}, "has no audio"),
        ("empty/both.parquet", {}, "several columns may be the audio, a, b"),
        ("empty/cut.parquet", {}, r"cut\.parquet: cannot be read as a table"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            prepare(source, "refused", **options)
        assert "\n" not in str(caught.value)
    assert prepare("empty/none.parquet", "named", text_column="words").kept.utterances == 3
    assert prepare("train-*.parquet", "pattern").kept.utterances == 3


@pytest.mark.parametrize("kind", [TableRow, embedded.TarMember])
def test_places_in_files(kind):
    place = kind("a [1]/x.tar", 512, 3)
    assert embedded.parse(place.path) is None
    assert embedded.parse(str(place)) == place
    assert embedded.from_numbers(place.path, *embedded.to_numbers(place)) == place
    with pytest.raises(AudioError, match="No such file") as caught:
        load_audio(AudioSegment(place, 0.0, 1.0, (0,)))
    assert caught.value.problem == "missing_audio"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files it opens
def test_shards_are_read_by_lhotse_as_well(nemo, tmp_path):
    prepare(manifest := nemo(7), tmp_path / "out", shards=3, jobs=2)
    theirs = CutSet.from_shar(in_dir=tmp_path / "out/shards")
    for ours, cut, original in zip(read(tmp_path / "out"), theirs, read(manifest), strict=True):
        assert ours.id == cut.id
        assert cut.supervisions[0].text == original.supervisions[0].text
        assert np.array_equal(cut.load_audio(), original.load_audio())


def test_shards_of_parts_and_formats(tmp_path):
    """Whole files that are compressed are copied; parts have the bits and channels of theirs."""
    stereo = np.random.default_rng(0).normal(0, 0.1, (24_000, 2))
    for name, subtype in (("a.wav", "PCM_16"), ("b.wav", "PCM_24"), ("c.flac", "PCM_16")):
        soundfile.write(tmp_path / name, stereo, 24_000, subtype)
    write_tone(tmp_path / "d.mp3", 0.5, rate=44_100, channels=2)
    rows = [
        {"audio_filepath": "a.wav", "offset": 0.25, "duration": 0.5, "channel": 1},
        {"audio_filepath": "b.wav", "offset": 0.1, "duration": 0.7},
        {"audio_filepath": "c.flac"},
        {"audio_filepath": "d.mp3"},
    ]
    lines = [row | {"id": f"x/{number}.y", "text": "one"} for number, row in enumerate(rows)]
    manifest = write_lines(tmp_path / "train.jsonl", lines)
    prepare(manifest, tmp_path / "plain")
    (tmp_path / "out/.shards.partial").mkdir(parents=True)  # of a call that was killed
    prepare(manifest, tmp_path / "out", shards=9)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("dropped.jsonl", "report.json", "shards")
    ]
    suffixes = []
    for path in sorted((tmp_path / "out/shards").glob("*.tar")):
        with tarfile.open(path) as file:
            suffixes += [name.rpartition(".")[2] for name in file.getnames()]
    assert suffixes == ["flac", "json", "flac", "json", "flac", "json", "mp3", "json"]
    for name in [row["audio_filepath"] for row in rows]:
        (tmp_path / name).rename(tmp_path / f"moved-{name}")
    kept = list(read(tmp_path / "out"))
    for name in [row["audio_filepath"] for row in rows]:
        (tmp_path / f"moved-{name}").rename(tmp_path / name)
    for cut, original in zip(kept, read(tmp_path / "plain"), strict=True):
        assert cut.id == original.id
        assert np.array_equal(load_audio(cut), load_audio(original))
    for shards, out in ((3, "out"), (None, "out"), (3, "plain")):
        with pytest.raises(ValueError, match="is there already, from another `effasr prepare`"):
            prepare(manifest, tmp_path / out, shards=shards)


@pytest.mark.parametrize("name", ["webdataset", "parquet"])
def test_places_are_cached_until_a_file_changes(nemo, tokenizer, tmp_path, name):
    path = make_source(name, nemo(7), tmp_path / "source")
    arguments = ([path], tokenizer, Limits(), "en", [0])
    notes = []
    cache = CorpusCache(tmp_path / "cache", notes.append, jobs=1, least_bytes=1)
    first = cache(*arguments)
    assert not any(note.startswith("7 utterances, cached") for note in notes)
    again = cache(*arguments)
    assert notes[-1].startswith("7 utterances, cached in")
    for row in range(7):
        assert np.array_equal(load_audio(again.audio[row]), load_audio(first.audio[row]))
    os.utime(min(path.iterdir()), ns=(0, 0))
    notes.clear()
    assert len(cache(*arguments)) == 7
    assert not any(note.startswith("7 utterances, cached") for note in notes)


@pytest.fixture
def shar(tmp_path, nemo):
    """Seven utterances in shards of three."""
    return make_source("shar", nemo(7), tmp_path / "shar")


def test_each_channel_of_a_call_is_a_file_of_its_own(tmp_path, nemo):
    levels = np.float32([0.25, -0.5])
    soundfile.write(
        tmp_path / "call.wav", levels * (1 + 0.2 * np.sin(np.arange(8000)[:, None] / 9)), 16_000
    )
    call = Recording.from_file(tmp_path / "call.wav")
    spoken = read(nemo(2))
    cuts = [
        MonoCut(cut.id, 0.0, 0.5, side, cut.supervisions, recording=call)
        for side, cut in enumerate(spoken)
    ]
    (tmp_path / "shar").mkdir()
    CutSet.from_cuts(cuts).to_shar(str(tmp_path / "shar"), fields={"recording": "flac"})
    result = read(tmp_path / "shar")
    assert [float(load_audio(cut).mean()) for cut in result] == pytest.approx(levels, abs=1e-3)
    assert prepare(tmp_path / "shar", tmp_path / "prepared").kept.utterances == 2


def test_audio_that_is_gone_is_named(shar):
    result = read(shar)
    tar = shar / "recording.000001.tar"
    tar.write_bytes(tar.read_bytes()[:2000])
    with pytest.raises(AudioError, match=r"recording\.000001\.tar\[\d+:\d+\]: the tar file ends"):
        load_audio(result[4])
    tar.unlink()
    with pytest.raises(AudioError, match="No such file") as caught:
        load_audio(result[4])
    assert caught.value.problem == "missing_audio"


def test_shards_that_do_not_fit_together(shar):
    path = shar / "recording.000001.tar"
    for content, message in (
        (bytes(10_240), r"cuts\.000001\.jsonl\.gz:1: .* has no recording of cut"),
        (b"no tar file" * 100, r"recording\.000001\.tar: the audio of .* cannot be read"),
        (None, r"recording\.000001\.tar: .* No such file"),
    ):
        path.write_bytes(content) if content else path.unlink()
        with pytest.raises(ValueError, match=message):
            read(shar)
