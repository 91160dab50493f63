"""The studies of small corpora: sets, scores, and effasr's commands as they call them."""

import json
import time
from pathlib import Path

import compare_small_data
import finetune_small_data
import numpy as np
import pytest
import small_data_ladder
import soundfile
from bench import rows
from small_data import table
from small_data.choices import LADDER
from small_data.corpora import write_corpus
from small_data.effasr_runs import QUIET, Commands
from small_data.peer_settings import PeerSettings

from effasr import config
from effasr.cli.main import main
from effasr.training.config import TrainConfig

RATE = 16_000
WORDS = ("one", "two", "three", "four")


def call_in_this_process(commands: Commands, *arguments: str) -> float:
    """As `Commands.call`, without the start of a program."""
    began = time.process_time()
    assert main(arguments) == 0
    return time.process_time() - began


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two languages of tones, one for each word: 24, 2 and 2 utterances."""
    folder = tmp_path / "source"
    (folder / "audio").mkdir(parents=True)
    random = np.random.default_rng(0)
    for language in ("en", "nl"):
        for split, count in (("train", 24), ("dev", 2), ("test", 2)):
            lines = []
            for number in range(count):
                said = random.integers(len(WORDS), size=4)
                times = np.arange(RATE // 4) / RATE
                tones = [np.sin(2 * np.pi * (300 + 400 * word) * times) for word in said]
                path = f"audio/{language}_{split}_{number}.wav"
                soundfile.write(folder / path, 0.1 * np.concatenate(tones), RATE)
                text = " ".join(WORDS[word] for word in said)
                row = {"audio_filepath": path, "duration": 1.0, "text": text, "lang": language}
                lines.append(json.dumps(row) + "\n")
            (folder / f"{language}_{split}.jsonl").write_text("".join(lines))
    return folder


def test_a_set_joins_languages_and_its_paths_are_absolute(source: Path, tmp_path: Path) -> None:
    corpus = write_corpus(source, ["en", "nl"], tmp_path / "both")
    assert corpus.name == "en+nl"
    rows = corpus.rows("train")
    assert [row["lang"] for row in rows] == ["en"] * 24 + ["nl"] * 24
    assert all(Path(row["audio_filepath"]).is_file() for row in rows)
    assert corpus.hours("train") == pytest.approx(48 / 3600)


def test_a_draw_of_minutes_is_part_of_a_larger_one(source: Path, tmp_path: Path) -> None:
    draws = []
    for seconds in (6, 12):
        out = tmp_path / str(seconds)
        corpus = write_corpus(source, ["en", "nl"], out, minutes=seconds / 60, seed=3)
        draws.append({row["audio_filepath"] for row in corpus.rows("train")})
        assert len(corpus.rows("train")) == 2 * seconds
        assert len(corpus.rows("test")) == 4
    assert draws[0] < draws[1]


def test_another_seed_draws_other_minutes_in_the_same_folder(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def call(commands: Commands, *arguments: str) -> float:
        calls.append(arguments)
        out = Path(arguments[2])
        out.mkdir(parents=True)
        (out / "report.json").touch()
        return 1.0

    trained = []
    monkeypatch.setattr(Commands, "call", call)
    monkeypatch.setattr(
        finetune_small_data, "run", lambda *given, **start: trained.append((given[2], start))
    )
    arguments = [str(source), "--csv", str(tmp_path / "table.csv"), "--sets", "en"]
    arguments += ["--minutes", "0.1", "--base", str(tmp_path), "--work", str(tmp_path / "work")]
    for seed in ("0", "1", "0"):
        assert finetune_small_data.main([*arguments, "--seed", seed]) == 0
    assert len(calls) == 2 * 4
    first, second, again = trained[::2]
    assert {corpus.name for corpus, _ in trained} == {"en-0.1min"}
    assert first[0].rows("train") != second[0].rows("train")
    assert first[1]["tokenizer"] != second[1]["tokenizer"]
    assert first == again


def test_a_set_says_what_its_source_lacks(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`source` must have de_train\.jsonl"):
        write_corpus(source, ["de"], tmp_path / "de")
    with pytest.raises(ValueError, match=r"`minutes` must be at most those of en, 0\.4, but is 2"):
        write_corpus(source, ["en"], tmp_path / "long", minutes=2)


def test_scores_are_those_of_effasr_evaluate() -> None:
    errors = table.score(["One, two three.", "Four"], ["one two tree", "four four"])
    rates = table.rates(errors)
    assert (rates["words"], rates["substitutions"], rates["insertions"]) == (4, 1, 1)
    assert rates["wer"] == 0.5
    assert rates["cer"] == round((1 + 5) / (13 + 4), 4)


def test_a_row_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    assert not table.is_done(path, corpus="en", seed=0)
    table.append(path, {"corpus": "en", "seed": 0})
    assert table.is_done(path, corpus="en", seed=0)
    assert not table.is_done(path, corpus="en", seed=1)


def test_every_configuration_is_one_that_training_takes() -> None:
    names = [choice.name for choice in LADDER]
    assert len(set(names)) == len(names)
    for choice in LADDER:
        data = ["data.train=train", "data.tokenizer=tokenizer", "data.validation=[]"]
        loaded = config.load(TrainConfig, choice.recipe, [*data, *QUIET, *choice.overrides])
        assert ("joint" in choice.decoding) == (loaded.model.decoder is not None)


def test_settings_of_the_peer_survive_their_file(tmp_path: Path) -> None:
    settings = PeerSettings(train="a", test="b", out="c", cpu_s=2.5, raw_text=True)
    settings.save(tmp_path / "settings.json")
    assert PeerSettings.load(tmp_path / "settings.json") == settings


def test_a_folder_without_the_peer_is_refused(source: Path, tmp_path: Path) -> None:
    arguments = [str(source), "--csv", str(tmp_path / "table.csv"), "--sets", "en"]
    arguments += ["--toolkits", "speechbrain", "--work", str(tmp_path / "work")]
    with pytest.raises(ValueError, match=r"`--peer` must be a folder with speechbrain"):
        compare_small_data.main([*arguments, "--peer", str(tmp_path)])


@pytest.mark.extended
def test_a_configuration_is_trained_and_evaluated_by_effasrs_commands(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = ["model.encoder.width=16", "model.encoder.layers=1", "model.encoder.feed_forward=16"]
    tiny += ["model.encoder.subsampling_channels=8", "model.decoder.width=16"]
    tiny += ["model.decoder.layers=1", "model.decoder.feed_forward=16"]
    (choice,) = (choice for choice in LADDER if choice.name == "4x, augmented")
    small = type(choice)(
        choice.name, choice.recipe, 32, (*choice.overrides, *tiny), choice.decoding
    )
    monkeypatch.setattr(small_data_ladder, "LADDER", (small,))
    monkeypatch.setattr(Commands, "call", call_in_this_process)
    path = tmp_path / "table.csv"
    arguments = [str(source), "--csv", str(path), "--cpu-s", "1", "--work", str(tmp_path / "work")]
    assert small_data_ladder.main(arguments) == 0
    found = list(rows.read(path))
    assert [row["decoding"] for row in found] == ["ctc", "joint"]
    assert found[0]["vocabulary"] == "32"
    assert int(found[0]["steps"]) >= 1
    assert float(found[0]["cpu_s"]) > 0
    assert int(found[0]["words"]) == 8
    assert small_data_ladder.main(arguments) == 0
    assert len(list(rows.read(path))) == 2
