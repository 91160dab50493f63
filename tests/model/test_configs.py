import pytest
import torch

from effasr import config as configs
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.presets import PRESET_VOCABULARIES, PRESETS


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
