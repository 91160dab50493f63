"""The runner of studies: a small grid from data to rows, and the grids of this repository."""

import contextlib
import csv
import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import study
import yaml
from tones import write_corpus

from effasr import config
from effasr.cli.main import build_parser, main
from effasr.training.config import TrainConfig

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "profiling" / "results"
SMALL = "width: 16, layers: 1, heads: 2, feed_forward: 16"
GRID = {
    "parameters": {
        "corpus": "corpus",
        "steps": 2,
        "small": f"'model.encoder={{{SMALL}, subsampling_channels: 4}}' model.decoder=null",
        "losses": "loss.ctc_weight=1 loss.ctc_weight_before=null loss.guided_weight=0",
        "quiet": "data.workers=0 data.validation=[] training.tensorboard=false",
        "train": "effasr train demo name=run output=$out seed=$seed $quiet $small $losses "
        "loss.guided_after_ctc=null training.profile=null training.log_every=1 "
        "data.train=$few/data.jsonl data.tokenizer=$tokenizer/tokenizer",
    },
    "seeds": [0, 1],
    "data": {
        "few": "subset $corpus/train.jsonl --shuffle 0 --until-s 4 --output $out/data.jsonl",
        "tokenizer": "effasr tokenizer $corpus/train.jsonl $out/tokenizer --vocab-size 40",
    },
    "stages": {
        "first": "$train training.max_steps=$steps",
        "second": "$train training.max_steps=3 init_from=$first/run",
    },
    "cells": {"scratch": {"trained": "$first"}, "tuned": {"trained": "$second"}},
    "rows": [
        {
            "command": "effasr evaluate --run $trained/run --manifest $corpus/dev.jsonl "
            "--output $out --worst 0 --method ctc",
            "json": "$out/wer.json",
            "values": {"system": "$cell"},
        }
    ],
    "columns": [
        "study",
        "system",
        "seed",
        "updates",
        "steps",
        "wer",
        "wer_low",
        "words",
        "git",
        "peak_gb",
    ],
    "from": {"wer_low": "wer_interval.0"},
    "percent": ["wer_low"],
}


class InProcess:
    """Runs effasr's commands in this process, and keeps them."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []

    def __call__(self, command: str, folder: Path, sources: Path) -> tuple[str, float, float]:
        folder.mkdir(parents=True, exist_ok=True)
        program, *words = shlex.split(command)
        self.commands.append([program, *words])
        if program == "subset":
            study.subset(words)
            return "", 0.0, 0.0
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert main(words) == 0
        return printed.getvalue(), 1.5, 0.25


@pytest.fixture
def grid(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "little.yaml"
    path.write_text(yaml.safe_dump(GRID))
    return path


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_grid_from_data_to_rows(grid, monkeypatch, capsys) -> None:
    write_corpus(Path("corpus"), train=12, dev=2)
    ran = InProcess()
    monkeypatch.setattr(study, "_call", ran)
    assert study.main([str(grid), "--seeds", "0", "--csv", "table.csv"]) == 0
    table, rows = rows_of(Path("table.csv")), rows_of(Path("runs/studies/little/rows.csv"))
    assert [row["system"] for row in table] == ["scratch", "tuned"]
    assert [{k: x for k, x in row.items() if k != "cell"} for row in rows] == table
    assert [(row["updates"], row["steps"]) for row in table] == [("2", "2"), ("5", "3")]
    for row in table:
        assert (row["study"], row["seed"]) == ("little", "0")
        assert int(row["words"]) >= 2
        assert float(row["wer_low"]) <= 100 * float(row["wer"])
        assert row["git"]
        assert row["peak_gb"] == "0.25"
    # The second cell has used what the first one made.
    assert [words[1] for words in ran.commands if words[0] == "effasr"] == [
        *("tokenizer", "train", "evaluate"),
        *("train", "evaluate"),
    ]
    (line, *_) = map(json.loads, Path(ran.commands[0][-1]).read_text().splitlines())
    assert Path(line["audio_filepath"]).is_absolute()

    # Nothing is made twice, and what other settings have made is not used.
    before = len(ran.commands)
    study.main([str(grid), "--seeds", "0"])
    assert len(ran.commands) == before
    assert "scratch, seed 0: skipped, as " in capsys.readouterr().out
    study.main([str(grid), "--seeds", "0", "--set", "steps=1", "--only", "scratch"])
    assert [words[1] for words in ran.commands[before:]] == ["train", "evaluate"]
    assert [row["updates"] for row in rows_of(Path("runs/studies/little/rows.csv"))][2:] == ["1"]

    # A stage that was interrupted begins anew.
    before = len(ran.commands)
    for marker in Path("runs/studies/little/stages").glob("first_*/stage.json"):
        marker.unlink()
    Path("runs/studies/little/rows.csv").unlink()
    study.main([str(grid), "--seeds", "0", "--only", "tuned"])
    assert [words[1] for words in ran.commands[before:]] == ["train", "evaluate"]


def test_costs_of_a_command_are_its_own(tmp_path) -> None:
    # By a small process: the peak of a command begins with the memory of what started it.
    lines = "x = b'1' * 900_000_000; print(len(x))", "print(1)"
    commands = [f"python -c {shlex.quote(line)}" for line in lines]
    program = (
        "from pathlib import Path; import json, study; "
        f"calls = [study._call(x, Path('.'), study.ROOT) for x in {commands!r}]; "
        "print(json.dumps(calls))"
    )
    paths = os.pathsep.join(
        map(str, (study.ROOT / "profiling", study.ROOT, study.ROOT / "kernels"))
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        **{"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": paths}, "stdout": subprocess.PIPE},
        check=True,
    )
    (printed, seconds, large_gb), (_, _, small_gb) = json.loads(done.stdout.splitlines()[-1])
    assert (printed.strip(), seconds > 0) == ("900000000", True)
    assert small_gb + 0.4 < large_gb < 1.4


def test_a_training_that_a_signal_stopped_is_no_stage(tmp_path) -> None:
    printed = "print('stopped at step 3; the same command continues from there')"
    command = f"python -c {shlex.quote(printed)}"
    with pytest.raises(RuntimeError, match="was stopped at step 3: run the study again"):
        study._call(f"{command} training.stop_at=30", tmp_path, study.ROOT)
    assert study._call(f"{command} training.stop_at=3", tmp_path, study.ROOT)[0]


def test_a_subset_has_each_second_once(tmp_path) -> None:
    lines = [{"audio_filepath": f"{n}.wav", "duration": 6.0, "text": str(n)} for n in range(30)]
    manifest = tmp_path / "all.jsonl"
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    parts = {"few": ["--until-s", "60"], "others": ["--after-s", "60", "--without", "text"]}
    made = {}
    for name, options in parts.items():
        out = tmp_path / f"{name}.jsonl"
        study.subset([str(manifest), "--shuffle", "0", "--output", str(out), *options])
        made[name] = [json.loads(line) for line in out.read_text().splitlines()]
    assert (len(made["few"]), len(made["others"])) == (10, 20)
    assert not any("text" in line for line in made["others"])
    names = [line["audio_filepath"] for line in [*made["few"], *made["others"]]]
    assert len(set(names)) == 30
    assert names != sorted(names)


def test_rows_by_strategy_and_commands_that_fail(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    grid = {
        "cells": {"a": {"code": "import prints"}, "b": {"code": "import sys; sys.exit(3)"}},
        "rows": [{"command": 'python -c "$code"', "each": "name"}],
        "columns": ["name", "n", "missing"],
        "percent": ["n"],
    }
    (tmp_path / "prints.py").write_text('print(\'{"x": {"n": 1.25}, "y": {"n": 2}}\')')
    Path("g.yaml").write_text(yaml.safe_dump(grid))
    study.main(["g.yaml", "--only", "a", "--work", "w"])
    rows = [(row["name"], row["n"], row["missing"]) for row in rows_of(Path("w/rows.csv"))]
    assert rows == [("x", "125.0", ""), ("y", "2", "")]
    with pytest.raises(RuntimeError, match=r"ended with exit code 3: see .*log\.txt"):
        study.main(["g.yaml", "--only", "b", "--work", "w"])
    assert len(rows_of(Path("w/rows.csv"))) == 2


def test_a_study_that_has_left_the_tree_runs_in_a_checkout(tmp_path, monkeypatch, capsys) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "setup.py").write_text("")
    (repository / "script.py").write_text("print('measured by the old code')")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "old"]):
        subprocess.run(["git", "-C", str(repository), *words], check=True)
    head = ["git", "-C", str(repository), "rev-parse", "HEAD"]
    revision = subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()
    (repository / "script.py").unlink()
    monkeypatch.setattr(study, "ROOT", repository)
    monkeypatch.chdir(tmp_path)
    spec = {"revision": revision, "rows": [{"command": "python $checkout/script.py"}]}
    Path("old.yaml").write_text(yaml.safe_dump(spec))
    assert study.main(["old.yaml"]) == 0
    assert "measured by the old code" in capsys.readouterr().out
    Path("old.yaml").write_text(yaml.safe_dump(spec | {"revision": "0" * 40}))
    with pytest.raises(RuntimeError, match=r"revision 0{40} .* must be there .* --unshallow"):
        study.main(["old.yaml"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], r"`GRID` must be a file or one of audio_without_text, .* but is none"),
        (
            ["padding", "--set", "list=a"],
            r"`--set` must be NAME=VALUE with NAME of lists, .* list=a",
        ),
        (["padding", "--only", "c"], r"`--only` must name cells of .*, but one is c"),
        (["bad.yaml"], r"bad\.yaml: fields must be of about, .*, but one is cell"),
        (["unknown.yaml"], r"unknown: `\$nothing` names no parameter and no stage"),
    ],
)
def test_messages(arguments, message, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text("cell: {}")
    Path("unknown.yaml").write_text("rows: [{command: echo $nothing}]")
    with pytest.raises(ValueError, match=message):
        study.main(arguments)


GRIDS = sorted(path.stem for path in study.GRIDS.glob("*.yaml") if "base" not in path.stem)


@pytest.mark.parametrize("name", GRIDS)
def test_the_grids_have_commands_that_exist(name, tmp_path) -> None:
    grid = study.load(name)
    assert grid["about"]
    stages, written, seen, parser = set(), set(), set(), build_parser()
    for cell in grid["cells"]:
        plan = study.Plan(grid, cell, 0, tmp_path)
        stages |= set(plan.stages)
        for job in [*plan.stages.values(), *(job for job, *_ in plan.rows)]:
            for command in job.commands:
                if command in seen:
                    continue
                seen.add(command)
                program, *words = shlex.split(command)
                if program == "effasr":
                    options = parser.parse_args(words)
                    if options.command == "init":
                        written.add(str(options.output))
                    if options.command == "train":
                        # A recipe that the study writes is not there yet.
                        recipe = "small" if options.recipe in written else options.recipe
                        config.load(TrainConfig, recipe, options.overrides)
                elif program == "python" and "revision" in grid:
                    script = Path(words[0]).relative_to(study.checkout_folder(grid, tmp_path))
                    assert script.parts[0] == "profiling"
    assert stages == {*grid["data"], *grid["stages"]}
    table = RESULTS / f"{name}.csv"
    if grid["columns"]:
        assert list(rows_of(table)[0]) == grid["columns"]
