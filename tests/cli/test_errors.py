"""What is wrong with a manifest, a model or an output: one line that says what to do."""

import shutil

import pytest

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
    ("file", "content", "message"),
    [
        ("model.safetensors", "abc", "model.safetensors is damaged"),
        ("tokenizer", None, "tokenizer: holds neither"),
        ("tokenizer/en.model", "abc", "is no SentencePiece model"),
        ("model.yaml", None, "must be a model directory or a run with a checkpoint"),
        ("", None, "must be a model directory or a run with a checkpoint"),
    ],
)
def test_a_damaged_model_directory(effasr, workplace, model, tmp_path, file, content, message):
    path = model / file
    if content is None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    else:
        path.write_text(content)
    out = tmp_path / "out"
    for outcome in (
        effasr("evaluate", "--run", model, "--manifest", workplace.folder / "dev"),
        effasr("transcribe", "--run", model, workplace.wav),
        effasr("export", model, out),
    ):
        assert outcome.code == 2
        assert message in outcome.error
        assert outcome.out == ""
    assert not out.exists()


def test_many_failures_do_not_flood_the_terminal(effasr, workplace, manifest, tmp_path):
    hostile = {"duration": 1e300}, {"offset": 1e9}, {"audio_filepath": "zero\0byte.wav"}
    rows = *({"lang": "fr"} for _ in range(47)), *hostile
    path = manifest({}, *(row | {"id": str(number)} for number, row in enumerate(rows)))
    command = ("evaluate", "--run", workplace.run, "--manifest", path, "--output", tmp_path / "out")
    done = effasr(*command)
    assert done.code == 1
    assert done.err == "effasr evaluate: 50 utterances failed and are not counted\n"
    assert "50 failed and are not counted" in done.out
    assert "  and 30 more\n" in done.out
