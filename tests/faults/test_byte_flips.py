"""One changed byte in any file of a run: it is noticed and named, or nothing depends on it."""

import hashlib
import logging
import re
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import pytest
import safetensors.torch

from effasr import config
from effasr.checkpoint import WEIGHTS, load_model, resolve
from effasr.cli.main import main
from effasr.data.checksums import sha256
from effasr.data.prompt import Prompt
from effasr.decoding.confidence.calibration import ConfidenceCalibration
from effasr.evaluation.comparison import read_run
from effasr.evaluation.model_card import read_data, read_tested
from effasr.evaluation.result import CALIBRATION, Evaluation, ScoredUtterance, save
from effasr.evaluation.wer import ErrorCounts
from effasr.training.checkpointing.run_checkpoints import RunCheckpoints
from effasr.training.config import TrainConfig
from effasr.training.run_dir.run_directory import RunDirectory
from tests.faults.test_streams import small_run

POSITIONS = 8
REMEDY = r"Restore|Using the previous|write the name|remove|again|is left out|was changed"
NEWEST, BEST = "checkpoints/step_00000004", "checkpoints/step_00000002"


def _continue(run: Path) -> Any:
    """What a run continues from, and what it appends to."""
    result = RunCheckpoints(run / "checkpoints", keep=2).newest()
    assert result is not None
    path, state = result
    files = {file: sha256(file) for file in sorted(path.rglob("*")) if file.is_file()}
    with closing(RunDirectory(run)) as directory:
        directory.load_state_dict(state["files"])
        directory.open("name: run\n", state["step"])
        directory.dropped([])
    # A line of a log that was changed is left out or kept, with a warning.
    return [files, _digest(run / "config.yaml"), _digest(run / "dropped.jsonl")]


def _use(run: Path) -> Any:
    """What is evaluated, exported and transcribed with."""
    folder = resolve(run)
    loaded = load_model(folder)
    weights = hashlib.sha256(safetensors.torch.save(loaded.model.state_dict())).hexdigest()
    tokens = loaded.tokenizer.encode("low high", "en"), loaded.tokenizer.prompt(Prompt())
    return folder, asdict(loaded.model.config), weights, tokens, loaded.prompt


def _repeat(run: Path) -> Any:
    return asdict(config.load(TrainConfig, run / "config.yaml"))


def _compare(run: Path) -> Any:
    """What is compared and shown in a model card."""
    return read_run(run), read_tested(run, resolve(run) / WEIGHTS)


def _calibrate(run: Path) -> Any:
    return ConfidenceCalibration.load(run / "evaluation" / "test" / CALIBRATION)


Reader = Callable[[Path], Any]
_TOKENIZER = "tokenizer/effasr_tokenizer.json"
_MODEL = ("manifest.json", "model.yaml", WEIGHTS, "tokenizer/en.model", _TOKENIZER)
_STATE = ("training.pt", "training/.metadata", "training/__0_0.distcp")
NOTICED: dict[str, list[Reader]] = {
    **{f"{NEWEST}/{name}": [_continue] for name in (*_MODEL, *_STATE)},
    **{f"{BEST}/{name}": [_use] for name in _MODEL},
    "checkpoints/best": [_use, _continue],
    "checkpoints/latest": [_use, _continue],
    "config.yaml": [_repeat, read_data],
    "metrics.jsonl": [_continue],
    "validation.jsonl": [_continue],
    "evaluation/test/wer.json": [_compare],
    "evaluation/test/hypotheses.jsonl": [_compare],
    "evaluation/test/calibration.json": [_calibrate],
}
"""Files that are read again, and who reads them."""

WRITTEN_ANEW = ("dropped.jsonl",)
"""Files that a run writes when it continues, and that nothing reads."""

FOR_PEOPLE = ("evaluation/*/ref.trn", "evaluation/*/hyp.trn", "evaluation/*/alignments.txt")
"""Files that nothing here reads."""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run that was stopped at step 4, with step 2 as its best, and an evaluation."""
    folder = tmp_path_factory.mktemp("run")
    recipe = small_run(folder)
    options = ["training.stop_at=4", "training.keep=2"]
    assert main(["train", str(recipe), *options]) == 0
    run = folder / "run"
    RunCheckpoints(run / "checkpoints", keep=2).mark_best(2)
    errors = ErrorCounts(words=2, substitutions=1, utterances=1)
    judged = tuple((0.1 * n, n % 3 > 0) for n in range(1, 10))
    scored = [
        ScoredUtterance(f"u{n}", "en", "low high", "low low", 1.0, errors, judged=judged)
        for n in range(3)
    ]
    evaluation = Evaluation("basic", tuple(scored), seconds=1.0, method="ctc", calibrated=False)
    save(evaluation, run / "evaluation" / "test", model=sha256(resolve(run) / WEIGHTS))
    return run


def _digest(file: Path) -> str:
    return sha256(file) if file.exists() else ""


def test_every_file_of_a_run_is_in_the_table(run):
    files = {str(file.relative_to(run)) for file in run.rglob("*") if file.is_file()}
    of_validation = {name for name in files if name.startswith("evaluation/train/")}
    of_best = {name for name in files if name.startswith(f"{BEST}/training")}
    visible = {str(file.relative_to(run)) for name in FOR_PEOPLE for file in run.glob(name)}
    assert files - of_validation - of_best - visible - set(WRITTEN_ANEW) == NOTICED.keys()


@pytest.mark.parametrize("name", [*NOTICED, *WRITTEN_ANEW])
def test_a_changed_byte_is_noticed_or_without_effect(run, name, caplog):
    caplog.set_level(logging.WARNING, "effasr")
    contents = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    path, random, noticed = run / name, Random(name), 0
    content = contents[path]
    short = len(content) <= 32
    places = range(len(content)) if short else random.sample(range(len(content)), POSITIONS)
    for read in NOTICED.get(name, [_continue]):
        expected = read(run)
        caplog.clear()
        for position in places:
            changed = bytearray(content)
            changed[position] ^= 1 << random.randrange(8)
            path.write_bytes(changed)
            try:
                result = read(run)
                told = caplog.messages
            except ValueError as error:
                result, told = None, [str(error)]
            for file, original in contents.items():
                if not file.exists() or file.read_bytes() != original:
                    file.write_bytes(original)
            caplog.clear()
            if result == expected and not told:
                continue
            noticed += 1
            (text,) = told
            assert "\n" not in text
            assert path.name in text or path.parent.name in text, text
            assert re.search(REMEDY, text), text
    if name in WRITTEN_ANEW:
        assert noticed == 0
    elif name != "checkpoints/latest":
        # Else nothing was tested: a byte of JSON may be without effect, most are not.
        assert noticed >= len(places) // 2, noticed
