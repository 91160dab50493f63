"""The blocks of README.md and docs/ that are marked ``run`` do what they say, in their order.

``run``: in a folder with the two manifests of README.md, "Train on your own recordings".
``run trained``: where a model is trained, and with whatever else the commands name.
``run chat``: where a speech language model is trained.
``run whisper``: in a folder with two manifests of a language that the Whisper there has not.
Settings that make training quick are added to the commands.
"""

import gzip
import io
import json
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
import yaml

from effasr.cli import main as cli
from effasr.training.calibration.calibrate import LinearModel
from effasr.training.run_dir.run_directory import read_lines
from tests.cli.conftest import RECIPE, write_manifest
from tests.docs import scripts
from tests.docs.scripts import ROOT
from tests.docs.test_commands import PAGES, blocks, split
from tests.interop.whisper import make_whisper
from tests.support.chat_folder import write_chat_model
from tests.support.known_machine import known_machine
from tests.support.talks import model_mapping, write_talks

QUICK = ["training.max_steps=2", "training.device=cpu", "training.tensorboard=false"]
QUICK += ["data.frame_budget=160", "data.workers=0"]
ADDED = {"train": QUICK, "tokenizer": ["--vocab-size", "20"], "init": ["--no-timing"]}
ADDED["segment"] = ["--min-score", "0"]  # the model has heard little
"""Options of commands: there are too few texts for the tokenizers that the pages name."""
RECIPE_FILE = "recipe.yaml"
"""What RECIPE stands for."""
NOT_RUN = {"tensorboard"}
"""It serves pages until it is interrupted."""


def write_corpus(folder: Path, name: str, count: int) -> None:
    """Write NAME.jsonl, with tones for speech and random words of random letters for texts."""
    generator = np.random.default_rng(count)
    lines = []
    for number in range(count):
        seconds = generator.uniform(1.0, 3.0)
        times = np.arange(int(16_000 * seconds)) / 16_000
        tone = 0.3 * np.sin(2 * np.pi * generator.uniform(200, 3000) * times)
        soundfile.write(folder / f"{name}-{number}.wav", tone.astype(np.float32), 16_000)
        letters = generator.choice(list("abcdefghijklmnopqrst "), size=int(6 * seconds))
        text = "a" + "".join(letters)
        lines.append({"audio_filepath": f"{name}-{number}.wav", "text": text, "lang": "en"})
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def marked(*wanted: str) -> list:
    return [
        pytest.param(
            needs,
            text,
            id=f"{page.relative_to(ROOT)}: {text.splitlines()[0][:50]}",
            # Exports to ONNX take long; tests/cli makes one on each push.
            marks=[pytest.mark.extended] if "onnx" in text else [],
        )
        for page in PAGES
        for needs, text in blocks(page, "sh")
        if needs in wanted
    ]


@pytest.mark.parametrize(("needs", "text"), marked("run"))
def test_the_quick_start_runs(needs, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, count in (("train", 40), ("dev", 4)):
        write_corpus(tmp_path, name, count)
    (tmp_path / "recording.wav").write_bytes((tmp_path / "dev-0.wav").read_bytes())
    for line in text.splitlines():
        for words in split(line):
            assert words[0] == "effasr"
            extra = QUICK if words[1] == "train" else []
            assert cli.main([*words[1:], *extra]) == 0, (words, capsys.readouterr().err)
    if "transcribe" in text:
        assert "recording.wav\t" in capsys.readouterr().out
        assert list(tmp_path.glob("runs/mine/evaluation/*/wer.json"))
    assert (tmp_path / "data/tokenizer").is_dir()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What the commands of most pages find where they are called."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, count in (("train", 24), ("dev", 8), ("held_out", 6), ("held_out_dev", 2)):
            write_manifest(folder, name, count)
        for name in ("train", "dev"):
            assert cli.main(["prepare", f"{name}.jsonl", f"data/{name}"]) == 0
            dutch = Path(f"{name}.jsonl").read_text().replace('"lang": "en"', '"lang": "nl"')
            Path({"train": "dutch.jsonl", "dev": "dutch_dev.jsonl"}[name]).write_text(dutch)
        command = ["tokenizer", "data/train", "data/tokenizer", "--vocab-size", "30"]
        assert cli.main(command) == 0
        recipe = RECIPE.format(folder="data").replace("data/runs", "runs")
        (folder / RECIPE_FILE).write_text(recipe)
        # So that some of its words are right, of which confidences are calibrated.
        command = ["train", RECIPE_FILE, "name=mine", "training.max_steps=20", "optimizer.lr=1e-2"]
        command += ["schedule.warmup_steps=1", "training.checkpoint_every=20"]
        command += ["training.validate_every=20", "training.tensorboard=false"]
        assert cli.main([*command, "training.profile={tool: kineto, first_step: 1, steps: 1}"]) == 0
        # Two systems to compare, and a run with a recorded step, as `make demo` leaves one.
        shutil.copytree("runs/mine", "runs/A", symlinks=True)
        assert cli.main(["evaluate", "--run", "runs/A", "--manifest", "data/dev"]) == 0
        for name in ("B", "demo"):
            shutil.copytree("runs/A", f"runs/{name}", symlinks=True)
    write_demo_corpus(folder)
    write_language_models(folder)
    write_calls(folder)
    write_tone(folder / "talk.wav")
    (folder / "talks").mkdir()
    for line in read_lines(folder / "train.jsonl"):
        audio = folder / line["audio_filepath"]
        (folder / "talks" / audio.name).write_bytes(audio.read_bytes())
        (folder / "talks" / f"{audio.stem}.txt").write_text(line["text"])
    (folder / "whisper").mkdir()
    make_whisper(folder / "whisper")
    assert cli.main(["import", f"{folder}/whisper", f"{folder}/models/whisper"]) == 0
    return folder


def write_demo_corpus(folder: Path) -> None:
    """The files of `effasr demo-data` that recipes name."""
    shutil.copytree(folder / "data/tokenizer", folder / "data/demo/tokenizer")
    for name in ("train", "dev"):
        cuts = gzip.decompress((folder / f"data/{name}/cuts.jsonl.gz").read_bytes())
        (folder / f"data/demo/{name}.jsonl").write_bytes(cuts)


def write_language_models(folder: Path) -> None:
    (folder / "phrases.txt").write_text("low\t2\n")
    write_chat_model(folder / "models/LM")
    lines = ["\\data\\", "ngram 1=3", "", "\\1-grams:", "-0.5 <s>", "-0.5 </s>", "-0.5 low"]
    with gzip.open(folder / "words.arpa.gz", "wt") as file:
        file.writelines(f"{line}\n" for line in [*lines, "", "\\end\\"])


def write_calls(folder: Path) -> None:
    """Recordings: libsndfile knows a format by its content, so that none needs ffmpeg."""
    (folder / "calls/monday").mkdir(parents=True)
    for name in ("first.wav", "monday/second.wav", "monday/third.m4a"):
        write_tone(folder / "calls" / name)


def write_tone(path: Path) -> None:
    samples = 0.3 * np.sin(2 * np.pi * 700 * np.arange(16_000) / 16_000)
    soundfile.write(path, samples, 16_000, format="WAV")


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """What the commands for a speech language model find where they are called."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("chat")
    training = {"max_steps": 2, "device": "cpu", "threads": 1, "tensorboard": False}
    recipe: dict[str, Any] = {"name": "mine", "model": model_mapping("models/LM")}
    recipe |= {"data": {"train": "data/speech.jsonl", "frame_budget": 60, "workers": 0}}
    (folder / RECIPE_FILE).write_text(yaml.safe_dump(recipe | {"training": training}))
    write_talks(folder / "data")
    shutil.copy(folder / "data/speech.jsonl", folder / "data/questions.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_language_models(folder)
        write_manifest(folder, "dev", 2)
        assert cli.main(["prepare", "dev.jsonl", "data/dev"]) == 0
        assert cli.main(["train", RECIPE_FILE]) == 0
    write_calls(folder)
    write_tone(folder / "call.wav")
    return folder


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    """A Whisper with random weights, and recordings of a language that it has not."""
    pytest.importorskip("ctranslate2")
    folder = tmp_path_factory.mktemp("new")
    (folder / "whisper").mkdir()
    make_whisper(folder / "whisper")
    for name, count in (("train", 24), ("dev", 4)):
        write_manifest(folder, name, count)
        path = folder / f"{name}.jsonl"
        path.write_text(path.read_text().replace('"lang": "en"', '"lang": "nds"'))
    return folder


def output_of(words: list[str]) -> bytes:
    if words[0] == "arecord":
        samples, _ = soundfile.read("calls/first.wav", dtype="int16")
        return samples.tobytes()
    return subprocess.run(words, check=True, capture_output=True).stdout


def call(words: list[str]) -> int:
    program, name, *arguments = [RECIPE_FILE if word == "RECIPE" else word for word in words]
    if program == "effasr":
        return cli.main([name, *arguments, *ADDED.get(name, [])])
    assert program == "python", program
    # That script would write to the pages.
    return scripts.run(name, *arguments, *(["--check"] if "generate_tables" in name else []))


@pytest.mark.parametrize(("needs", "text"), marked("run trained", "run chat", "run whisper"))
def test_commands_run(needs, text, request, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "folder"
    shutil.copytree(request.getfixturevalue(needs.split()[1]), folder, symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    known_machine(monkeypatch, LinearModel(1e8, 1e5))
    for line in chain.from_iterable(line.split("&&") for line in text.splitlines()):
        *before, last = split(line)
        if last[0] not in NOT_RUN:
            piped = output_of(before[0]) if before else b""
            monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(piped)))
            assert call(last) == 0, (last, capsys.readouterr().err)
    if "data.timestamps" in text:
        assert read_lines(folder / "segments/manifest.jsonl")[0]["words"]
    if needs == "run whisper":
        lines = read_lines(folder / "runs/lowgerman/validation.jsonl")
        assert [line["step"] for line in lines] == [0, 2]
        assert (folder / "lowgerman/model.bin").is_file()
