import pytest

from effasr import config as configs
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.presets import PRESETS


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
