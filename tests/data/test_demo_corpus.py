import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from effasr.data.demo import corpus, render
from effasr.data.demo.corpus import DemoCorpus, build
from tests.support.corpora import read_lines

SMALL: dict[str, Any] = {"utterances": 12, "seed": 1}


@pytest.fixture(scope="module")
def english(tmp_path_factory: pytest.TempPathFactory) -> DemoCorpus:
    pytest.importorskip("espeakng_loader")
    return build(tmp_path_factory.mktemp("demo") / "en", **SMALL)


@pytest.fixture(scope="module")
def multilingual(tmp_path_factory: pytest.TempPathFactory) -> DemoCorpus:
    pytest.importorskip("espeakng_loader")
    return build(tmp_path_factory.mktemp("demo") / "de", multilingual=True, **SMALL)


def contents(root: Path) -> dict[str, bytes]:
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def copy(built: DemoCorpus, to: Path) -> Path:
    return Path(shutil.copytree(built.root, to / "copy"))


@pytest.mark.parametrize("name", ["english", "multilingual"])
def test_manifest_agrees_with_the_files(name, request) -> None:
    """Speech is audible, and as long as its text."""
    built: DemoCorpus = request.getfixturevalue(name)
    for manifest in (built.train, built.dev, built.test):
        for row in read_lines(manifest):
            path = manifest.parent / row["audio_filepath"]
            info, (audio, _) = soundfile.info(path), soundfile.read(path)
            assert (info.samplerate, info.channels, info.subtype) == (16_000, 1, "PCM_16")
            assert row["duration"] == info.frames / 16_000
            assert row["pnc"] is False
            assert 10 ** (-42 / 20) < np.sqrt(np.mean(audio**2)) < 10 ** (-18 / 20)
            assert np.abs(audio).max() <= 0.951
            if row["task"] == "transcribe":
                letters = len(row["text"].replace(" ", ""))
                assert 0.03 < row["duration"] / letters < 0.2


def test_german_audio_is_transcribed_and_translated(multilingual: DemoCorpus) -> None:
    by_audio: dict[str, list[dict]] = {}
    for row in read_lines(multilingual.train):
        by_audio.setdefault(row["audio_filepath"], []).append(row)
    fields = "lang", "target_lang", "task"
    tasks = {tuple(tuple(map(row.get, fields)) for row in x) for x in by_audio.values()}
    german = ("de", "de", "transcribe"), ("de", "en", "translate")
    assert tasks == {(("en", "en", "transcribe"),), german}
    ids = [row["id"] for row in read_lines(multilingual.train)]
    assert len(set(ids)) == len(ids)


def test_statistics_and_sample(english: DemoCorpus) -> None:
    train = english.statistics["train"]
    assert (train.rows, train.recordings, train.voices) == (12, 12, 12)
    durations = [row["duration"] for row in read_lines(english.train)]
    assert train.hours == pytest.approx(sum(durations) / 3600, abs=1e-3)
    assert train.longest_s == pytest.approx(max(durations), abs=0.01)
    assert english.sample in {english.root / x["audio_filepath"] for x in read_lines(english.test)}


def test_equal_arguments_give_equal_bytes_whatever_the_jobs(english, tmp_path) -> None:
    advance = []
    again = build(tmp_path / "again", **SMALL, jobs=1, progress=lambda *p: advance.append(p))
    assert contents(again.root) == contents(english.root)
    assert advance == [(16, 16)]


def test_a_built_corpus_is_kept_and_needs_no_synthesiser(english, monkeypatch) -> None:
    monkeypatch.setattr(render, "_run_worker", lambda *_: pytest.fail("a worker was started"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert build(english.root, **SMALL) == english


@pytest.mark.parametrize(
    "damage",
    [
        lambda root: next((root / "dev" / "audio").iterdir()).unlink(),
        lambda root: (root / "test.jsonl").unlink(),
        lambda root: (root / "demo-corpus.json").write_text("{"),
    ],
    ids=["file", "manifest", "state"],
)
def test_a_damaged_corpus_is_rebuilt(english, tmp_path, damage) -> None:
    root = copy(english, tmp_path)
    damage(root)
    build(root, **SMALL)
    assert contents(root) == contents(english.root)


def test_an_interrupted_build_is_rebuilt(english, tmp_path, monkeypatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    root = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "_write_manifests", interrupt)
        with pytest.raises(KeyboardInterrupt):
            build(root, **SMALL)
    assert list((root / "train" / "audio").iterdir())
    assert not (root / "train.jsonl").exists()
    build(root, **SMALL)
    assert contents(root) == contents(english.root)


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="holds other files"):
        build(tmp_path, **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_failed_worker_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("espeakng_loader")
    monkeypatch.setattr("effasr.data.demo.plan.voices", lambda *_: ["en+nobody"])
    with pytest.raises(RuntimeError, match=r"ValueError: espeak: `voice` must be .*'en\+nobody'"):
        build(tmp_path / "out", **SMALL)


def test_a_missing_synthesiser_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"pip install effasr\[demo\]"):
        build(tmp_path / "out", **SMALL)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "value"), [("utterances", 7), ("jobs", 0)])
def test_arguments_are_checked(tmp_path: Path, name: str, value: int) -> None:
    arguments: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"`{name}` must be at least"):
        build(tmp_path / "out", **arguments)
