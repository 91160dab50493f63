"""What is wrong with a recipe, a manifest or a recording: one line that says what to do."""

import pytest

from effasr.cli.main import explain
from effasr.training.run_dir.run_directory import read_lines

CHINESE = {"text": "你好世界"}

BAD_AUDIO = {
    "gone.wav": ("missing_audio", "there is no such file"),
    "garbage.wav": ("unreadable_audio", "not a readable audio file"),
    "garbage.flac": ("unreadable_audio", "not a readable audio file"),
    "empty.wav": ("empty_audio", "the file is empty"),
    "no-samples.wav": ("empty_audio", "the file holds no samples"),
    "cut-short.flac": ("unreadable_audio", "the audio is damaged"),
}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.encoder.layrs=3", "unknown field: did you mean `layers`?"),
        ("model.ctc=1", "`model.ctc` must be true or false, but is 1"),
        ("optimizer.lr=.nan", "`optimizer.lr` must be a finite number, but is nan"),
        ("training.precision=half", "must be one of 'auto', 'float32', 'bfloat16', but is 'half'"),
        ("model.encoder.heads=3", "model.encoder: `width` must be a multiple of"),
        ("model.encoder.subsampling=6", "`subsampling` must be 4 or 8, but is 6"),
        ("name", "an override must be `path.to.field=value`, but is 'name'"),
        ("--name", "an override must be `path.to.field=value`, but is '--name'"),
        ("name=a/b", "`name` must be usable as a folder's name"),
        ("data.train=gone.jsonl", "gone.jsonl: there is no such file or folder"),
        ("data.train=[]", "`data.train` must name at least one manifest"),
        ("data.validation=gone.jsonl", "gone.jsonl: there is no such file or folder"),
        ("data.tokenizer=gone", "train a tokenizer with `effasr tokenizer MANIFEST OUT`"),
        ("data.tokenizer=''", "`data.tokenizer` must be a folder that `effasr tokenizer` wrote"),
        ("evaluation.normalizer=nope", "must be one of none, basic, whisper_english, open_asr_lea"),
        ("init_from=gone", "gone must be a model directory or a run with a checkpoint"),
        ("training.device=tpu", "`training.device` must be one of 'auto', 'cpu', 'cuda'"),
    ],
)
def test_a_wrong_field(train, tmp_path, override, message):
    failed = train(override)
    assert failed.code == 2
    assert message in failed.error
    assert not (tmp_path / "runs").exists()


def test_a_budget_for_nothing_leaves_the_list_alone(train, tmp_path):
    failed = train("data.frame_budget=2")
    assert failed.code == 2
    assert "no utterance can be trained on (24 dropped; the first: " in failed.error
    (listed,) = (tmp_path / "runs").rglob("*.*")
    assert listed.name == "dropped.jsonl"
    assert len(read_lines(listed)) == 24


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("dema", "did you mean `demo`?"),
        ("x/y/z", "the recipes are canary_180m_flash, "),
        (b"\xff\xfe", "must be UTF-8"),
        (b"data: 3", "`data` must be a mapping (DataConfig), but is 3"),
    ],
)
def test_a_wrong_recipe(effasr, tmp_path, recipe, message):
    if isinstance(recipe, bytes):
        (tmp_path / "recipe.yaml").write_bytes(recipe)
        recipe = tmp_path / "recipe.yaml"
    failed = effasr("train", recipe)
    assert failed.code == 2
    assert message in failed.error


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "holds no utterances", ),
        (("{oops",), ":1: not valid JSON"),
        (("[]",), ":1: must be a JSON object, but is a list"),
        (('{"path": "a.wav"}',), ":1: neither a NeMo line (no `audio_filepath`) nor a lhotse cut"),
    ],
)  # fmt: skip
def test_a_wrong_manifest(effasr, workplace, train, manifest, tmp_path, lines, message):
    path = manifest(*lines)
    commands = {
        "prepare": (path, tmp_path / "out"),
        "tokenizer": (path, tmp_path / "out"),
        "evaluate": ("--run", workplace.run, "--manifest", path),
    }
    for command, arguments in commands.items():
        failed = effasr(command, *arguments)
        assert failed.code == 2
        assert (message if lines else "no utterances") in failed.error
    failed = train(f"data.train={path}")
    assert failed.code == 2
    assert (message if lines else "no utterance can be trained on (0 dropped)") in failed.error


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", ":2: not valid JSON"),
        ("[]", ":2: must be a JSON object, but is a list"),
        ({"duration": "long"}, ":2: `duration` must be a number of seconds, but is 'long'"),
        ({"text": 3}, ":2: `text` must be a string, but is 3"),
        ({"id": "a"}, ":2: the id 'a' is taken by an earlier line"),
    ],
)
def test_prepare_lists_a_malformed_line(effasr, manifest, tmp_path, line, message):
    assert effasr("prepare", manifest({"id": "a"}, line), tmp_path / "out").code == 0
    (dropped,) = read_lines(tmp_path / "out" / "dropped.jsonl")
    assert dropped["reason"] == "malformed_row"
    assert message in dropped["details"]


def test_prepare_drops_bad_audio(effasr, manifest, recordings):
    bad = [{"audio_filepath": str(recordings / name), "id": name} for name in BAD_AUDIO]
    path = manifest({}, *(row | {"duration": None} for row in bad))
    assert effasr("prepare", path, recordings / "out").code == 0
    remaining = dict(BAD_AUDIO)
    for line in read_lines(recordings / "out" / "dropped.jsonl"):
        reason, details = remaining.pop(line["id"])
        assert line["reason"] == reason
        assert details in line["details"]
    assert not remaining


@pytest.mark.parametrize("name", BAD_AUDIO)
def test_training_on_bad_audio_alone(train, manifest, recordings, name):
    path = manifest({"audio_filepath": str(recordings / name), "duration": None})
    failed = train(f"data.train={path}")
    assert failed.code == 2
    *_, line = failed.err.splitlines()
    assert BAD_AUDIO[name][1] in line
    # What is damaged behind a sound header shows when training has begun.
    assert failed.err.count("effasr train: ") == 1
    assert "Traceback" not in failed.err


def test_prepare_with_nothing_left(effasr, workplace, manifest, tmp_path):
    path = manifest(CHINESE, {"lang": "fr", "id": "french"})
    tokenizer = workplace.folder / "tokenizer"
    failed = effasr("prepare", path, tmp_path / "out", "--tokenizer", tokenizer)
    assert failed.code == 2
    assert f"no utterance is left; {tmp_path}/out/dropped.jsonl has the reasons" in failed.error
    reasons = [line["reason"] for line in read_lines(tmp_path / "out" / "dropped.jsonl")]
    assert reasons == ["unknown_text", "unknown_language"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (CHINESE, "the vocabulary spells nothing of '你好世界'"),
        ({"lang": "fr"}, "the language of the speech must be one of en, but is 'fr'"),
        ({"target_lang": "de"}, "the language of the text must be one of en, but is 'de'"),
        ({"text": ""}, "the text is empty"),
        ({"text": "low " * 50}, "CTC needs"),
    ],
)
def test_training_on_texts_that_do_not_fit(train, manifest, change, message):
    failed = train(f"data.train={manifest(change)}")
    assert failed.code == 2
    assert f"(1 dropped; the first: {message}" in failed.error


@pytest.mark.parametrize("limit", ["model.decoder.max_positions=7", "model.encoder.max_frames=9"])
def test_what_is_too_long_for_the_model_is_dropped_and_not_met_in_training(train, tmp_path, limit):
    done = train(limit, "data.validation=[]", "data.filters.max_dropped=1.0")
    assert done.code == 0, done.err
    lines = read_lines(tmp_path / "runs" / "first" / "dropped.jsonl")
    assert 0 < len(lines) < 24
    assert {line["reason"] for line in lines} == {"over_model_length"}
    assert limit.partition("=")[0].rpartition(".")[2] in lines[0]["details"]


def test_a_run_goes_on_only_with_its_own_model(effasr, workplace):
    failed = effasr("train", workplace.recipe, "model.encoder.width=32")
    assert failed.code == 2
    assert "`model.encoder.width` must stay 16, as in the checkpoint of this run" in failed.error
    assert "training.restart=true" in failed.error


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.encoder.subsampling=4", "encoder.subsampling.depthwise2.weight"),
        ("model.encoder.width=32", "Leave `model` out of the recipe"),
    ],
)
def test_weights_of_another_architecture_are_refused_by_name(train, model, override, message):
    failed = train(f"init_from={model}", "data.tokenizer=''", override)
    assert failed.code == 2
    assert "of another architecture, in " in failed.error
    assert message in failed.error
    assert len(failed.error) < 600


def test_the_error_of_a_file_is_one_line():
    error = FileNotFoundError(2, "No such file or directory", "a\nb.wav")
    assert explain(error) == "a\\nb.wav: No such file or directory."
