"""Runs that pretrain an encoder on audio alone, and runs that start from them."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import soundfile
import torch

from effasr import checkpoint
from effasr import config as configuration
from effasr.data.tokenizer import NoTokenizer
from effasr.decoding.checks import choose_method
from effasr.model.config import ModelConfig
from effasr.training import build
from effasr.training.config import LossConfig, TrainConfig
from effasr.training.resolve import find_tokenizer, resolve_config
from effasr.training.run_dir.run_directory import RunDirectory, read_lines
from effasr.training.run_dir.run_log import RunLog
from effasr.training.trainer import run
from effasr.training.untranscribed.pretraining import CodeUse, LossResult, entropy
from tests.training.conftest import BEST_RQ, published


def test_damaged_audio_of_a_validation_set_is_counted(make_pretraining, tones, tmp_path):
    """Its header is sound, so nothing shows before the validation."""
    rows = [json.loads(line) for line in (tones / "test.jsonl").read_text().splitlines()]
    first, *whole = [row | {"audio_filepath": f"{tones}/{row['audio_filepath']}"} for row in rows]
    broken = np.full(int(first["duration"] * 16_000), np.nan, dtype=np.float32)
    soundfile.write(tmp_path / "broken.wav", broken, 16_000, subtype="FLOAT")
    damaged = [first | {"audio_filepath": "broken.wav"}]
    sets = {"whole": whole, "mixed": damaged + whole, "damaged": damaged}
    for name, rows in sets.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"validation": [f"{tmp_path}/{name}.jsonl" for name in sets]}
    assert run(make_pretraining(data=data, training={"max_steps": 1, "validate_every": 1})) == 0
    whole, mixed, damaged = read_lines(tmp_path / "run/validation.jsonl")
    assert (whole["failed"], mixed["failed"], damaged["failed"]) == (0, 1, 1)
    assert mixed["cross_entropy"] == whole["cross_entropy"]
    assert damaged["cross_entropy"] is None


def test_the_loss_falls_and_starts_at_that_of_guessing(make_pretraining, tones, tmp_path):
    training = {"max_steps": 60, "log_every": 10, "validate_every": 30, "ema_decay": None}
    data = {"validation": str(tones / "test.jsonl")}
    config = make_pretraining(training=training, data=data)
    assert run(replace(config, optimizer=replace(config.optimizer, lr=5e-3))) == 0
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    # Xavier's weights give logits of variance 2 or so to normalised frames.
    assert lines[0]["cross_entropy"] < math.log(BEST_RQ.codes) + 1.5
    assert lines[-1]["cross_entropy"] < lines[0]["cross_entropy"] - 0.3
    for line in lines:
        assert 0 < line["code_entropy_0"] <= math.log(BEST_RQ.codes)
        assert line["code_perplexity_0"] == pytest.approx(math.exp(line["code_entropy_0"]))
        assert line["tokens"] == 0
        assert line["useful_tflops"] > 0
    validations = read_lines(tmp_path / "run" / "validation.jsonl")
    assert [line["step"] for line in validations] == [30, 60]
    path = tmp_path / "run" / "checkpoints" / "step_00000060"
    state = torch.load(path / "training.pt", weights_only=True)
    assert state["best"] == min(line["cross_entropy"] for line in validations)
    # It writes no text.
    loaded = checkpoint.load_model(path)
    assert isinstance(loaded.tokenizer, NoTokenizer)
    with pytest.raises(ValueError, match="pretrained on audio alone"):
        choose_method(loaded.model, "auto")
    with pytest.raises(ValueError, match="fine-tune it with init_from"):
        loaded.tokenizer.encode("one", "en")


@pytest.mark.parametrize("ctc", [True, False])
def test_another_model_takes_the_encoder(make_pretraining, make_config, tones, tmp_path, ctc):
    assert run(make_pretraining(name="first", training={"max_steps": 2})) == 0
    source = tmp_path / "first"
    local = {"width": 16, "layers": 1, "heads": 2, "feed_forward": 16}
    mapping = configuration.to_mapping(make_config(name="second", training={"max_steps": 2}))
    mapping |= {"init_from": str(source), "model": {"ctc": ctc, "decoder": None if ctc else local}}
    mapping["loss"] = {}
    recipe = tmp_path / "second.yaml"
    recipe.write_text(json.dumps(mapping))
    config = configuration.load(TrainConfig, recipe, [])
    assert config.model.best_rq is None
    assert config.model.encoder.width == 16
    resolved = resolve_config(config, None)
    tokenizer = find_tokenizer(resolved, None)
    assert not isinstance(tokenizer, NoTokenizer)
    model = build.build_model(resolved, tokenizer.vocab_size, None, torch.device("cpu"))
    assert model.vocab_size == tokenizer.vocab_size
    pretrained = published(source)
    local = model.state_dict()
    used = [name for name in pretrained if name.startswith("encoder.")]
    assert used
    assert all(local[name].equal(pretrained[name]) for name in used)
    for stop in (1, None):
        training = replace(config.training, stop_at=stop)
        assert run(replace(config, training=training)) == 0
    assert choose_method(
        checkpoint.load_model(checkpoint.resolve(tmp_path / "second")).model, "auto"
    )


def test_pretraining_goes_on_and_new_heads_are_trained(
    make_pretraining, make_config, tmp_path, model_config
):
    assert run(make_pretraining(name="first", training={"max_steps": 1})) == 0
    source, cpu = str(tmp_path / "first"), torch.device("cpu")
    resolved = resolve_config(make_pretraining(init_from=source, model=ModelConfig()), None)
    assert resolved.model.best_rq == BEST_RQ
    weights = published(source)
    model = build.build_model(resolved, 1, None, cpu)
    assert all(weights[name].equal(value) for name, value in model.state_dict().items())
    options = {"init_from": source, "model": model_config}
    with pytest.raises(ValueError, match=r"`model\.ctc_head` must not be in `training\.freeze`"):
        build.build_model(make_config(training={"freeze": ("ctc_head",)}, **options), 30, None, cpu)
    frozen = make_config(training={"freeze": ("encoder",)}, **options)
    assert build.build_model(frozen, 30, None, cpu).ctc_head is not None


def test_error_messages(make_pretraining, make_config, tones):
    tokenizer = {"tokenizer": str(tones / "tokenizer")}
    for config, message in (
        (make_pretraining(data={"text": "required"}), r"`data\.text` must be ignored"),
        (make_pretraining(data=tokenizer), r"`data\.tokenizer` must be"),
        (make_config(data={"text": "ignored"}), r"`data\.text` must be required"),
        (make_pretraining(loss=LossConfig(guided_weight=1.0)), "`loss.guided_weight` must be 0"),
        (make_pretraining(loss=LossConfig(ctc_weight=0.5)), "must not use CTC"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve_config(config, None)


def test_the_use_of_codes_is_their_entropy_since_the_last_line(make_pretraining):
    counts = torch.tensor([[5, 5, 0, 0], [4, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    expected = torch.tensor([math.log(2), 0.0, math.log(4), 0.0], dtype=torch.float64)
    torch.testing.assert_close(entropy(counts), expected)
    config = resolve_config(make_pretraining(), None)
    model = build.build_model(config, 1, None, torch.device("cpu"))
    model.best_rq.code_counts[:] = torch.arange(16)
    use = CodeUse(model.best_rq)
    state = use.state_dict()
    assert use.line()["code_entropy_0"] > 2
    assert use.line()["code_entropy_0"] == 0
    use.load_state_dict(state)
    assert use.line()["code_perplexity_1"] > 8


def test_a_validation_loss_that_is_not_finite_is_null(make_pretraining, tmp_path):
    log = RunLog(RunDirectory(tmp_path / "run"), "start")
    log.open(make_pretraining(), True, 0, 1, ())
    for total in (math.nan, math.inf, 6.0):
        log.validation_loss(1, 0, "dev", LossResult(total, 3))
    result = read_lines(tmp_path / "run/validation.jsonl")
    assert [line["cross_entropy"] for line in result] == [None, None, 2.0]
