import errno
import json
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from effasr.data.config import DataConfig
from effasr.data.filters.config import FilterConfig
from effasr.data.index import corpus_cache
from effasr.data.index.corpus import Corpus
from effasr.data.index.corpus_cache import (
    CorpusCache,
    Damaged,
    map_columns,
    remove_unused,
    write_columns,
)
from effasr.data.index.index_reader import build_table
from effasr.data.manifest.prepare import prepare
from effasr.data.tokenizer import SentencePieceTokenizer, train_tokenizer


def load(manifest, tokenizer, folder, notes, **options):
    config = DataConfig(**({"frame_budget": 60} | options))
    cache = CorpusCache(folder, notes.append, jobs=1, least_bytes=0)
    return Corpus.load([manifest], tokenizer, config, read=cache)


def was_read(notes):
    """Whether the last corpus was read, and not found."""
    assert notes
    return notes[-1].startswith("read ")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def test_what_was_kept_is_what_is_read(nemo, tokenizer, folder, check_same):
    manifest = nemo(12)
    (manifest.parent / "audio/u2.wav").unlink()
    (manifest.parent / "audio/u3.wav").write_bytes(b"no audio")
    options = {"min_duration": 0.6, "max_duration": 1.0, "token_budget": 60}
    notes = []
    plain = load(manifest, tokenizer, None, notes, **options)
    assert {drop.reason for drop in plain.dropped} > {"missing_audio", "too_short", "too_long"}
    for expected in (True, False, False):
        selected = load(manifest, tokenizer, folder, notes, **options)
        assert was_read(notes) is expected
        check_same(plain, selected)
        for index in range(len(plain)):
            assert selected.audio(index) == plain.audio(index)
            check_same(selected.example(index), plain.example(index))
    assert [path.suffix for path in sorted(folder.iterdir())] == [".corpus", ".lock"]


def test_budgets_and_filters_of_the_whole_share_what_was_read(nemo, tokenizer, folder, check_same):
    """All that is decided when everything is known needs no other reading."""
    manifest, notes = nemo(12), []
    load(manifest, tokenizer, folder, notes, frame_budget=8000)
    anything = FilterConfig(max_dropped=1.0, rate_deviations=0.5)
    options = [
        {"frame_budget": 600},
        {"frame_budget": 9000, "max_sequences": 7},
        {"frame_budget": 9000, "token_budget": 11, "filters": anything},
        {"frame_budget": 9000, "filters": anything},
    ]
    for item in options:
        selected = load(manifest, tokenizer, folder, notes, **item)
        assert not was_read(notes), item
        check_same(load(manifest, tokenizer, None, [], **item), selected)


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ({"frame_budget": 7}, {}),
        ({"language": "de"}, {}),
        ({"min_duration": 0.6}, {}),
        ({"max_duration": 0.8}, {}),
        ({"speed_perturbation": (0.9, 1.0)}, {}),
        ({"filters": FilterConfig(max_tokens_per_second=6.0, max_dropped=1.0)}, {}),
        ({"filters": FilterConfig(max_characters_per_second=9.0, max_dropped=1.0)}, {}),
        ({"filters": FilterConfig(languages=("en", "de"))}, {}),
        ({"filters": FilterConfig(characters="a-rt-z ", max_dropped=1.0)}, {}),
        ({}, {"max_frames": 12}),
        ({}, {"max_positions": 9}),
        ({}, {"ctc": False}),
    ],
    ids=str,
)
def test_every_limit_counts(nemo, tokenizer, folder, options, limits, check_same):
    manifest, notes = nemo(7), []
    load(manifest, tokenizer, folder, notes)
    config = DataConfig(**{"frame_budget": 60, "filters": FilterConfig(max_dropped=1.0)} | options)
    cache = CorpusCache(folder, notes.append, jobs=1, least_bytes=0)
    selected = Corpus.load([manifest], tokenizer, config, read=cache, **limits)
    assert was_read(notes)
    check_same(Corpus.load([manifest], tokenizer, config, **limits), selected)


def test_the_manifest_counts_by_its_content(nemo, tokenizer, folder):
    manifest, notes = nemo(7), []
    first = load(manifest, tokenizer, folder, notes)
    state, content = manifest.stat(), manifest.read_text()
    changed = content.replace('"one two"', '"two one"')
    assert changed != content
    assert len(changed) == len(content)
    manifest.write_text(changed)
    # Neither size nor age tell that.
    os.utime(manifest, ns=(state.st_atime_ns, state.st_mtime_ns))
    second = load(manifest, tokenizer, folder, notes)
    assert was_read(notes)
    assert second.fingerprint != first.fingerprint
    manifest.write_text(content)
    assert load(manifest, tokenizer, folder, notes).fingerprint == first.fingerprint
    assert not was_read(notes)
    # Its relative paths now lead elsewhere.
    shutil.copytree(manifest.parent, moved := manifest.parent.with_name("moved"))
    assert load(moved / manifest.name, tokenizer, folder, notes).audio(0) != first.audio(0)
    assert was_read(notes)


def test_the_tokenizer_counts_by_its_content(nemo, tokenizer, folder, tmp_path):
    manifest, notes = nemo(7), []
    load(manifest, tokenizer, folder, notes)
    texts = ["zero one two three four five six seven eight nine"] * 20
    other = train_tokenizer({"en": texts}, tmp_path / "other", vocab_size=30, model_type="bpe")
    load(manifest, other, folder, notes)
    assert was_read(notes)
    tokenizer.save(tmp_path / "copy")
    load(manifest, SentencePieceTokenizer.load(tmp_path / "copy"), folder, notes)
    assert not was_read(notes)


@pytest.mark.parametrize("name", ["installed_version", "_code"])
def test_the_program_counts(nemo, tokenizer, folder, monkeypatch, name):
    manifest, notes = nemo(3), []
    load(manifest, tokenizer, folder, notes)
    monkeypatch.setattr(corpus_cache, name, lambda *_: "another")
    load(manifest, tokenizer, folder, notes)
    assert was_read(notes)


def test_order_and_sources_of_manifests_count(nemo, tokenizer, folder, tmp_path, check_same):
    first = nemo(3)
    shutil.copytree(first.parent, tmp_path / "second")
    second, limits = tmp_path / "second" / first.name, DataConfig(frame_budget=60).limits()
    notes = []
    cache = CorpusCache(folder, notes.append, jobs=1, least_bytes=0)
    for paths, sources in (
        ([first, second], [0, 0]),
        ([second, first], [0, 0]),
        ([first, second], [0, 1]),
        ([first], [0]),
    ):
        table = cache(paths, tokenizer, limits, "en", sources)
        assert was_read(notes)
        check_same(build_table(paths, tokenizer, limits, "en", sources), table)


def test_audio_that_has_changed_is_looked_at_again(nemo, tokenizer, folder):
    manifest, notes = nemo(7), []
    audio = manifest.parent / "audio"
    (audio / "u2.wav").rename(audio / "away")
    assert len(load(manifest, tokenizer, folder, notes)) == 6
    (audio / "away").rename(audio / "u2.wav")
    assert len(load(manifest, tokenizer, folder, notes)) == 7
    assert was_read(notes)
    shutil.copyfile(audio / "u1.wav", audio / "u6.wav")
    assert len(load(manifest, tokenizer, folder, notes)) == 6
    assert was_read(notes)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data + b"\0",
        lambda data: b"",
        lambda data: b"{}" + data[2:],
        # A column: `test_every_byte_counts` has more places.
        lambda data: data[:-40] + bytes([data[-40] ^ 1]) + data[-39:],
    ],
    ids=["half", "longer", "empty", "header", "last column"],
)
def test_a_damaged_file_is_made_anew(nemo, tokenizer, folder, caplog, damage, check_same):
    manifest, notes = nemo(7), []
    plain = load(manifest, tokenizer, folder, notes)
    (file,) = folder.glob("*.corpus")
    whole = file.read_bytes()
    # Not in place: those who have mapped it keep what they have.
    file.unlink()
    file.write_bytes(damage(whole))
    with caplog.at_level(logging.WARNING):
        check_same(plain, load(manifest, tokenizer, folder, notes))
    assert was_read(notes)
    assert f"{file}" in caplog.text
    assert "the cache file is built again" in caplog.text
    assert file.read_bytes() == whole


def test_prepared_folders_and_odd_paths_are_kept(nemo, tokenizer, folder, tmp_path, check_same):
    prepare(nemo(7), out := tmp_path / "out")
    odd = nemo(7)
    # No file can have this name, so that its audio is missing.
    odd.write_text(odd.read_text().replace("u2.wav", r"u\u0000.wav"))
    for source, missing in ((out, []), (odd, ["missing_audio"])):
        plain = load(source, tokenizer, None, notes := [])
        assert [drop.reason for drop in plain.dropped] == missing
        for _ in range(2):
            check_same(plain, load(source, tokenizer, folder, notes))
        assert not was_read(notes)


def test_small_and_unknown_sources_are_read_every_time(nemo, tokenizer, folder):
    manifest, notes = nemo(3), []
    config = DataConfig(frame_budget=60)
    Corpus.load([manifest], tokenizer, config, read=CorpusCache(folder, notes.append))
    for index in range(3):
        (manifest.parent / f"audio/u{index}.txt").write_text("one")
    load(manifest.parent / "audio", tokenizer, folder, notes)
    assert notes == []
    assert not folder.exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_want_of_room_is_said(nemo, tokenizer, folder, monkeypatch, code):
    def full(*arguments):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(corpus_cache, "write_columns", full)
    message = r"`cache`: .*/cache must have room for .* set data\.cache"
    with pytest.raises(ValueError, match=message):
        load(nemo(3), tokenizer, folder, [])
    assert not list(folder.glob("*.corpus*"))


def test_where_nothing_may_be_written_nothing_is_kept(nemo, tokenizer, folder, monkeypatch, caplog):
    def refuse(*arguments, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    manifest = nemo(3)
    monkeypatch.setattr(corpus_cache, "building", refuse)
    assert len(load(manifest, tokenizer, folder, [])) == 3
    assert "cannot be written to" in caplog.text


def test_a_manifest_that_changes_while_it_is_read(nemo, tokenizer, folder, monkeypatch):
    manifest = nemo(3)

    def change(*arguments, **options):
        table = build_table(*arguments, **options)
        row = json.loads(manifest.read_text().splitlines()[0])
        with manifest.open("a") as file:
            file.write(json.dumps(row | {"id": "more"}) + "\n")
        return table

    monkeypatch.setattr(corpus_cache, "build_table", change)
    with pytest.raises(ValueError, match="must not change while it is read, but did"):
        load(manifest, tokenizer, folder, [])
    assert not list(folder.glob("*.corpus"))


def test_a_long_reading_says_how_far_it_is(nemo, tokenizer, folder, monkeypatch):
    monkeypatch.setattr(corpus_cache, "_NOTE_EVERY_S", 0.0)
    notes = []
    load(nemo(3), tokenizer, None, notes)
    assert len(notes) == 1
    assert notes[0].startswith("reading manifests: 3 utterances, ")


def test_old_files_of_the_same_manifests_are_removed_unless_they_are_used(nemo, tokenizer, folder):
    manifest, notes = nemo(3), []
    used = load(manifest, tokenizer, folder, notes)
    (first,) = folder.glob("*.corpus")

    def names():
        return {file.name for file in folder.glob("*.corpus")}

    for step in range(1, 6):
        load(manifest, tokenizer, folder, notes, max_duration=10.0 + step)
    assert len(names()) == 4
    assert first.name in names()
    assert used.name(0) == "u0"
    del used
    load(manifest, tokenizer, folder, notes, max_duration=20.0)
    assert len(names()) == 3
    assert first.name not in names()
    # Those of another manifest are another's.
    load(Path(shutil.copy(manifest, manifest.with_name("b.jsonl"))), tokenizer, folder, notes)
    assert len(names()) == 4


def test_a_clock_that_was_set_back_removes_older_files_and_not_the_new_one(nemo, tokenizer, folder):
    manifest, notes = nemo(3), []
    for step in range(3):
        load(manifest, tokenizer, folder, notes, max_duration=10.0 + step)
    for file in folder.glob("*.corpus"):
        # In the future, for what is written now.
        os.utime(file, (4e9, 4e9))
    for _ in range(2):
        assert load(manifest, tokenizer, folder, notes, max_duration=20.0).name(2) == "u2"
    assert not was_read(notes)
    assert len(list(folder.glob("*.corpus"))) == 3


COLUMNS = {
    "bytes": np.arange(5000, dtype=np.uint8),
    "none": np.zeros(0, np.float64),
    "numbers": np.array([-1, 7, 2**40], np.int64),
    "truth": np.array([True, False]),
    "last": np.zeros(0, np.int32),
}


def test_columns_come_back(tmp_path):
    sizes = []
    size = write_columns(tmp_path / "file", "key", COLUMNS, sizes.append)
    assert size == (tmp_path / "file").stat().st_size
    assert sizes == sorted(sizes)
    mapped = map_columns(tmp_path / "file", "key")
    assert list(mapped) == list(COLUMNS)
    for name, values in COLUMNS.items():
        np.testing.assert_array_equal(mapped[name], values)
        assert mapped[name].dtype == values.dtype
    with pytest.raises(ValueError, match="read-only"):
        mapped["numbers"][0] = 0
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(Damaged, match="its format or key is not the expected one"):
        map_columns(tmp_path / "file", "other")


@pytest.mark.parametrize("place", [40, 16_384, 20_000, 24_599, 28_672])
def test_every_byte_counts(tmp_path, place):
    write_columns(path := tmp_path / "file", "key", COLUMNS)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged):
        map_columns(path, "key")


def test_who_has_mapped_a_file_keeps_it(tmp_path):
    write_columns(path := tmp_path / "file", "key", COLUMNS)
    mapped = map_columns(path, "key")
    write_columns(path, "key", COLUMNS | {"numbers": np.zeros(3, np.int64)})
    assert mapped["numbers"][2] == 2**40
    newer = map_columns(path, "key")["numbers"]
    assert not remove_unused(path)
    assert path.exists()
    del newer
    assert remove_unused(path)
    assert not path.exists()
    assert not remove_unused(path)
