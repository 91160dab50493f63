import pytest
import torch

from effasr import config as configs
from effasr.model.asr import ASRModel
from effasr.model.best_rq import BestRQConfig
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.presets import PRESET_VOCABULARIES, PRESETS
from effasr.model.text_encoder import TextEncoderConfig
from effasr.model.transducer import TransducerConfig


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (FastConformerConfig, {"layers": 0}, "`layers` must be at least 1, but is 0"),
        (
            FastConformerConfig,
            {"width": 30, "heads": 4},
            "multiple of 2 and of heads = 4, but is 30",
        ),
        (FastConformerConfig, {"conv_kernel": 8}, "`conv_kernel` must be odd, but is 8"),
        (
            FastConformerConfig,
            {"subsampling": 6},
            "`subsampling` must be 4 or 8, but is 6: 8",
        ),
        (FastConformerConfig, {"position": "absolute"}, "one of relative, rotary, none"),
        (FastConformerConfig, {"conv_norm": "group_norm"}, "one of batch_norm, layer_norm"),
        (FastConformerConfig, {"residual_dropout": 1.0}, r"in \[0, 1\), but is 1\.0"),
        (FastConformerConfig, {"input_positions": -0.1}, "at least 0"),
        (FastConformerConfig, {"max_frames": 0}, "at least 1 or null"),
        (DecoderConfig, {"width": 33}, "even and at least 4"),
        (DecoderConfig, {"width": 34, "heads": 4}, "or set `head_dim`"),
        (DecoderConfig, {"head_dim": 0}, "`head_dim` must be at least 1"),
        (DecoderConfig, {"attention_dropout": -0.5}, r"in \[0, 1\)"),
        (DecoderConfig, {"max_positions": 0}, "`max_positions` must be at least 1"),
        (TransducerConfig, {"predictor": "gru"}, "must be one of lstm, stateless, but is 'gru'"),
        (TransducerConfig, {"activation": "gelu"}, "`activation` must be one of relu, tanh"),
        *(
            (TransducerConfig, {name: 0}, f"`{name}` must be at least 1")
            for name in ("width", "layers", "context", "joint")
        ),
        (TransducerConfig, {"fastemit": -0.1}, "`fastemit` must be at least 0"),
        (TransducerConfig, {"dropout": 1.0}, r"`dropout` must be in \[0, 1\)"),
        (TransducerConfig, {"durations": (1, 2)}, r"start with 0 and 1 and increase, as \[0, 1"),
        (TransducerConfig, {"durations": (0, 1, 1)}, r"`durations` .*, but is \[0, 1, 1\]"),
        (TransducerConfig, {"durations": (0, 1), "sigma": -0.1}, "`sigma` .*0, but is -0.1"),
        (TransducerConfig, {"sigma": 0.1}, "`sigma` must be 0 without `durations`, but is 0.1"),
        (BestRQConfig, {"codes": 1}, "`codes` must be at least 2"),
        (BestRQConfig, {"masked_share": 1.0}, "`masked_share` must lie between 0 and 1"),
        (BestRQConfig, {"span_s": 0.0}, "`span_s` must"),
        (BestRQConfig, {"noise": -1.0}, "`noise` must"),
        (BestRQConfig, {"codebooks": 0}, "`codebooks` must"),
        (BestRQConfig, {"seed": -1}, "`seed` must"),
        (TextEncoderConfig, {"layers": 0}, "`layers` must be at least 1"),
        (ModelConfig, {"decoder": None}, "set `ctc` or give a `decoder`"),
        (ModelConfig, {"best_rq": BestRQConfig()}, "`decoder` must be null where `best_rq` is"),
        (
            ModelConfig,
            {"decoder": None, "ctc": True, "best_rq": BestRQConfig()},
            "`ctc` must be false where `best_rq` is given",
        ),
    ],
)
def test_a_wrong_value_is_refused(cls, options, message):
    with pytest.raises(ValueError, match=message):
        cls(**options)


@pytest.mark.parametrize("subsampling", [4, 8])
def test_features_follow_the_encoder(subsampling):
    mapping = {"encoder": {"subsampling": subsampling}}
    config = configs.from_mapping(ModelConfig, mapping)
    assert config.features.framing.seconds == subsampling / 100
    assert configs.from_mapping(ModelConfig, configs.to_mapping(config)) == config
    other = {**mapping, "features": {"subsampling": 12 - subsampling}}
    rule = f"`features.subsampling` must be {subsampling} for this encoder of kind fastconformer"
    with pytest.raises(ValueError, match=f"{rule}, but is {12 - subsampling}: leave it out"):
        configs.from_mapping(ModelConfig, other)


def test_a_configuration_from_before_there_was_a_choice_subsamples_by_eight():
    stored = configs.to_mapping(ModelConfig())
    expected = {**stored, "features": dict(stored["features"]), "encoder": dict(stored["encoder"])}
    del stored["features"]["subsampling"], stored["encoder"]["subsampling"]
    assert configs.complete(ModelConfig, stored) == expected
    assert configs.from_mapping(ModelConfig, stored) == ModelConfig()


@pytest.mark.parametrize("name", PRESETS)
def test_configurations_survive_a_file(name):
    mapping = configs.to_mapping(PRESETS[name])
    assert configs.from_mapping(ModelConfig, mapping) == PRESETS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_sizes(name):
    # Of the model cards; canary-1b's says "1B".
    published = {"canary_1b": 1.0e9, "canary_1b_flash": 883e6, "canary_180m_flash": 182e6}
    with torch.device("meta"):
        model = ASRModel(PRESETS[name], PRESET_VOCABULARIES[name])
    count = sum(parameter.numel() for parameter in model.parameters())
    assert abs(count / published[name] - 1) < 0.02
