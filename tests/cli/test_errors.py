"""What is wrong with a recipe, a manifest or a recording: one line that says what to do."""

import pytest

from effasr.cli.main import explain
from effasr.training.run_dir.run_directory import read_lines

CHINESE = {"text": "你好世界"}


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


def test_prepare_with_nothing_left(effasr, workplace, manifest, tmp_path):
    path = manifest(CHINESE, {"lang": "fr", "id": "french"})
    tokenizer = workplace.folder / "tokenizer"
    failed = effasr("prepare", path, tmp_path / "out", "--tokenizer", tokenizer)
    assert failed.code == 2
    assert f"no utterance is left; {tmp_path}/out/dropped.jsonl has the reasons" in failed.error
    reasons = [line["reason"] for line in read_lines(tmp_path / "out" / "dropped.jsonl")]
    assert reasons == ["unknown_text", "unknown_language"]
    assert "The commonest is unknown_text, such as " in failed.error
    options = ("--tokenizer", tokenizer, "--language-map")
    done = effasr("prepare", path, tmp_path / "mapped", *options, "fra=en,xx=en")
    assert "1 utterances in fr as en" in done.out
    assert "no utterance is in xx, which --language-map names" in done.out
    failed = effasr("prepare", path, tmp_path / "out", *options, "fr=nl")
    assert "`--language-map` must name languages of the tokenizer, but has fr=nl" in failed.error
    for wrong in ("fr", "fr=en,French=de", "fr=Klingon"):
        failed = effasr("prepare", path, tmp_path / "out", *options, wrong)
        assert failed.code == 2
        assert wrong.split(",")[0] in failed.error


@pytest.mark.parametrize("limit", ["model.decoder.max_positions=7", "model.encoder.max_frames=9"])
def test_what_is_too_long_for_the_model_is_dropped_and_not_met_in_training(train, tmp_path, limit):
    done = train(limit, "data.validation=[]", "data.filters.max_dropped=1.0")
    assert done.code == 0, done.err
    lines = read_lines(tmp_path / "runs" / "first" / "dropped.jsonl")
    assert 0 < len(lines) < 24
    assert {line["reason"] for line in lines} == {"over_model_length"}
    assert limit.partition("=")[0].rpartition(".")[2] in lines[0]["details"]


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
