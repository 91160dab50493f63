import pytest
import torch

from effasr.model.asr import ASRModel
from effasr.model.presets import PRESET_VOCABULARIES, PRESETS

# Of the model cards; canary-1b's says "1B".
PUBLISHED = {"canary_1b": 1.0e9, "canary_1b_flash": 883e6, "canary_180m_flash": 182e6}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_sizes(name):
    with torch.device("meta"):
        model = ASRModel(PRESETS[name], PRESET_VOCABULARIES[name])
    count = sum(parameter.numel() for parameter in model.parameters())
    assert abs(count / PUBLISHED[name] - 1) < 0.02
