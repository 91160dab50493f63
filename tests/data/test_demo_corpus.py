import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from effasr.data.demo import corpus, render
from effasr.data.demo.corpus import DemoCorpus, build
from effasr.data.demo.plan import SPLITS
from effasr.data.manifest import reader
from effasr.data.manifest.cuts import prompt_of
from effasr.data.prompt import Prompt

SMALL: dict[str, Any] = {"utterances": 12, "seed": 1}


@pytest.fixture(scope="module")
def english(tmp_path_factory: pytest.TempPathFactory) -> DemoCorpus:
    pytest.importorskip("espeakng_loader")
    return build(tmp_path_factory.mktemp("demo") / "en", **SMALL)


@pytest.fixture(scope="module")
def multilingual(tmp_path_factory: pytest.TempPathFactory) -> DemoCorpus:
    pytest.importorskip("espeakng_loader")
    return build(tmp_path_factory.mktemp("demo") / "de", multilingual=True, **SMALL)


@pytest.fixture
def no_render(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(render, "_run_worker", refuse)


def rows(manifest: Path) -> list[dict]:
    return [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]


def contents(root: Path) -> dict[str, bytes]:
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def copy(built: DemoCorpus, to: Path) -> Path:
    return Path(shutil.copytree(built.root, to / "copy"))


@pytest.mark.parametrize("name", ["english", "multilingual"])
def test_manifest_agrees_with_the_files(name: str, request: pytest.FixtureRequest) -> None:
    built: DemoCorpus = request.getfixturevalue(name)
    for manifest in (built.train, built.dev, built.test):
        for row in rows(manifest):
            info = soundfile.info(manifest.parent / row["audio_filepath"])
            assert (info.samplerate, info.channels, info.subtype) == (16_000, 1, "PCM_16")
            assert row["duration"] == info.frames / 16_000
            assert row["pnc"] is False


@pytest.mark.parametrize("name", ["english", "multilingual"])
def test_audio_is_audible_and_as_long_as_its_text(
    name: str, request: pytest.FixtureRequest
) -> None:
    built: DemoCorpus = request.getfixturevalue(name)
    for row in rows(built.train):
        audio, _ = soundfile.read(built.root / row["audio_filepath"])
        assert 10 ** (-42 / 20) < np.sqrt(np.mean(audio**2)) < 10 ** (-18 / 20)
        assert np.abs(audio).max() <= 0.951
        if row["task"] == "transcribe":
            letters = len(row["text"].replace(" ", ""))
            assert 0.03 < row["duration"] / letters < 0.2


def test_german_audio_is_transcribed_and_translated(multilingual: DemoCorpus) -> None:
    by_audio: dict[str, list[dict]] = {}
    for row in rows(multilingual.train):
        by_audio.setdefault(row["audio_filepath"], []).append(row)
    tasks = {
        tuple((row["lang"], row["target_lang"], row["task"]) for row in group)
        for group in by_audio.values()
    }
    assert tasks == {
        (("en", "en", "transcribe"),),
        (("de", "de", "transcribe"), ("de", "en", "translate")),
    }
    ids = [row["id"] for row in rows(multilingual.train)]
    assert len(set(ids)) == len(ids)


def test_the_data_layer_reads_it(multilingual: DemoCorpus) -> None:
    cuts = {cut.id: cut for cut in reader.iterate(multilingual.dev)}
    assert len(cuts) == multilingual.statistics["dev"].rows
    for row in rows(multilingual.dev):
        cut = cuts[row["id"]]
        assert cut.supervisions[0].text == row["text"]
        assert prompt_of(cut) == Prompt(
            row["lang"], row["target_lang"], row["task"], punctuation=False
        )


def test_statistics_and_sample(english: DemoCorpus) -> None:
    train = english.statistics["train"]
    assert (train.rows, train.recordings, train.voices) == (12, 12, 12)
    durations = [row["duration"] for row in rows(english.train)]
    assert train.hours == pytest.approx(sum(durations) / 3600, abs=1e-3)
    assert train.longest_s == pytest.approx(max(durations), abs=0.01)
    sample = next(
        row for row in rows(english.test) if english.root / row["audio_filepath"] == english.sample
    )
    assert sample["text"] == english.sample_text


def test_equal_arguments_give_equal_bytes_whatever_the_jobs(
    english: DemoCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = []
    again = build(tmp_path / "again", **SMALL, jobs=1, progress=lambda *p: advance.append(p))
    assert contents(again.root) == contents(english.root)
    assert advance == [(16, 16)]


def test_another_seed_gives_other_sentences(english: DemoCorpus, tmp_path: Path) -> None:
    other = build(tmp_path / "other", utterances=12, seed=2)
    assert {r["text"] for r in rows(other.train)} != {r["text"] for r in rows(english.train)}


@pytest.mark.usefixtures("no_render")
def test_the_second_call_finds_the_corpus(english: DemoCorpus) -> None:
    assert build(english.root, **SMALL) == english


@pytest.mark.usefixtures("no_render")
def test_a_built_corpus_needs_no_synthesiser(
    english: DemoCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert build(english.root, **SMALL) == english


def _lose_a_file(root: Path) -> None:
    next((root / "dev" / "audio").iterdir()).unlink()


def _lose_a_manifest(root: Path) -> None:
    (root / "test.jsonl").unlink()


def _tear_the_state(root: Path) -> None:
    (root / "demo-corpus.json").write_text("{")


@pytest.mark.parametrize("damage", [_lose_a_file, _lose_a_manifest, _tear_the_state])
def test_a_damaged_corpus_is_rebuilt(
    english: DemoCorpus, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    root = copy(english, tmp_path)
    damage(root)
    build(root, **SMALL)
    assert contents(root) == contents(english.root)


def test_an_interrupted_build_is_rebuilt(
    english: DemoCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_other_arguments_replace_an_earlier_corpus(english: DemoCorpus, tmp_path: Path) -> None:
    root = copy(english, tmp_path)
    replaced = build(root, utterances=8, seed=1)
    assert replaced.statistics["train"].recordings == 8
    for split in SPLITS:
        named = {row["audio_filepath"] for row in rows(root / f"{split}.jsonl")}
        assert named == {f"{split}/audio/{p.name}" for p in (root / split / "audio").iterdir()}


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ValueError, match="holds other files"):
        build(tmp_path, **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_failed_worker_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("espeakng_loader")
    monkeypatch.setattr("effasr.data.demo.plan.voices", lambda *_: [_Nobody()])
    with pytest.raises(RuntimeError, match=r"ValueError: espeak: `voice` must be .*'en\+nobody'"):
        build(tmp_path / "out", **SMALL)


class _Nobody:
    name = "en+nobody"


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
