import json
import random
import re
import shutil
from collections import Counter, defaultdict
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from effasr.data.conversation.messages import conversations
from effasr.data.conversation.tokenize import conversation_rows
from effasr.data.demo import corpus, render
from effasr.data.demo.acoustics import REFERENCE_LEVEL_DB, record
from effasr.data.demo.chat_model import TRANSCRIBE, write_conversations
from effasr.data.demo.corpus import DemoCorpus, build
from effasr.data.demo.plan import BILINGUAL, ENGLISH, SPLITS, plan
from effasr.data.tokenizer import ChatTokenizer, load_tokenizer
from effasr.decoding.config import DecodingConfig
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
                assert 0.03 < row["duration"] / len(row["text"].replace(" ", "")) < 0.2


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


QUIET = {"gain_db": 0.0, "snr_db": 100.0, "noise_slope": 0.0, "lead_s": 0.0, "tail_s": 0.0}


def tone(seconds: float = 1.0, rate: int = 22_050) -> np.ndarray:
    return (0.1 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)).astype("f4")


def decibels(audio: np.ndarray) -> float:
    return 10 * np.log10(np.mean((audio / 32767.0) ** 2))


@pytest.mark.parametrize("gain", [-12.0, 0.0, 3.0])
def test_level_does_not_depend_on_the_synthesiser(gain: float) -> None:
    loud = record(5 * tone(), 22_050, **{**QUIET, "gain_db": gain}, seed=0)
    soft = record(tone(), 22_050, **{**QUIET, "gain_db": gain}, seed=0)
    np.testing.assert_allclose(loud, soft, atol=1)
    assert decibels(loud) == pytest.approx(REFERENCE_LEVEL_DB + gain, abs=0.05)


@pytest.mark.parametrize("snr", [12.0, 40.0])
@pytest.mark.parametrize("slope", [0.0, 1.0, 2.0])
def test_signal_to_noise_ratio(snr: float, slope: float) -> None:
    setting = {**QUIET, "noise_slope": slope}
    noisy = record(tone(), 22_050, **{**setting, "snr_db": snr}, seed=5).astype(float)
    clean = record(tone(), 22_050, **setting, seed=5).astype(float)
    assert decibels(clean) - decibels(noisy - clean) == pytest.approx(snr, abs=0.2)


def test_every_german_clause_has_one_translation_and_the_reverse():
    clauses = {"de": [], "en": []}
    for template in BILINGUAL.templates:
        names = re.findall(r"{(\w+)}", template["en"])
        for values in product(*(BILINGUAL.slots[name] for name in names)):
            for lang, texts in clauses.items():
                filled = {name: value[lang] for name, value in zip(names, values, strict=True)}
                texts.append(template[lang].format(**filled))
    german, english = set(clauses["de"]), set(clauses["en"])
    assert len(clauses["en"]) == len(german) == len(english) == 124
    # Clauses are joined by these words, which are in none.
    assert not any("and" in text.split() for text in english)
    assert not any("und" in text.split() for text in german)


@pytest.mark.parametrize("grammar", [ENGLISH, BILINGUAL])
def test_templates_become_lower_case_words_in_every_language(grammar):
    for template in grammar.templates:
        names = [sorted(re.findall(r"{(\w+)}", template[lang])) for lang in grammar.languages]
        assert all(result == names[0] for result in names)
        assert len(set(names[0])) == len(names[0])
    rng = random.Random(0)
    for _ in range(300):
        sentence = rng.choice((grammar.digits, grammar.command))(rng)
        for text in map(sentence.text, grammar.languages):
            assert all(word.isalpha() and word == word.lower() for word in text.split(" "))


@pytest.fixture(scope="module", params=[False, True], ids=["english", "multilingual"])
def recordings(request):
    return plan(multilingual=request.param, utterances=1200, seed=3)


def test_splits_have_no_sentence_and_no_voice_in_common(recordings):
    texts, timbres, words = defaultdict(set), defaultdict(set), defaultdict(set)
    for item in recordings:
        texts[item.split].update(item.texts.values())
        timbres[item.split].add(item.voice.partition("+")[2])
        words[item.split].update(" ".join(item.texts.values()).split())
    for entry, other in combinations(SPLITS, 2):
        assert not texts[entry] & texts[other]
        assert not timbres[entry] & timbres[other]
    # Every word that is tested was heard in training.
    assert words["dev"] | words["test"] <= words["train"]
    assert Counter(item.split for item in recordings) == {"train": 1200, "dev": 60, "test": 120}
    assert len({item.path for item in recordings}) == len(recordings)


@pytest.fixture(scope="module")
def chat_files(tmp_path_factory):
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("demo")
    for split, count in (("train", 6), ("dev", 2)):
        rows = [
            {
                "id": f"{split}-{n}-{task}",
                "audio_filepath": f"{split}/{n}.wav",
                "text": f"turn on lamp {n}",
                "target_lang": "en",
                "task": task,
            }
            for n in range(count)
            for task in ("transcribe", "translate")
        ]
        (root / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_conversations(root)


def test_conversations_ask_for_what_the_corpus_has(chat_files):
    spoken = list(conversations(chat_files.speech))
    assert len(spoken) == 12
    assert not any(item.problem for item in spoken)
    instructions = [item.messages[0].parts[1] for item in spoken[:2]]
    assert instructions == [TRANSCRIBE, "Translate the speech to English."]
    assert instructions[0] == DecodingConfig().instruction
    assert spoken[0].clips[0].audio == str(chat_files.speech.parent / "train/0.wav")
    written = list(conversations(chat_files.text_dev))
    assert len(written) == 8
    assert not any(item.clips for item in written)


def test_the_chat_model_tokenizes_them(chat_files):
    tokenizer = load_tokenizer(chat_files.model)
    assert isinstance(tokenizer, ChatTokenizer)
    config = json.loads((chat_files.model / "config.json").read_text())
    assert config["vocab_size"] == tokenizer.vocab_size
    assert config["eos_token_id"] == tokenizer.eos_id == tokenizer.stop_ids[0]
    for item in (*conversations(chat_files.speech), *conversations(chat_files.text)):
        assert ~conversation_rows(item.messages, tokenizer)[-1] == tokenizer.eos_id
