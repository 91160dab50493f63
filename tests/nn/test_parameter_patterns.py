"""Patterns of paths, and parts of a model that are not trained."""

import pytest
from torch import nn

from effasr.nn.parameters import evaluate_frozen, freeze, matching

PATHS = ["encoder.layers.0.weight", "encoder.layers.1.weight", "encoder.layers.12.weight", "head.b"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("encoder", PATHS[:3]),
        ("encoder.*", PATHS[:3]),
        ("encoder.layers.[0-9]", PATHS[:2]),
        ("encoder.layers.[0-9].*", PATHS[:2]),
        ("*.weight", PATHS[:3]),
        ("head.b", PATHS[3:]),
    ],
)
def test_a_pattern_matches_paths_and_modules(pattern, expected):
    assert matching(PATHS, [pattern], "x") == set(expected)


def test_patterns_add_up():
    assert matching(PATHS, ["head", "*.0.*"], "x") == {PATHS[0], PATHS[3]}
    assert matching(PATHS, [], "x") == set()


def make_model():
    model = nn.Sequential(
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout()),
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout()),
    )
    return model.train()


def test_frozen_parameters_require_no_gradient():
    model = make_model()
    freeze(model, ["0"])
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"1.0.weight", "1.0.bias", "1.1.weight", "1.1.bias"}


def test_only_modules_without_anything_to_train_are_in_evaluation_mode():
    model = make_model()
    freeze(model, ["0", "1.1"])
    evaluate_frozen(model)
    training = {name for name, module in model.named_modules() if module.training}
    # A dropout has no parameters, and goes with the module that holds it.
    assert training == {"", "1", "1.0", "1.2"}
