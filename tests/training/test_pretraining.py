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
from effasr.model.best_rq import BestRQConfig
from effasr.model.config import ModelConfig
from effasr.training import build
from effasr.training.config import LossConfig, TrainConfig
from effasr.training.resolve import find_tokenizer, resolve_config
from effasr.training.run_dir.run_directory import RunDirectory, read_lines
from effasr.training.run_dir.run_log import RunLog
from effasr.training.trainer import run
from effasr.training.untranscribed.pretraining import CodeUse, LossResult, entropy

SMALL = BestRQConfig(codebooks=2, codes=16, code_width=4, span_s=0.16)


@pytest.fixture
def pretraining(make_config, model_config, tones):
    """Makes configurations of pretraining on the training set, half of whose lines lack a text."""
    rows = [json.loads(line) for line in (tones / "train.jsonl").read_text().splitlines()]
    for row in rows[::2]:
        del row["text"]
    path = tones / "untranscribed.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = replace(model_config, decoder=None, ctc=False, best_rq=SMALL)

    def make(*, data: dict | None = None, **settings) -> TrainConfig:
        data = {"text": "ignored", "train": str(path), "tokenizer": ""} | (data or {})
        return make_config(**{"model": model, "loss": LossConfig(), "data": data} | settings)

    return make


def weights(folder) -> dict[str, torch.Tensor]:
    return checkpoint.load_model(folder).model.state_dict()


@pytest.mark.extended
def test_a_resumed_run_is_the_same_bit_by_bit(pretraining, tones, tmp_path) -> None:
    data = {"validation": str(tones / "test.jsonl")}
    settings = {"max_steps": 8, "checkpoint_every": 3, "validate_every": 4, "log_every": 2}
    assert run(pretraining(name="whole", data=data, training=settings)) == 0
    for stop in (3, 5):
        assert (
            run(pretraining(name="parts", data=data, training={**settings, "stop_at": stop})) == 0
        )
    assert run(pretraining(name="parts", data=data, training=settings)) == 0
    folders = [tmp_path / name for name in ("whole", "parts")]
    one, other = (weights(folder / "checkpoints/step_00000008") for folder in folders)
    assert all(one[name].equal(other[name]) for name in one)
    lines = [list(read_lines(folder / "metrics.jsonl")) for folder in folders]
    same = ("step", "loss", "cross_entropy", "code_entropy_0", "code_perplexity_1")
    assert [[line[n] for n in same] for line in lines[0]] == [
        [line[n] for n in same] for line in lines[1]
    ]
    for line in lines[0]:
        assert 0 < line["code_entropy_0"] <= math.log(SMALL.codes)
        assert line["code_perplexity_0"] == pytest.approx(math.exp(line["code_entropy_0"]))
        assert line["tokens"] == 0
        assert line["useful_tflops"] > 0
    validations = [list(read_lines(folder / "validation.jsonl")) for folder in folders]
    assert validations[0] == validations[1]
    assert [line["step"] for line in validations[0]] == [4, 8]
    state = torch.load(folders[0] / "checkpoints/step_00000008/training.pt", weights_only=True)
    assert state["best"] == min(line["cross_entropy"] for line in validations[0])


def test_damaged_audio_of_a_validation_set_is_left_out_and_counted(
    pretraining, tones, tmp_path
) -> None:
    """Its header is sound, so nothing shows before the validation."""
    rows = [json.loads(line) for line in (tones / "test.jsonl").read_text().splitlines()]
    rows = [row | {"audio_filepath": str(tones / row["audio_filepath"])} for row in rows]
    count = int(rows[0]["duration"] * 16_000)
    broken = np.full(count, np.nan, dtype=np.float32)
    soundfile.write(tmp_path / "broken.wav", broken, 16_000, subtype="FLOAT")
    manifests = {"whole": rows[1:], "damaged": [rows[0] | {"audio_filepath": "broken.wav"}]}
    for name, held in manifests.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in held))
    (tmp_path / "mixed.jsonl").write_text(
        (tmp_path / "damaged.jsonl").read_text() + (tmp_path / "whole.jsonl").read_text()
    )
    sets = [str(tmp_path / f"{name}.jsonl") for name in ("whole", "mixed", "damaged")]
    training = {"max_steps": 1, "validate_every": 1}
    assert run(pretraining(data={"validation": sets}, training=training)) == 0
    whole, mixed, damaged = read_lines(tmp_path / "run/validation.jsonl")
    assert (whole["failed"], mixed["failed"], damaged["failed"]) == (0, 1, 1)
    assert mixed["cross_entropy"] == whole["cross_entropy"]
    assert damaged["cross_entropy"] is None


def test_the_loss_falls_and_starts_at_that_of_guessing(pretraining, tmp_path) -> None:
    training = {"max_steps": 60, "log_every": 10, "ema_decay": None}
    config = pretraining(training=training)
    config = replace(config, optimizer=replace(config.optimizer, lr=5e-3))
    assert run(config) == 0
    losses = [line["cross_entropy"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    # Xavier's weights give logits of variance 2 or so to normalised frames.
    assert losses[0] < math.log(SMALL.codes) + 1.5
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("ctc", [True, False])
def test_another_model_takes_the_encoder(pretraining, make_config, tones, tmp_path, ctc) -> None:
    assert run(pretraining(name="first", training={"max_steps": 2})) == 0
    source = tmp_path / "first"
    own = {"width": 16, "layers": 1, "heads": 2, "feed_forward": 16}
    mapping = configuration.to_mapping(make_config(name="second", training={"max_steps": 2}))
    mapping |= {"init_from": str(source), "model": {"ctc": ctc, "decoder": None if ctc else own}}
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
    pretrained = weights(checkpoint.resolve(source))
    own = model.state_dict()
    taken = [name for name in pretrained if name.startswith("encoder.")]
    assert taken
    assert all(own[name].equal(pretrained[name]) for name in taken)
    for stop in (1, None):
        training = replace(config.training, stop_at=stop)
        assert run(replace(config, training=training)) == 0
    assert choose_method(
        checkpoint.load_model(checkpoint.resolve(tmp_path / "second")).model, "auto"
    )


def test_frozen_heads_that_were_never_trained_are_refused(
    pretraining, make_config, tmp_path, model_config
) -> None:
    assert run(pretraining(name="first", training={"max_steps": 1})) == 0
    config = make_config(
        name="second",
        init_from=str(tmp_path / "first"),
        model=model_config,
        training={"freeze": ("ctc_head",)},
    )
    with pytest.raises(ValueError, match=r"`model\.ctc_head` must not be in `training\.freeze`"):
        build.build_model(config, 30, None, torch.device("cpu"))
    frozen = replace(config, training=replace(config.training, freeze=("encoder",)))
    assert build.build_model(frozen, 30, None, torch.device("cpu")).ctc_head is not None


def test_pretraining_can_go_on_from_another(pretraining, tmp_path) -> None:
    assert run(pretraining(name="first", training={"max_steps": 1})) == 0
    config = pretraining(name="second", init_from=str(tmp_path / "first"), model=ModelConfig())
    resolved = resolve_config(config, None)
    assert resolved.model.best_rq == SMALL
    model = build.build_model(resolved, 1, None, torch.device("cpu"))
    published = weights(checkpoint.resolve(tmp_path / "first"))
    assert all(published[name].equal(value) for name, value in model.state_dict().items())


def test_a_pretrained_model_writes_no_text(pretraining, tmp_path) -> None:
    assert run(pretraining(training={"max_steps": 1})) == 0
    loaded = checkpoint.load_model(checkpoint.resolve(tmp_path / "run"))
    assert isinstance(loaded.tokenizer, NoTokenizer)
    with pytest.raises(ValueError, match="pretrained on audio alone"):
        choose_method(loaded.model, "auto")
    with pytest.raises(ValueError, match="fine-tune it with init_from"):
        loaded.tokenizer.encode("one", "en")


def test_data_and_model_must_agree(pretraining, make_config, tones) -> None:
    cases = [
        (pretraining(data={"text": "required"}), r"`data\.text` must be ignored"),
        (pretraining(data={"tokenizer": str(tones / "tokenizer")}), r"`data\.tokenizer` must be"),
        (make_config(data={"text": "ignored"}), r"`data\.text` must be required"),
        (pretraining(loss=LossConfig(guided_weight=1.0)), r"`loss\.guided_weight` must be 0"),
        (pretraining(loss=LossConfig(ctc_weight=0.5)), "must not use CTC"),
    ]
    for config, message in cases:
        with pytest.raises(ValueError, match=message):
            resolve_config(config, None)


def test_the_entropy_of_codes() -> None:
    counts = torch.tensor([[5, 5, 0, 0], [4, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    expected = torch.tensor([math.log(2), 0.0, math.log(4), 0.0], dtype=torch.float64)
    torch.testing.assert_close(entropy(counts), expected)


def test_reading_the_codes_counts_anew(pretraining) -> None:
    config = resolve_config(pretraining(), None)
    model = build.build_model(config, 1, None, torch.device("cpu"))
    model.best_rq.code_counts[:] = torch.tensor(np.arange(16))
    use = CodeUse(model.best_rq)
    kept = use.state_dict()
    assert use.line()["code_entropy_0"] > 2
    assert use.line()["code_entropy_0"] == 0
    use.load_state_dict(kept)
    assert use.line()["code_perplexity_1"] > 8


def test_a_validation_loss_that_is_not_finite_is_null_in_the_log(pretraining, tmp_path) -> None:
    log = RunLog(RunDirectory(tmp_path / "run"), "start")
    log.open(pretraining(), True, 0, 1, ())
    for total in (math.nan, math.inf, 6.0):
        log.validation_loss(1, 0, "dev", LossResult(total, 3))
    found = read_lines(tmp_path / "run/validation.jsonl")
    assert [line["cross_entropy"] for line in found] == [None, None, 2.0]
