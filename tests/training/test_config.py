from dataclasses import replace

import pytest
import torch

from effasr import config as configuration
from effasr.checkpoint import save_model
from effasr.data.config import DataConfig
from effasr.data.features.config import FeatureConfig
from effasr.data.features.spec_augment import SpecAugmentConfig
from effasr.data.index import corpus_cache
from effasr.data.tokenizer import NoTokenizer, load_tokenizer
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.text_encoder import TextEncoderConfig
from effasr.model.transducer import TransducerConfig
from effasr.training import build
from effasr.training.config import EvaluationConfig, LoopConfig, TrainConfig, resolve_losses
from effasr.training.corpus import load_corpus
from effasr.training.loss import LossConfig
from effasr.training.profiler import ProfileConfig
from effasr.training.resolve import find_tokenizer, resolve_config
from effasr.training.strategies.parallelism import narrow_dtype

BOTH = ModelConfig(ctc=True)
MASKED = ModelConfig(ctc=True, spec_augment=SpecAugmentConfig(time_masks=2, after_ctc=3.0))
CTC = ModelConfig(ctc=True, decoder=None)
ATTENTION = ModelConfig(decoder=DecoderConfig(), ctc=False)
TRANSDUCER = ModelConfig(decoder=None, transducer=TransducerConfig())
HYBRID = ModelConfig(decoder=None, ctc=True, transducer=TransducerConfig())
SHARED = TextEncoderConfig(shared_layers=1)
ALL = ModelConfig(ctc=True, transducer=TransducerConfig())


@pytest.mark.parametrize(
    ("model", "weight", "share"),
    [
        (BOTH, 0.3, 0.0),
        (CTC, 1.0, 0.0),
        (ATTENTION, 0.0, 0.0),
        (TRANSDUCER, 0.0, 1.0),
        (HYBRID, 0.3, 1.0),
        (ALL, 0.3, 0.5),
    ],
)
def test_the_weights_follow_the_model(model, weight, share):
    resolved = resolve_losses(LossConfig(), model)
    assert (resolved.ctc_weight, resolved.transducer_weight) == (weight, share)
    provided = LossConfig(ctc_weight=weight, transducer_weight=share)
    assert resolve_losses(provided, model) == provided


@pytest.mark.parametrize(
    ("loss", "model", "message"),
    [
        ({}, replace(ATTENTION, text_encoder=SHARED), "must be 0 without a CTC head and a trans"),
        ({"consistency_weight": 1.0}, BOTH, "must be 0 for a model without a text encoder"),
        ({"ctc_weight": 0.5}, ATTENTION, "must not use CTC for a model without CTC head"),
        ({"guided_after_ctc": 1.0}, ATTENTION, "must not use CTC"),
        ({"guided_after_ctc": 1.5}, BOTH, r"after_ctc` must be null or in \(0, 1\], a share of"),
        ({}, MASKED, r"`model\.spec_augment\.after_ctc` must be null or in \(0, 1\], a share"),
        ({"ctc_weight": 0.5}, CTC, "must be CTC alone for a model without decoder"),
        ({"guided_weight": 1.0}, CTC, "must be CTC alone"),
        ({"ctc_weight": 0.5}, TRANSDUCER, "must not use CTC for a model without CTC head"),
        ({"transducer_weight": 0.5}, BOTH, r"`loss\.transducer_weight` must be 0 or null"),
        ({"transducer_weight": 0.5}, HYBRID, "must leave to the transducer what CTC leaves"),
        ({"guided_weight": 0.5}, HYBRID, "guided_weight 0.5: set them to 1 and 0"),
    ],
)
def test_losses_that_the_model_has_not_are_refused(loss, model, message):
    with pytest.raises(ValueError, match=message):
        resolve_losses(LossConfig(**loss), model)


def test_the_defaults_are_a_configuration_that_survives_yaml(tmp_path):
    config = resolve_config(TrainConfig(), None)
    path = tmp_path / "config.yaml"
    path.write_text(configuration.dump(config))
    assert configuration.load(TrainConfig, path) == config


def test_a_profile_of_null_switches_profiling_off():
    config = configuration.load(TrainConfig, "demo", ["training.profile=null"])
    assert config.training.profile == ProfileConfig()
    assert config.training.profile.tool == "none"


def of_features(**fields) -> TrainConfig:
    return TrainConfig(model=ModelConfig(features=FeatureConfig(**{"window": 400, **fields})))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainConfig(name="a/b"), "`name` must be usable as a folder's name, but is 'a/b'"),
        (lambda: TrainConfig(seed=-1), "`seed` must be at least 0"),
        (lambda: LoopConfig(max_steps=0), "`max_steps` must be at least 1 or null, but is 0"),
        (lambda: LoopConfig(clip=0.0), "`clip` must be positive, but is 0.0"),
        (lambda: LoopConfig(ema_decay=1.0), "`ema_decay` must lie between 0 and 1"),
        (lambda: LoopConfig(threads=0), "`threads` must be at least 1 or null"),
        (lambda: LoopConfig(activation_checkpointing=-1), "`activation_ch.* must be true.* is -1"),
        (
            lambda: configuration.from_mapping(TrainConfig, {"training": {"epochs": 10}}),
            "`training.epochs` is an unknown field: did you mean `max_epochs`",
        ),
        (
            lambda: LoopConfig(max_steps=3, max_epochs=2),
            "`max_epochs` must be null where `max_steps` is given, but they are 2 and 3: set one",
        ),
        (lambda: LoopConfig(validate_every="20m"), "`validate_every` must be .* such as 20min"),
        (lambda: LoopConfig(max_time=0.0), "`max_time` must be positive or null, but is 0"),
        (
            lambda: configuration.from_mapping(TrainConfig, {"data": {"validation": None}}),
            r"`data.validation` must be .* but is None: write \[\] for none",
        ),
        (lambda: EvaluationConfig(max_utterances=0), "`max_utterances` must be at least 1"),
        (lambda: find_tokenizer(TrainConfig(), None), r"`data\.tokenizer` must be a folder"),
        (lambda: load_corpus(TrainConfig(), NoTokenizer(), None), "`data.train` must name at le"),
        (lambda: resolve_config(of_features(sample_rate=8_000), None),
         r"`model\.features\.sample_rate` must be .* is 8000"),
        (lambda: resolve_config(of_features(hop=80), None), "`model.features.hop` must .* is 80"),
        (lambda: resolve_config(TrainConfig(training=LoopConfig(
            cuda_graph=True, activation_checkpointing=True)), None),
         "`training.activation_checkpointing` must be false with training.cuda_graph"),
    ],
)  # fmt: skip
def test_error_messages(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("start", ["model", "run"])
def test_init_from_brings_architecture_and_tokenizer(tmp_path, tones, model_config, start):
    tokenizer = load_tokenizer(tones / "tokenizer")
    model = ASRModel(model_config, tokenizer.vocab_size)
    save_model(tmp_path / "model", model, tokenizer)
    save_model(tmp_path / "run" / "checkpoints" / "step_00000004", model, tokenizer)
    config = resolve_config(TrainConfig(init_from=str(tmp_path / start)), None)
    assert config.model == model_config
    assert config.loss.ctc_weight == 0.3
    assert find_tokenizer(config, None).vocab_size == tokenizer.vocab_size
    loaded = build.build_model(config, tokenizer.vocab_size, None, torch.device("cpu"))
    assert loaded.training
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter)


def test_a_recipe_may_change_fields_of_the_model_to_begin_with(tmp_path, tones, model_config):
    tokenizer = load_tokenizer(tones / "tokenizer")
    save_model(tmp_path / "model", ASRModel(model_config, tokenizer.vocab_size), tokenizer)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"init_from: {tmp_path / 'model'}\nmodel: {{text_encoder: {{heads: 2}}}}\n")
    change = ["model.encoder.residual_dropout=0.25"]
    result = configuration.load(TrainConfig, recipe, change).model
    assert result.text_encoder == TextEncoderConfig(heads=2)
    encoder = replace(model_config.encoder, residual_dropout=0.25)
    assert replace(result, text_encoder=None) == replace(model_config, encoder=encoder)
    # A run goes on from its checkpoint alone: what it began with may be gone.
    (tmp_path / "model").rename(tmp_path / "run")
    change += [f"output={tmp_path}", "name=run"]
    assert configuration.load(TrainConfig, recipe, change).model == result
    (tmp_path / "run" / "model.yaml").unlink()
    config = configuration.load(TrainConfig, recipe, change)
    assert config.model.encoder == FastConformerConfig(residual_dropout=0.25)


def test_precision_follows_the_device(monkeypatch):
    cpu = torch.device("cpu")
    narrow = [("bfloat16", torch.bfloat16), ("float16", torch.float16)]
    for precision, expected in (("auto", torch.float32), *narrow):
        with build.make_autocast(precision, cpu)():
            product = torch.ones(2, 2) @ torch.ones(2, 2)
        assert product.dtype == expected
    with torch.no_grad():
        gpu = build.make_autocast("auto", torch.device("cuda"))
        assert gpu.args == ("cuda", torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, expected in (((7, 5), torch.float16), ((8, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, x=capability: x)
        assert narrow_dtype("auto", torch.device("cuda")) == expected
        assert narrow_dtype("bfloat16", torch.device("cuda")) == torch.bfloat16


@pytest.mark.parametrize("given", ["auto", "named", None])
def test_where_a_run_keeps_what_it_reads_from_manifests(tones, tmp_path, monkeypatch, given):
    monkeypatch.setattr(corpus_cache, "_LEAST_BYTES", 0)
    tokenizer = load_tokenizer(tones / "tokenizer")
    cache = str(tmp_path / given) if given == "named" else given
    data = DataConfig(train=str(tones / "train.jsonl"), cache=cache)
    config = TrainConfig(data=data, output=str(tmp_path / "runs"))
    folder = {"auto": tmp_path / "runs/.corpus", "named": tmp_path / "named"}.get(given or "")
    first = load_corpus(config, tokenizer, None)
    assert [file.suffix for file in sorted(tmp_path.rglob("*.*")) if file.is_file()] == (
        [] if folder is None else [".corpus", ".lock"]
    )
    assert folder is None or len(list(folder.glob("*.corpus"))) == 1
    # What a run reads to find its budgets is read once.
    wide = replace(config, data=replace(data, frame_budget=1_000_000))
    assert load_corpus(wide, tokenizer, None).fingerprint == first.fingerprint
    assert folder is None or len(list(folder.glob("*.corpus"))) == 1
