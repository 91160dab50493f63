import pytest

from effasr import config as configuration
from effasr.config import ConfigError
from effasr.data.config import DataConfig
from effasr.data.mixture import MixConfig, leaves, shares


def mix(**fields):
    return configuration.from_mapping(MixConfig, fields)


NESTED = {
    "temperature": 0.5,
    "sources": {
        "en": {"manifests": ["a", "b"]},
        "de": {
            "temperature": 0.0,
            "sources": {
                "mls": "c",
                "read": {"sources": {"one": "d", "two": ["e", "f"]}},
            },
        },
        "fr": {"sources": {"x": "g", "y": "h"}},
    },
}


def test_nested_levels_are_as_computed_by_hand():
    """Levels without a temperature have that of the level above."""
    config = mix(**NESTED)
    assert [leaf.name for leaf in leaves(config)] == [
        "en", "de/mls", "de/read/one", "de/read/two", "fr/x", "fr/y",
    ]  # fmt: skip
    assert leaves(config)[0].manifests == ("a", "b")
    # Levels: en 144, de 64, fr 36: 12 + 8 + 6 = 26.
    result = shares(config, [144, 4, 50, 10, 27, 9])
    third = (3**0.5 / (3**0.5 + 1)) * 6 / 26
    by_hand = [12 / 26, 4 / 26, 2 / 26, 2 / 26, third, 6 / 26 - third]
    assert result == pytest.approx(by_hand)
    assert sum(result) == pytest.approx(1)


def test_weights_stand_and_the_rest_is_divided_by_hours():
    sources = {"a": {"manifests": "a", "weight": 0.5}, "b": "b", "c": "c"}
    assert shares(mix(sources=sources), [1, 30, 10]) == pytest.approx((0.5, 0.375, 0.125))
    ratios = {"a": {"manifests": "a", "weight": 3}, "b": {"manifests": "b", "weight": 1}}
    assert shares(mix(sources=ratios, temperature=0.3), [1, 99]) == pytest.approx((0.75, 0.25))


def test_a_source_without_data_leaves_its_share_to_the_others_of_its_level():
    result = shares(mix(**NESTED), [144, 0, 0, 0, 27, 9])
    assert result[1:4] == (0, 0, 0)
    assert result[0] == pytest.approx(12 / 18)
    with pytest.raises(ValueError, match="something of at least one source, but all are 0"):
        shares(mix(**NESTED), [0] * 6)
    with pytest.raises(ValueError, match="must have 6 entries, one per source, but has 2"):
        shares(mix(**NESTED), [1, 2])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "`sources` must name at least one source"),
        ({"sources": {"a": {}}}, "sources.a: a source must have either .* has neither"),
        (
            {"sources": {"a": {"manifests": "m", "sources": {"b": "c"}}}},
            "sources.a: a source must have either `manifests` or `sources`, but this one has both",
        ),
        (
            {"sources": {"a": {"sources": {"b": {"manifests": "m", "wieght": 1}}}}},
            "`sources.a.sources.b.wieght` is an unknown field: did you mean `weight`",
        ),
        ({"sources": {"a": "m"}, "epoch": "half"}, "`epoch` must be one of 'infinite', 'full'"),
        ({"sources": {"a": "m"}, "temperature": -1}, "`temperature` must be at least 0"),
        ({"sources": {"a": {"manifests": "m", "weight": 0}}}, "`weight` must be greater than 0"),
        ({"sources": {"a": "m"}, "epoch_hours": 0}, "`epoch_hours` must be greater than 0"),
        (
            {"sources": {"a": "m"}, "epoch": "full", "epoch_hours": 2},
            "`epoch_hours` must be null where `epoch` is 'full'",
        ),
        ({"sources": {False: "m"}}, r"be text, but is False: put it in quotes \(YAML"),
        ({"sources": {"de/mls": "m"}}, "without a slash, but one is 'de/mls'"),
        (
            {"sources": {"a": {"manifests": "m", "weight": 1}, "b": "n"}},
            "`weight` .* must add up to less than 1 .*, but is 1 in all: nothing is left for b",
        ),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        mix(**fields)


def test_a_recipe_and_overrides_reach_every_source(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "mix:\n  temperature: 0.5\n  sources:\n    en: en.jsonl\n    de: {sources: {mls: [a, b]}}\n"
    )
    overrides = ["mix.sources.de.temperature=0.25", "mix.epoch=full"]
    config = configuration.load(DataConfig, recipe, overrides)
    assert config.mix is not None
    assert config.mix.sources["de"].temperature == 0.25
    assert config.manifests == [("en.jsonl", 0), ("a", 1), ("b", 1)]
    assert configuration.from_mapping(DataConfig, configuration.to_mapping(config)) == config
    for override, message in (
        ("temprature=1", "temprature` is an unknown field: did you mean"),
        ("weight.x=1", "weight` must be given a value itself"),
    ):
        with pytest.raises(ConfigError, match=rf"`mix\.sources\.de\.{message}"):
            configuration.load(DataConfig, recipe, [f"mix.sources.de.{override}"])
