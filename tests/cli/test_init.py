"""A recipe written for a corpus is one that training takes as it is."""

import re
import shlex
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from effasr import checkpoint, config
from effasr.data.features.frame_geometry import Framing
from effasr.data.tokenizer import load_tokenizer
from effasr.planning import initial
from effasr.planning.initial import Initial, StartModel, practice_for, practices, recipe_text
from effasr.training.calibration.trial import Measurement
from effasr.training.config import TrainConfig
from effasr.training.run_dir.run_directory import read_lines
from effasr.untrusted.documents import read_yaml
from tests.cli.conftest import write_rows
from tests.interop.test_wav2vec2 import make_pretrained, make_wav2vec2
from tests.interop.whisper import make_whisper

QUICK = ("training.max_steps=2", "training.device=cpu", "data.workers=0")


def test_the_printed_commands_train_from_the_recipe(effasr, workplace, tmp_path):
    recipe, tokenizer = tmp_path / "mine.yaml", tmp_path / "tokenizer"
    done = effasr(
        "init", workplace.folder / "train", "--dev", workplace.folder / "dev",
        "--output", recipe, "--tokenizer", tokenizer,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert all(len(line) <= 100 for line in done.out.partition("next:")[0].splitlines())
    assert "24 utterances" in done.out
    assert "--init-from MODEL" in done.out
    shown = " ".join(done.out.split())
    speed = re.search(r"by the quartiles of (\d) steps \(median (\S+) s of audio a second", shown)
    assert speed is not None
    assert 2 <= int(speed[1]) <= 8
    assert float(speed[2]) > 0
    assert "# Expected time: " in recipe.read_text()
    lines = done.out.splitlines()
    commands = [shlex.split(line[6:]) for line in lines if line.startswith("next: ")]
    assert [command[:2] for command in commands] == [
        ["effasr", name] for name in ("tokenizer", "train", "evaluate")
    ]
    assert effasr(*commands[0][1:], "--subsampling", 4).code == 0
    trained = effasr(*commands[1][1:], f"output={tmp_path}/runs", *QUICK)
    assert trained.code == 0, trained.err
    assert read_lines(tmp_path / "runs/mine/metrics.jsonl")[-1]["step"] == 2
    # Now that there is a tokenizer, it is the one to use.
    again = effasr(
        "init", workplace.folder / "train", "--output", tmp_path / "again.yaml",
        "--tokenizer", tokenizer, "--no-timing",
    )  # fmt: skip
    assert again.code == 0
    assert "effasr tokenizer" not in again.out
    assert "not measured" in again.out
    assert "# No validation" in (tmp_path / "again.yaml").read_text()
    assert config.load(TrainConfig, tmp_path / "again.yaml").model.encoder.subsampling == 4


@pytest.mark.slow
@pytest.mark.parametrize("row", practices(), ids=lambda row: f"{row.hours} h")
@pytest.mark.representative(row=practices()[0])
def test_every_size_trains(row, effasr, workplace, tmp_path):
    result = Initial.of(
        [workplace.folder / "train"],
        dev=[workplace.folder / "dev"],
        name="sized",
        tokenizer=workplace.folder / "tokenizer",
    )
    whole = replace(result.request, practice=practice_for(row.hours), hours=float(row.hours))
    recipe = tmp_path / "sized.yaml"
    recipe.write_text(recipe_text(whole))
    settings = config.load(TrainConfig, recipe)
    assert settings.training.max_steps == row.steps(row.hours)
    assert settings.model.encoder.width == row.width
    # The corpus is tiny: its batches must be, too.
    trained = effasr(
        "train", recipe, f"output={tmp_path}/runs", *QUICK,
        "data.frame_budget=100", "data.micro_batches=1", "evaluation.max_utterances=1",
    )  # fmt: skip
    assert trained.code == 0, trained.err
    assert read_lines(tmp_path / "runs/sized/metrics.jsonl")[-1]["step"] == 2
    shutil.rmtree(tmp_path / "runs")


@pytest.mark.parametrize(
    ("hours", "size"), [(0.2, 3), (9.9, 3), (10, 20), (29, 20), (30, 100), (299, 100), (3e5, 1000)]
)
def test_practice_goes_by_hours(hours, size):
    assert practice_for(hours).hours == size


def test_the_time_is_a_median_with_a_range_and_has_validations(workplace, monkeypatch):
    speeds = (1.0, 50.0, 60.0, 80.0, 100.0)
    asked = []

    def measured(request):
        asked.append(request)
        return Measurement(fits=True, speeds=speeds)

    monkeypatch.setattr(initial, "measure", measured)
    folder = workplace.folder
    made = Initial.of([folder / "train"], dev=[folder / "dev"], tokenizer=folder / "tokenizer")
    alone = Initial.of([folder / "train"], tokenizer=folder / "tokenizer")
    hours = made.request.audio_hours
    text = alone.expected_time()
    assert text.startswith(initial.duration_text(hours * 3600 / 60))
    assert f"{initial.duration_text(hours * 45)} to {initial.duration_text(hours * 72)} by" in text
    # Steps as in training, after some that are not timed.
    assert asked[0].warmup == 4
    assert asked[0].micro_batches == 1
    assert made.dev_seconds > 0
    longer = replace(made, dev_seconds=3 * hours * 3600).expected_time()
    assert longer.startswith(initial.duration_text(21 * hours * 60))


@pytest.mark.parametrize(
    ("load", "threads", "remark"), [(4, 2, False), (9, 1, False), (9, 2, True)]
)
def test_threads_on_a_busy_machine_are_warned_of(load, threads, remark, workplace, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(initial, "measure", lambda request: Measurement(fits=True, speeds=(9.0,)))
    folder = workplace.folder
    text = Initial.of([folder / "train"], tokenizer=folder / "tokenizer").expected_time()
    assert ("other programs ran, load 9" in text) == (load == 9)
    assert ("OMP_NUM_THREADS=1" in text) == remark


@pytest.mark.parametrize(
    ("frames", "tokens", "kept"),
    [(40, 9, 2), (900, 9, 1), (40, 2000, 1), (900, 2000, 1), (None, None, 0)],
)
def test_what_the_model_cannot_take_is_not_timed(frames, tokens, kept, monkeypatch):
    """Training drops it: too much speech, or a text of more tokens than the decoder has."""
    asked = []
    monkeypatch.setattr(
        initial,
        "measure",
        lambda request: asked.append(request) or Measurement(fits=True, speeds=(9.0,)),
    )
    recipe = config.load(TrainConfig, "small", [
        "model.encoder.max_frames=500", "data.frame_budget=1000",
    ])  # fmt: skip
    lengths = [(30, 8), (frames, tokens)] if kept else [(30, 2000)]
    columns = map(np.array, zip(*lengths, strict=True))
    speeds = initial.audio_seconds_per_second(recipe, 64, *columns, torch.device("cpu"))
    assert len(speeds) == len(asked) == min(kept, 1)
    assert {pair for batch in asked for rows in batch.workload.timed for pair in rows} == {
        pair for pair in lengths if pair[0] <= 500 and pair[1] <= 1024
    }


@pytest.mark.parametrize(("repeated", "share"), [(20, 100), (3, 15), (2, None), (0, None)])
def test_a_dev_set_with_texts_of_train_is_named(repeated, share, workplace, tmp_path):
    rows = [{"audio_filepath": f"{n}.wav", "duration": 1.0, "text": f"low {n}"} for n in range(40)]
    write_rows(tmp_path / "train.jsonl", rows[:20])
    write_rows(dev := tmp_path / "dev.jsonl", rows[20 - repeated : 40 - repeated])
    made = Initial.of([tmp_path / "train.jsonl"], dev=[dev], tokenizer=workplace.folder / "new")
    text = " ".join(" ".join(made.describe()).split())
    assert ("TRAIN has texts of" in text) == (share is not None)
    assert share is None or f"dev.jsonl ({share} %), too" in text


def test_steps_grow_with_the_hours_and_averages_with_the_steps():
    for row in practices():
        assert row.steps(0.01) == row.least_steps
        assert row.least_steps < row.steps(1.5 * row.hours) < row.steps(2.0 * row.hours)
        assert row.steps(1e9) == 300_000
        assert 0.9 <= row.ema_decay(row.least_steps) < row.ema_decay(10**8) < 1


def test_the_batch_has_the_seconds_of_practice_and_holds_the_longest(workplace):
    made = Initial.of([workplace.folder / "train"], tokenizer=workplace.folder / "none").request
    for row in practices():
        for subsampling in (4, 8):
            for device in ("cpu", "cuda"):
                requested = replace(
                    made, practice=row, hours=float(row.hours), longest=39.0,
                    framing=Framing(subsampling=subsampling), device=device,
                )  # fmt: skip
                budget, _ = requested.frames
                assert budget * subsampling / 100 >= 39.0 / 0.9
                expected = max(row.batch_seconds, 39.0 / 0.9)
                assert requested.step_seconds == pytest.approx(expected, rel=0.15)


def test_an_utterance_counts_with_the_silence_that_extends_it(workplace):
    """A Whisper computes 30 s of each utterance, however short it is."""
    made = Initial.of([workplace.folder / "train"], tokenizer=workplace.folder / "none").request
    requested = replace(
        made, practice=practices()[1], hours=20.0, utterances=18_000, longest=6.0,
        framing=Framing(subsampling=2, minimum=1500), device="cpu",
    )  # fmt: skip
    budget, count = requested.frames
    assert budget % 1500 == 0
    utterances = budget * count / 1500
    assert requested.step_seconds == pytest.approx(4.0 * utterances)
    assert requested.step_seconds == pytest.approx(practices()[1].batch_seconds, rel=0.15)


def test_fine_tuning_takes_model_and_tokenizer_from_the_run(effasr, workplace, tmp_path):
    recipe = tmp_path / "tuned.yaml"
    done = effasr(
        "init", workplace.folder / "train", "--dev", workplace.folder / "dev",
        "--init-from", workplace.run, "--output", recipe, "--no-timing",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "fine-tuning" in done.out
    assert "effasr tokenizer" not in done.out
    trained = effasr("train", recipe, f"output={tmp_path}/runs", *QUICK)
    assert trained.code == 0, trained.err
    settings = config.load(TrainConfig, tmp_path / "runs/tuned/config.yaml")
    assert settings.model == config.load(TrainConfig, workplace.run / "config.yaml").model


@pytest.mark.parametrize(
    "make",
    [
        make_whisper,
        partial(make_wav2vec2, kind="base"),
        partial(make_pretrained, name="Wav2Vec2ForPreTraining"),
    ],
    ids=["whisper", "wav2vec2", "pretrained"],
)
def test_an_encoder_gets_a_new_head(effasr, workplace, tmp_path, make):
    (tmp_path / "source").mkdir()
    make(tmp_path / "source")
    assert effasr("import", tmp_path / "source", tmp_path / "model").code == 0
    recipe, tokenizer = tmp_path / "headed.yaml", tmp_path / "tokenizer"
    done = effasr(
        "init", workplace.folder / "train", "--dev", workplace.folder / "dev", "--head", "ctc",
        "--init-from", tmp_path / "model", "--tokenizer", tokenizer, "--output", recipe,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "s of audio a second" in done.out
    lines = done.out.splitlines()
    made, train, scored = (shlex.split(x[6:]) for x in lines if x.startswith("next: "))
    assert effasr(*made[1:]).code == 0
    # The window of this Whisper is 2 s.
    trained = effasr(*train[1:], f"output={tmp_path}/runs", *QUICK, "data.max_duration=2")
    assert trained.code == 0, trained.err
    assert effasr("evaluate", tmp_path / "runs/headed", *scored[3:]).code == 0
    model = checkpoint.load_model(checkpoint.resolve(tmp_path / "runs/headed"))
    assert model.tokenizer.pieces() == load_tokenizer(tokenizer).pieces()
    assert model.model.ctc_head is not None
    assert model.model.decoder is None


@pytest.mark.parametrize(
    ("parameters", "is_whisper", "memory", "lr", "has_adapters"),
    [
        (37_800_000, True, 8e9, 3.75e-5, False),
        (72_600_000, True, 8e9, 2.5e-5, False),
        (72_600_000, True, 2e9, 3e-4, True),
        (1_550_000_000, True, 80e9, 4.375e-6, False),
        (180_000_000, False, 8e9, 2e-5, False),
    ],
)
def test_fine_tuning_follows_the_size_and_the_memory(
    workplace, tmp_path, parameters, is_whisper, memory, lr, has_adapters
):
    folder = workplace.folder
    made = Initial.of(
        [folder / "train"], dev=[folder / "dev"], tokenizer=folder, init_from=workplace.run
    )
    assert made.request.start is not None
    model = checkpoint.load_model(checkpoint.resolve(workplace.run)).model
    assert made.request.start.parameters == sum(p.numel() for p in model.state_dict().values())
    start = StartModel(
        path="models/start", parameters=parameters, is_whisper=is_whisper, silence=30.0,
        memory=int(memory),
    )  # fmt: skip
    for framing in (Framing(subsampling=2, minimum=1500), Framing(subsampling=2, minimum=500)):
        path = tmp_path / "recipe.yaml"
        path.write_text(recipe_text(replace(made.request, start=start, framing=framing)))
        settings = read_yaml(path)
        assert float(settings["optimizer"]["lr"]) == pytest.approx(lr)
        assert ("lora" in settings) == has_adapters
        # The window for which the audio is counted, where it is not the model's.
        window = settings.get("model", {"features": {"minimum_s": 30.0}})["features"]["minimum_s"]
        assert window == framing.minimum * framing.seconds
        training = settings["training"]
        assert training["patience"] == 4
        assert training["max_steps"] / training["validate_every"] == pytest.approx(10, rel=0.3)


def test_a_tokenizer_of_other_languages_is_refused(effasr, workplace, manifest, tmp_path):
    german = manifest({"lang": "de"})
    for provided in (
        ("--tokenizer", workplace.folder / "tokenizer"),
        ("--init-from", workplace.run),
    ):
        done = effasr("init", german, *provided, "--output", tmp_path / "new.yaml", "--no-timing")
        assert "`TRAIN` must have texts in languages of the tokenizer (en" in done.error
    assert not (tmp_path / "new.yaml").exists()
