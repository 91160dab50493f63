"""The benchmark of Whisper at its smallest: systems agree, rows are complete, failures are told."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import bench_whisper
import pytest
from bench import rows
from bench.training.corpus import TOKENS_PER_SECOND
from bench.workload import LISTED

pytest.importorskip("tokenizers")
pytest.importorskip("transformers", minversion="5.23")

from whisper_bench.checkpoint import prepare
from whisper_bench.finetuning import EffasrSteps, TransformersSteps
from whisper_bench.settings import SYSTEMS, Settings
from whisper_bench.transcribing import CTranslate2Passes, EffasrPasses, TransformersPasses


def settings(folder: Path, task: str) -> Settings:
    assert task in ("finetune", "transcribe")
    return Settings(task, "dry_run", str(folder), str(LISTED), utterances=6, batch=2, threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("whisper")
    has = importlib.util.find_spec("ctranslate2") is not None
    prepare(settings(made, "transcribe"), [s for s in SYSTEMS["transcribe"] if has])
    return made


def test_updates_are_those_of_transformers(folder: Path) -> None:
    given = settings(folder, "finetune")
    theirs = TransformersSteps(given, "transformers")
    ours = EffasrSteps(given, "effasr_silence")
    assert ours.check()["loss"] == pytest.approx(theirs.check()["loss"], rel=1e-5)
    before = [theirs.check()["loss"]]
    for number in range(3):
        expected, found = theirs.run(number), ours.run(number)
        assert found.pop("loss") == pytest.approx(expected.pop("loss"), rel=1e-4)
        for name in ("audio_s", "utterances", "frames"):
            assert found[name] == pytest.approx(expected[name])
        before.append(theirs.check()["loss"])
        assert ours.check()["loss"] == pytest.approx(before[-1], rel=1e-4)
    # What was learnt is more than the two may differ by.
    assert abs(before[-1] / before[0] - 1) > bench_whisper.LOSS_TOLERANCE


def test_without_silence_the_loss_is_another_and_steps_hold_what_they_should(folder: Path) -> None:
    given = settings(folder, "finetune")
    theirs = TransformersSteps(given, "transformers")
    few, filled = EffasrSteps(given, "effasr"), EffasrSteps(given, "effasr_filled")
    assert few.check() == filled.check()
    difference = abs(few.check()["loss"] / theirs.check()["loss"] - 1)
    assert difference > bench_whisper.LOSS_TOLERANCE
    padded, less, full = (one.run(0) for one in (theirs, few, filled))
    assert less["frames"] < padded["frames"] == full["frames"] == 400
    assert full["audio_s"] >= less["audio_s"] > 0
    assert padded["utterances"] == 2
    assert all(math.isfinite(one["loss"]) for one in (padded, less, full))


def test_all_write_the_same_tokens_and_as_many(folder: Path) -> None:
    given = settings(folder, "transcribe")
    theirs = TransformersPasses(given, "transformers").check()["tokens"]
    ours = EffasrPasses(given, "effasr_silence")
    assert bench_whisper.agreement(ours.check()["tokens"], theirs) > 0.9
    assert len({token for text in theirs for token in text}) > 3
    alone = EffasrPasses(given, "effasr").check()["tokens"]
    assert bench_whisper.agreement(alone, theirs) < 1
    counts = [len(text) for text in theirs]
    assert counts == [len(text) for text in alone]
    done = ours.run(0)
    assert done["tokens"] == sum(counts) >= TOKENS_PER_SECOND * done["audio_s"] - len(counts)
    assert done["seconds"] > 0


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_ctranslate2_writes_the_same_tokens(precision: str, folder: Path) -> None:
    pytest.importorskip("ctranslate2")
    given = settings(folder, "transcribe")
    theirs = TransformersPasses(given, "transformers").check()["tokens"]
    found = CTranslate2Passes(given, f"ctranslate2_{precision}").check()["tokens"]
    assert bench_whisper.agreement(found, theirs) > (0.9 if precision == "float32" else 0.3)


@pytest.mark.extended
def test_each_system_in_a_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "whisper.csv"
    systems = ["transformers", "effasr_silence"]
    command = ["finetune", "--dry-run", "--threads", "1", "--output", str(output)]
    assert bench_whisper.main([*command, "--systems", *systems]) == 0
    found = {row["system"]: row for row in rows.read(output)}
    assert list(found) == systems
    for row in found.values():
        assert int(row["peak_bytes"]) > int(row["base_bytes"]) > 0
        assert float(row["audio_s_per_s"]) > 0
        assert float(row["loss"]) > 5
        assert row["threads"] == "1"
        assert row["minimum_s"] == "4"
    assert float(found["effasr_silence"]["loss_difference"]) < 1e-3
    assert "left out" not in capsys.readouterr().err


@pytest.mark.extended
def test_what_is_not_there_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(bench_whisper, "prepare", lambda given, systems: None)
    command = ["transcribe", "--dry-run", "--systems", "ctranslate2_int8"]
    assert bench_whisper.main(command) == 1
    assert "ctranslate2_int8: left out: ctranslate2 is not installed" in capsys.readouterr().err
    # Without a checkpoint the process says what it lacks; the benchmark goes on, and ends.
    assert bench_whisper.main(["finetune", "--dry-run", "--systems", "effasr"]) == 1
    assert "effasr: left out:" in capsys.readouterr().err


def test_what_disagrees_is_not_timed() -> None:
    reference = bench_whisper.Measured(None, {}, {"loss": 2.0}, losses=[2.0, 1.0])
    for losses, message in (([2.0, 1.0], None), ([2.0, 1.01], "differs"), ([2.0, math.nan], "nan")):
        one = bench_whisper.Measured(None, {}, {"loss": 2.0}, losses=losses)
        found = bench_whisper.compare("effasr_silence", one, reference)
        reason = bench_whisper.disagreement("effasr_silence", found, 0.9)
        assert reason is None if message is None else message in reason
    # Other steps, and another function: only the check counts, and it may differ.
    one = bench_whisper.Measured(None, {}, {"loss": 3.0}, losses=[9.0])
    found = bench_whisper.compare("effasr", one, reference)
    assert found == {"loss_difference": 0.5}
    assert bench_whisper.disagreement("effasr", found, 0.9) is None
    reference = bench_whisper.Measured(None, {}, {"tokens": [[1, 2, 3, 4]]})
    one = bench_whisper.Measured(None, {}, {"tokens": [[1, 2, 9, 4]]})
    found = bench_whisper.compare("ctranslate2_float32", one, reference)
    assert found == {"agreement": 0.5}
    assert "only 0.5000" in bench_whisper.disagreement("ctranslate2_float32", found, 0.9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["finetune", "--batch", "0"], "`--batch` must be at least 1, but is 0"),
        (["transcribe", "--utterances", "3"], "`--utterances` must be at least --batch = 8"),
        (["finetune", "--systems", "ctranslate2_int8"], "of finetune must be among transformers"),
        (["finetune", "--lengths", "missing.txt"], "missing.txt"),
    ],
)
def test_wrong_options(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_whisper.main(options) == 2
    assert message in capsys.readouterr().err
