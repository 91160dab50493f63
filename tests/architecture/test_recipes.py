"""Every recipe that comes with effasr is a valid configuration."""

import pytest

from effasr import config
from effasr.model.presets import PRESETS
from effasr.training.config import TrainConfig


@pytest.mark.parametrize("recipe", config.recipes())
def test_recipe_loads_and_is_named_after_its_file(recipe):
    assert config.load(TrainConfig, recipe).name == recipe


@pytest.mark.parametrize("name", PRESETS)
def test_recipes_of_published_models_have_their_architecture(name):
    assert config.load(TrainConfig, name).model == PRESETS[name]
