"""The study of audio without text: what it trains on, and that complete stages are not repeated."""

import argparse
import csv
import json
from pathlib import Path

import audio_without_text as study
import pytest


class Recorded:
    """Commands that are noted; training and labelling leave what a command leaves."""

    def __init__(self, folder: Path, say: object) -> None:
        self.folder = folder
        self.calls: list[tuple[str, ...]] = []

    def call(self, *arguments: str) -> float:
        self.calls.append(arguments)
        if arguments[0] == "label":
            out = Path(arguments[3])
            out.mkdir(parents=True)
            kept = {"utterances": 7, "hours": 0.01}
            (out / "report.json").write_text(json.dumps({"kept": kept}))
        if arguments[0] == "evaluate":
            out = Path(arguments[6])
            out.mkdir(parents=True, exist_ok=True)
            rates = dict.fromkeys(("insertions", "deletions", "substitutions"), 1)
            result = {"words": 10, "wer": 0.3, "cer": 0.1, "wer_interval": [0.2, 0.4], **rates}
            (out / "wer.json").write_text(json.dumps(result))
        if arguments[0] == "tokenizer":
            Path(arguments[2]).mkdir(parents=True)
        return {"train": 100.0, "label": 10.0}.get(arguments[0], 1.0)


@pytest.fixture
def options(tmp_path, monkeypatch) -> argparse.Namespace:
    lines = [
        {"audio_filepath": f"a{n}.wav", "duration": 6.0, "text": f"word {n}"} for n in range(100)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(study, "Commands", Recorded)
    given = [str(tmp_path), "--csv", str(tmp_path / "rows.csv"), "--minutes", "1"]
    given += ["--hours", "0.1", "--steps", "80", "--work", str(tmp_path / "work")]
    return study._parser().parse_args(given)


def manifest(options: argparse.Namespace, name: str) -> list[dict]:
    text = (options.work / "data" / f"{name}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_manifests_share_no_utterance_and_no_text(options) -> None:
    study.Study(options, 0).prepare()
    few, rest, every = (manifest(options, name) for name in ("transcripts", "audio", "oracle"))
    assert (len(few), len(rest), len(every)) == (10, 50, 60)
    assert all("text" in line for line in few + every)
    assert not any("text" in line for line in rest)
    names = [{line["audio_filepath"] for line in lines} for lines in (few, rest, every)]
    assert not names[0] & names[1]
    assert names[0] | names[1] == names[2]
    assert all(Path(name).is_absolute() for name in names[2])


def test_compute_adds_up_over_the_stages_and_none_is_made_twice(options) -> None:
    made = study.Study(options, 0)
    made.prepare()
    first, second = made.noisy_student(1), made.noisy_student(2)
    assert (first.cpu_s, second.cpu_s) == (210.0, 320.0)
    assert (first.updates, second.updates, second.own_cpu_s) == (160, 240, 100.0)
    assert second.labels == 7
    assert [call[0] for call in made.commands.calls].count("train") == 3
    assert made.best_rq().updates == options.steps + options.pretrain_steps
    before = len(made.commands.calls)
    assert study.Study(options, 0).noisy_student(2) == second
    assert len(made.commands.calls) == before


@pytest.mark.parametrize("name", ["minutes", "hours", "steps", "min_confidence"])
def test_a_stage_of_other_settings_is_refused(options, name: str) -> None:
    def train() -> None:
        made = study.Study(options, 0)
        made.prepare()
        made.noisy_student(1)

    train()
    before = getattr(options, name)
    setattr(options, name, before / 2)
    with pytest.raises(ValueError, match=r"`--work` must be a folder of the same settings") as told:
        train()
    assert all(f"'{name}': {value}" in str(told.value) for value in (before, before / 2))


def test_updates_of_a_system_are_known_before_it_is_trained(options) -> None:
    made = study.Study(options, 0)
    made.prepare()
    for name, train in study.SYSTEMS.items():
        assert train(made).updates == study.updates(name, options)


def test_only_one_of_the_large_batches_follows_the_rule(options) -> None:
    made = study.Study(options, 1)
    made.prepare()
    for rule in (True, False):
        stage = made.teacher(times=4, rule=rule)
        call = made.commands.calls[-1]
        assert stage.updates == options.steps + 20
        assert f"init_from={made.supervised().run}" in call
        assert "data.micro_batches=8" in call
        assert ("training.ema_reference_micro_batches=2" in call) is rule


def test_a_row_of_other_updates_leaves_out_nothing(options, capsys) -> None:
    arguments = [str(options.corpus), "--csv", str(options.csv), "--seeds", "0", "--minutes", "1"]
    arguments += ["--hours", "0.1", "--only", "supervised"]
    for steps in ("80", "90", "90"):
        work = str(options.work / steps)
        assert study.main([*arguments, "--steps", steps, "--work", work]) == 0
    with options.csv.open() as file:
        assert [row["updates"] for row in csv.DictReader(file)] == ["80", "90"]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"supervised, seed 0, 90 updates: skipped, as {options.csv} has its row"


def test_rows_are_written_once(options) -> None:
    arguments = [str(options.corpus), "--csv", str(options.csv), "--seeds", "0", "--minutes", "1"]
    arguments += ["--hours", "0.1", "--steps", "80", "--work", str(options.work)]
    assert study.main([*arguments, "--only", "supervised", "oracle"]) == 0
    assert study.main([*arguments, "--only", "supervised", "noisy_student_1"]) == 0
    with options.csv.open() as file:
        found = list(csv.DictReader(file))
    assert [row["system"] for row in found] == ["supervised", "oracle", "noisy_student_1"]
    assert found[0]["wer"] == "0.3"
    assert found[2]["label_hours"] == "0.01"
    with pytest.raises(ValueError, match="`--only` must name systems"):
        study.main([*arguments, "--only", "supervise"])
