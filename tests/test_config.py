from dataclasses import dataclass, field
from typing import Literal

import pytest

from effasr import config
from effasr.config import ConfigError
from effasr.untrusted.documents import with_checksum_line


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    layers: int = 3
    position: Literal["relative", "rotary"] = "relative"

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"`layers` must be at least 1, but is {self.layers}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    dropout: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Root:
    name: str = "run"
    encoder: Encoder = field(default_factory=Encoder)
    decoder: Decoder | None = field(default_factory=Decoder)
    sources: tuple[str, ...] | str = ()
    betas: tuple[float, float] = (0.9, 0.98)
    weights: dict[str, float] = field(default_factory=dict)
    languages: tuple[str, ...] = ()
    periods: dict[int, int | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Square:
    kind: Literal["square"] = "square"
    side: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Circle:
    kind: Literal["circle"] = "circle"
    radius: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    shape: Square | Circle | None = field(default_factory=Square)


@dataclass(frozen=True, kw_only=True, slots=True)
class Heir:
    """It takes from a file what a recipe does not say."""

    shape: Square | Circle = field(default_factory=Square)

    @classmethod
    def inherited(cls, mapping):
        return config.merged({"shape": {"kind": "circle", "radius": 7}}, mapping)


@pytest.fixture
def recipe(tmp_path):
    def write(text: str):
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return path

    return write


def test_a_recipe_lists_only_what_differs(recipe) -> None:
    root = config.load(Root, recipe("encoder: {layers: 5}"))
    assert root == Root(encoder=Encoder(layers=5))


def test_an_empty_recipe_is_the_defaults(recipe) -> None:
    assert config.load(Root, recipe("")) == Root()


def test_overrides_win_in_order(recipe) -> None:
    overrides = ["encoder.layers=7", "sources=[a, b]", "--encoder.layers=8", "decoder.dropout=1e-3"]
    root = config.load(Root, recipe("encoder: {layers: 5}"), overrides)
    assert root.encoder.layers == 8
    assert root.sources == ("a", "b")
    assert root.decoder == Decoder(dropout=0.001)


def test_an_optional_part_can_be_switched_off_and_on(recipe) -> None:
    assert config.load(Root, recipe("decoder: null")).decoder is None
    root = config.load(Root, recipe("decoder: null"), ["decoder.dropout=0.5"])
    assert root.decoder == Decoder(dropout=0.5)


def test_to_mapping_is_the_inverse(recipe) -> None:
    root = Root(decoder=None, sources=("a",), weights={"en": 0.5})
    assert config.load(Root, recipe(config.dump(root))) == root


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (
            "encoder: {layer: 5}",
            [],
            r"`encoder\.layer` is an unknown field: did you mean `layers`\?",
        ),
        ("", ["encoder.layrs=5"], r"`encoder\.layrs` is an unknown field: did you mean `layers`\?"),
        ("", ["encodr.layers=5"], r"`encodr` is an unknown field: did you mean `encoder`\?"),
        ("", ["zzz=5"], r"`zzz` is an unknown field: the fields are name, encoder"),
        ("", ["encoder.layers=many"], r"`encoder\.layers` must be an integer, but is 'many'"),
        ("", ["encoder.layers=2.5"], r"must be an integer, but is 2\.5"),
        ("", ["encoder.layers=true"], r"must be an integer, but is True"),
        ("", ["encoder.position=none"], r"one of 'relative', 'rotary', but is 'none'"),
        ("", ["encoder.layers=0"], r"encoder: `layers` must be at least 1, but is 0"),
        ("", ["betas=[0.9]"], r"`betas` must be a list of 2"),
        ("", ["sources=[1]"], r"`sources\[0\]` must be text, but is 1"),
        ("weights: {no: 1}", [], r"`weights\[key\]` must be text, but is False"),
        ("", ["weights.en=x"], r"`weights\.en` must be a finite number, but is 'x'"),
        ("", ["languages=de"], r"`languages` must be a list, each text, but is 'de': write \[de\]"),
        ("", ["decoder=3"], r"`decoder` must be a mapping \(Decoder\) or null, but is 3"),
        ("", ["name"], r"`path\.to\.field=value`, but is 'name'"),
        ("", ["name.x=1"], r"`name` must be given a value itself"),
        ("- a", [], "must be a mapping"),
        ("a: [", [], "not valid YAML"),
    ],
)
def test_each_mistake_has_one_clear_line(recipe, text, overrides, message) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        config.load(Root, recipe(text), overrides)
    assert "\n" not in str(caught.value)


def test_numbers_as_keys_survive_json_and_overrides(recipe) -> None:
    assert config.from_mapping(Root, {"periods": {"2": 8, 16: None}}).periods == {2: 8, 16: None}
    found = config.load(Root, recipe("periods: {2: 8}"), ["periods.16=null"])
    assert found.periods == {2: 8, 16: None}
    with pytest.raises(ConfigError, match=r"`periods\[key\]` must be an integer, but is 'two'"):
        config.load(Root, recipe("periods: {two: 8}"))


def test_a_missing_recipe_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="does not"):
        config.load(Root, "missing.yaml")
    with pytest.raises(ConfigError, match="must be a YAML file or a recipe's name"):
        config.load(Root, "nosuch")


def test_what_an_earlier_version_did_not_know_has_its_default() -> None:
    known = {"name": "a", "encoder": {"layers": 5}, "decoder": None, "gone": 1}
    completed = config.complete(Root, known)
    assert completed.pop("gone") == 1
    root = Root(name="a", encoder=Encoder(layers=5), decoder=None)
    assert completed == config.to_mapping(root)
    assert config.complete(Root, {"decoder": {}})["decoder"] == {"dropout": 0.1}


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("", [], Square()),
        ("shape: {side: 2}", [], Square(side=2)),
        ("shape: {kind: circle}", [], Circle()),
        ("", ["shape.radius=3", "shape.kind=circle"], Circle(radius=3)),
        ("shape: {kind: circle, radius: 2}", ["shape.radius=3"], Circle(radius=3)),
        ("shape: null", [], None),
    ],
)
def test_a_kind_tells_dataclasses_apart(recipe, text, overrides, expected) -> None:
    drawing = config.load(Drawing, recipe(text), overrides)
    assert drawing == Drawing(shape=expected)
    mapping = config.to_mapping(drawing)
    assert config.from_mapping(Drawing, mapping) == drawing
    assert config.complete(Drawing, mapping) == mapping


def test_an_earlier_file_has_the_first_kind() -> None:
    completed = config.complete(Drawing, {"shape": {"side": 4}})
    assert completed == {"shape": {"kind": "square", "side": 4}}
    assert config.complete(Drawing, {"shape": {"kind": "circle"}})["shape"]["radius"] == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shape: {kind: star}", "`shape.kind` must be one of square, circle, but is 'star'"),
        ("shape: {kind: circle, side: 2}", "`shape.side` is an unknown field"),
        ("shape: 3", "`shape` must be a mapping .* or a mapping .* or null, but is 3"),
    ],
)
def test_kinds_are_checked(recipe, text, message) -> None:
    with pytest.raises(ConfigError, match=message):
        config.load(Drawing, recipe(text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Circle(radius=7)),
        ("shape: {radius: 2}", Circle(radius=2)),
        ("shape: {kind: circle}", Circle(radius=7)),
        ("shape: {kind: square}", Square()),
    ],
)
def test_what_is_left_out_is_inherited(recipe, text, expected) -> None:
    assert config.load(Heir, recipe(text)).shape == expected


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """It bears the name of one whose keys were renamed."""

    speed_perturbation: tuple[float, ...] = (1.0,)
    audio_augmentation: Encoder = field(default_factory=Encoder)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    data: DataConfig
    parts: dict[str, DataConfig] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("text", "overrides", "old", "new"),
    [
        ("data: {speeds: [0.9]}", [], "data.speeds", "data.speed_perturbation"),
        ("data: {}", ["data.speeds=[0.9]"], "data.speeds", "data.speed_perturbation"),
        ("data: {}", ["data.augment.layers=2"], "data.augment", "data.audio_augmentation"),
        (
            "{data: {}, parts: {a: {speeds: []}}}",
            [],
            "parts.a.speeds",
            "parts.a.speed_perturbation",
        ),
    ],
)
def test_a_renamed_key_of_a_user_is_refused_by_its_new_name(recipe, text, overrides, old, new):
    with pytest.raises(ConfigError, match=rf"^`{old}` has been renamed: use `{new}`\.$"):
        config.load(Run, recipe(text), overrides)


def test_a_renamed_key_of_an_earlier_version_is_translated() -> None:
    old = {"data": {"speeds": [0.9], "augment": {"layers": 2}}, "parts": {"a": {"speeds": [2.0]}}}
    run = Run(
        data=DataConfig(speed_perturbation=(0.9,), audio_augmentation=Encoder(layers=2)),
        parts={"a": DataConfig(speed_perturbation=(2.0,))},
    )
    assert config.from_stored(Run, old) == run
    assert config.complete(Run, old) == config.to_mapping(run)
    with pytest.raises(ConfigError, match="has been renamed"):
        config.from_mapping(Run, old)


def test_the_configuration_of_an_earlier_run_is_a_recipe(tmp_path) -> None:
    for name in ("config.yaml", "recipe.yaml"):
        (tmp_path / name).write_text("data: {speeds: [0.9]}")
    found = config.load(Run, tmp_path / "config.yaml", ["data.audio_augmentation.layers=2"])
    expected = DataConfig(speed_perturbation=(0.9,), audio_augmentation=Encoder(layers=2))
    assert found == Run(data=expected)
    with pytest.raises(ConfigError, match="has been renamed"):
        config.load(Run, tmp_path / "recipe.yaml")


def test_an_edited_configuration_of_a_run_is_refused_unless_its_checksum_is_removed(tmp_path):
    text = with_checksum_line("data: {speed_perturbation: [0.9]}\n")
    written, copied = tmp_path / "config.yaml", tmp_path / "mine.yaml"
    written.write_text(text)
    assert config.load(Run, written).data.speed_perturbation == (0.9,)
    for path in (written, copied):
        path.write_text(text.replace("0.9", "1.1"))
    with pytest.raises(ConfigError, match=r"config.yaml does not match the checksum .* remove"):
        config.load(Run, written)
    assert config.load(Run, copied).data.speed_perturbation == (1.1,)
    written.write_text("data: {speed_perturbation: [1.1]}\n")
    assert config.load(Run, written).data.speed_perturbation == (1.1,)


def test_a_section_without_content_has_its_defaults(recipe) -> None:
    assert config.load(Root, recipe("encoder:")) == Root()
    assert config.load(Root, recipe("encoder: {layers: 5}"), ["encoder=null"]) == Root()
    found = config.load(Root, recipe(""), ["encoder=null", "encoder.layers=4"])
    assert found.encoder == Encoder(layers=4)


def test_a_section_that_must_be_given_cannot_be_null(recipe) -> None:
    with pytest.raises(ConfigError, match=r"`data` must be a mapping \(DataConfig\), but is None"):
        config.load(Run, recipe("data: null"))
