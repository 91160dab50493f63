import gc
import itertools
import json
import os
import resource
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch

from effasr.checkpoint import load_model, resolve
from effasr.data.filters.config import FilterConfig
from effasr.data.manifest.reader import read
from effasr.data.tokenizer import train_tokenizer
from effasr.evaluation.evaluate import evaluate
from effasr.evaluation.metric import Metric
from effasr.evaluation.result import Evaluation
from effasr.optim.schedules import ScheduleConfig
from effasr.training import resolve as resolving
from effasr.training import trainer, validation
from effasr.training.checkpointing.state import RunProgress
from effasr.training.config import EvaluationConfig
from effasr.training.diagnostics.probe import ProbeSums
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.trainer import run
from tests.training.conftest import at_step


def checkpoint_steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*"))


def poison(monkeypatch, number: int) -> list[str]:
    names = []
    train_step = trainer.train_step

    def poisoned(train_state, batches, step, **options):
        if step + 1 == number:
            names.append(batches[0].ids[0])
            batches[0].audio.values[50] = torch.nan
        return train_step(train_state, batches, step, **options)

    monkeypatch.setattr(trainer, "train_step", poisoned)
    return names


@pytest.mark.parametrize(
    ("data", "count", "message"),
    [
        ({"min_duration": 0.5, "filters": FilterConfig(max_dropped=0.5)}, 14, None),
        ({"min_duration": 0.5, "filters": FilterConfig(max_dropped=0.1)}, 14,
         "too_short leaves out 14 of 40 .* listed in .*dropped"),
        ({"min_duration": 0.5, "filters": FilterConfig(max_dropped=0.1), "frame_budget": "auto"},
         14, "too_short leaves out 14 of 40 .* listed in .*dropped"),
        ({"filters": FilterConfig(languages=("de",), max_dropped=1)}, 40,
         "no utterance can be .* All are listed in .*dropped"),
    ],
)  # fmt: skip
def test_utterances_that_cannot_be_used_are_listed(make_config, tmp_path, data, count, message):
    config = make_config(data=data, training={"max_steps": 1})
    if message is None:
        assert run(config) == 0
    else:
        with pytest.raises(ValueError, match=message):
            run(config)
    dropped = read_lines(tmp_path / "run" / "dropped.jsonl")
    assert len(dropped) == count
    assert count > 14 or {line["reason"] for line in dropped} == {"too_short"}


def test_audio_that_proves_unreadable_is_left_out_and_listed(make_config, tones, tmp_path):
    """Its header is sound, so nothing shows before it is due."""
    line = json.loads((tones / "train.jsonl").read_text().splitlines()[0])
    audio = np.zeros(int(line["duration"] * 16_000), dtype=np.float32)
    audio[9] = np.nan
    soundfile.write(tmp_path / "broken.wav", audio, 16_000, subtype="FLOAT")
    manifest = tmp_path / "train.jsonl"
    good = (tones / "train.jsonl").read_text().replace("train-", f"{tones}/train-")
    manifest.write_text(json.dumps(line | {"audio_filepath": "broken.wav"}) + "\n" + good)
    data = {"train": str(manifest), "on_bad_audio": "skip"}
    assert run(make_config(data=data, training={"log_every": 5, "max_steps": 7})) == 0
    lines = read_lines(tmp_path / "run" / "unreadable.jsonl")
    assert lines
    assert {(line["id"], line["reason"]) for line in lines} == {("broken", "not_finite_audio")}
    assert sorted(line["step"] for line in lines) == [line["step"] for line in lines]
    with pytest.raises(ValueError, match="broken"):
        run(make_config(data={"train": str(manifest)}, name="strict"))


def test_a_stop_before_the_first_step_ends_at_once(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(resolving, "load_corpus", lambda *_: os.kill(os.getpid(), signal.SIGUSR2))
    assert run(make_config()) == 0
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("what", ["weights", "loss"])
def test_a_model_that_is_not_finite_is_never_the_best(
    make_config, tmp_path, tones, monkeypatch, capsys, what
):
    if what == "weights":
        train_step = trainer.train_step

        def poisoned(train_state, batches, step, **options):
            if step == 3:
                next(train_state.model.parameters()).data[:] = torch.nan
            return train_step(train_state, batches, step, **options)

        monkeypatch.setattr(trainer, "train_step", poisoned)
    else:
        monkeypatch.setattr(ProbeSums, "summary", lambda sums: {"cross_entropy": torch.inf})
    settings = {"max_steps": 4, "validate_every": 4, "log_every": 1, "on_nan": "skip"}
    dev = {"validation": str(tones / "test.jsonl")}
    assert run(make_config(data=dev, training=settings)) == 0
    assert not (tmp_path / "run" / "checkpoints" / "best").exists()
    (line,) = read_lines(tmp_path / "run" / "validation.jsonl")
    visible = capsys.readouterr().err
    if what == "weights":
        assert "step 4: the weights are not finite; they were at step 3." in visible
        assert visible.count("1 updates skipped") == 1
        assert "; 1 updates were skipped, see skipped.jsonl" in visible
    else:
        assert line["cross_entropy"] is None
        assert "the validation loss is not finite" in visible


def test_nan_stops_the_run_and_names_the_utterance(make_config, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        names = poison(patch, 8)
        assert run(make_config(training={"log_every": 50, "checkpoint_every": 4})) == 1
    error = capsys.readouterr().err
    assert f"failed: step 8: the loss is not finite; utterances: {names[0]}." in error
    folder = tmp_path / "run"
    assert checkpoint_steps(folder) == [4]
    (line,) = read_lines(folder / "skipped.jsonl")
    assert line == {"step": 8, "reason": "loss", "utterances": names}
    state = load_model(resolve(folder)).model.state_dict()
    assert all(tensor.isfinite().all() for tensor in state.values())
    assert run(make_config()) == 0
    assert read_lines(folder / "skipped.jsonl") == []


def test_a_run_goes_on_only_as_the_run_it_was(make_config, tmp_path, tones, caplog):
    assert run(make_config(training={"max_steps": 2})) == 0
    train_tokenizer({"en": ["a b c d e f g h"]}, tmp_path / "other", vocab_size=24)
    shutil.copytree(tones / "tokenizer", tmp_path / "moved")
    for change, message in (
        ({"data": {"frame_budget": 61}}, r"`data\.frame_budget` must stay 60.* but is 61"),
        ({"seed": 4}, r"`seed` must stay 3.* training\.restart=true"),
        ({"data": {"train": f"{tones}/test.jsonl"}}, "`data.train` must hold the same utterances"),
        ({"data": {"tokenizer": f"{tmp_path}/other"}}, "`data.tokenizer` must stay .* has other"),
        ({"data": {"tokenizer": f"{tmp_path}/nowhere"}}, "nowhere"),
    ):
        with pytest.raises(ValueError, match=message):
            run(make_config(**change))
    moved = {"tokenizer": str(tmp_path / "moved")}
    assert run(make_config(data=moved, training={"max_steps": 3})) == 0
    assert "training.max_steps: 2 -> 3" in caplog.text
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]
    # A run that met bad audio can go on without it.
    assert run(make_config(data={"on_bad_audio": "skip"}, training={"max_steps": 4})) == 0
    assert run(make_config(seed=4, training={"max_steps": 2, "restart": True})) == 0
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
    assert checkpoint_steps(tmp_path / "run.old-1") == [2, 3, 4]
    assert "restart: false" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([{"lang": "nl"}] * 6, "6 of 6 utterances cannot be scored, .* the first: .*nl"),
        ([{"lang": "nl"}] * 2, "2 of 6 utterances cannot be scored, over the 20 %"),
        ([{"text": "..."}] * 6, "no reference has a word"),
    ],
)
def test_a_validation_set_that_cannot_be_scored_is_refused_at_the_start(
    make_config, tones, tmp_path, changes, reason
):
    rows = [json.loads(line) for line in (tones / "test.jsonl").read_text().splitlines()]
    for row, change in zip(rows, changes, strict=False):
        row |= change
    for row in rows:
        row["audio_filepath"] = str(tones / row["audio_filepath"])
    path = tmp_path / "dev.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=reason):
        run(make_config(data={"validation": str(path)}))


def test_a_sample_is_even_and_fixed_by_the_seed():
    samples = [validation.even_sample(range(1000), 10, seed) for seed in (0, 0, 1)]
    assert samples[0] == samples[1] != samples[2]
    for sample in samples:
        assert {b - a for a, b in itertools.pairwise(sample)} == {100}
    assert validation.even_sample(range(3), None, 0) == validation.even_sample(range(3), 5, 0)


def test_best_belongs_to_the_validation_sets_and_settings(make_config, tones, tmp_path, caplog):
    def start(steps: int, **settings) -> None:
        loop = {"max_steps": steps, "validate_every": 2, "checkpoint_every": 2}
        data = {"validation": str(tones / "test.jsonl")}
        assert run(make_config(data=data, training=loop, **settings)) == 0

    start(2)
    best = tmp_path / "run" / "checkpoints" / "best"
    first = best.read_text()
    start(4)
    assert best.read_text() == first
    assert "chosen anew" not in caplog.text
    start(6, evaluation=EvaluationConfig(max_utterances=3))
    assert "other validation sets or settings" in caplog.text
    assert "step_00000006" in best.read_text()


def test_a_restart_with_a_mistake_leaves_the_earlier_run(make_config, tmp_path):
    assert run(make_config(training={"max_steps": 2})) == 0
    before = sorted(file.name for file in (tmp_path / "run").iterdir())
    with pytest.raises(ValueError, match="no such file"):
        run(make_config(data={"train": "missing.jsonl"}, training={"restart": True}))
    with pytest.raises(ValueError, match="no such file"):
        run(make_config(data={"validation": "missing.jsonl"}, training={"restart": True}))
    assert sorted(file.name for file in (tmp_path / "run").iterdir()) == before
    assert run(make_config(training={"max_steps": 2, "restart": True})) == 0
    assert (tmp_path / "run.old-1" / "checkpoints" / "latest").exists()


def test_what_a_changed_schedule_does_to_the_rate_is_said(make_config, caplog):
    schedule = ScheduleConfig(name="cosine", warmup_steps=20)
    assert run(make_config(training={"max_steps": 2}, schedule=schedule)) == 0
    assert "schedule.warmup_steps=20, is longer than the run of 2 steps" in caplog.text
    schedule = ScheduleConfig(name="cosine", warmup_steps=0)
    assert run(make_config(training={"max_steps": 4}, schedule=schedule)) == 0
    assert "after step 2 the learning rate is " in caplog.text


@pytest.mark.parametrize(("budget", "is_advised"), [(60, False), (4000, True)])
def test_a_corpus_that_fills_little_of_a_batch_is_said(make_config, capsys, budget, is_advised):
    assert run(make_config(data={"frame_budget": budget}, training={"max_steps": 1})) == 0
    assert ("computed in vain: set data.frame_budget to" in capsys.readouterr().err) == is_advised


def test_validation_is_evaluation_and_marks_the_best(make_config, tmp_path, tones, monkeypatch):
    test = str(tones / "test.jsonl")
    rates = iter([0.5, 0.2, 0.9])
    monkeypatch.setattr(Evaluation, "value", lambda *_: next(rates))
    config = make_config(
        data={"validation": test}, training={"validate_every": 4, "keep": 1, "max_steps": 12}
    )
    assert run(config) == 0
    folder = tmp_path / "run"
    lines = read_lines(folder / "validation.jsonl")
    assert [(line["step"], line["set"]) for line in lines] == [
        (4, "test"),
        (8, "test"),
        (12, "test"),
    ]
    assert checkpoint_steps(folder) == [8, 12]
    best = resolve(folder)
    assert best.name == "step_00000008"
    loaded = load_model(best)
    again = evaluate(loaded.model, loaded.tokenizer, read(test)).summary()
    assert again["wer"] == lines[1]["wer"]
    assert again["words"] == lines[1]["words"] > 0
    for name in ("wer.json", "hypotheses.jsonl"):
        assert (folder / "evaluation" / "test" / name).is_file()


def test_the_best_is_marked_by_the_next_start(make_config, tmp_path, tones, monkeypatch):
    rates = iter([0.5, 0.9, 0.8])
    monkeypatch.setattr(Evaluation, "value", lambda *_: next(rates))
    data = {"validation": str(tones / "test.jsonl")}
    # A checkpoint in the background could be killed before or after the next validation.
    training = {"validate_every": 4, "keep": 1, "async_save": False}

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trainer.RunCheckpoints, "mark_best", killed)
        with pytest.raises(KeyboardInterrupt):
            run(make_config(data=data, training=training))
    assert run(make_config(data=data, training=training)) == 0
    assert checkpoint_steps(tmp_path / "run") == [4, 12]
    assert resolve(tmp_path / "run").name == "step_00000004"


@pytest.mark.extended
def test_memory_does_not_grow_over_the_steps_of_a_run(make_config, tones, monkeypatch):
    """With validations and checkpoints; batches that are never freed exceed the limit."""
    resident: list[int] = []

    def measure():
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident.append(pages * resource.getpagesize())

    for step in (100, 300):
        at_step(monkeypatch, step, measure)
    data = {"validation": [str(tones / "test.jsonl")]}
    loop = {"max_steps": 300, "checkpoint_every": 50, "validate_every": 50, "log_every": 10}
    assert run(make_config(data=data, training=loop)) == 0
    settled, last = resident
    assert last - settled < 12 << 20


@pytest.mark.parametrize(
    ("best", "silence", "is_worse", "remedy"),
    [
        (0.3, 0, False, ""),
        (0.5, 0, True, "minimum_s=10 data.frame_budget=2500"),
        (0.5, 10, True, ""),
    ],
)
def test_a_whisper_that_became_worse_is_named(best, silence, is_worse, remedy, caplog):
    judge = SimpleNamespace(metric=Metric("wer", "WER"))
    model = SimpleNamespace(features=SimpleNamespace(minimum_s=silence))
    config = SimpleNamespace(name="mine", model=model, data=SimpleNamespace(frame_budget=1000))
    judged = SimpleNamespace(validate=judge, config=config)
    trainer.Trainer._warn_if_worse(judged, RunProgress(before=0.4, best=best))
    assert ("better than the WER of 40.00 % " in caplog.text) == is_worse
    assert remedy in caplog.text
    assert ("name=mine2" in caplog.text) == bool(remedy)
