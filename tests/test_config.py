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


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    encoder: Encoder


@pytest.fixture
def recipe(tmp_path):
    def write(text: str):
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("", [], Root()),
        ("encoder: {layers: 5}", [], Root(encoder=Encoder(layers=5))),
        # Overrides win in order.
        ("encoder: {layers: 5}", ["encoder.layers=7", "--encoder.layers=8", "sources=[a, b]"],
         Root(encoder=Encoder(layers=8), sources=("a", "b"))),
        ("", ["decoder.dropout=1e-3"], Root(decoder=Decoder(dropout=0.001))),
        # An optional part can be switched off and on.
        ("decoder: null", [], Root(decoder=None)),
        ("decoder: null", ["decoder.dropout=0.5"], Root(decoder=Decoder(dropout=0.5))),
        # A section without content has its defaults.
        ("encoder:", [], Root()),
        ("encoder: {layers: 5}", ["encoder=null"], Root()),
        ("", ["encoder=null", "encoder.layers=4"], Root(encoder=Encoder(layers=4))),
        ("periods: {2: 8}", ["periods.16=null"], Root(periods={2: 8, 16: None})),
    ],
)  # fmt: skip
def test_a_recipe_lists_only_what_differs(recipe, text, overrides, expected):
    assert config.load(Root, recipe(text), overrides) == expected


def test_to_mapping_is_the_inverse(recipe):
    root = Root(decoder=None, sources=("a",), weights={"en": 0.5})
    assert config.load(Root, recipe(config.dump(root))) == root
    # JSON has numbers as keys only as text.
    assert config.from_mapping(Root, {"periods": {"2": 8, 16: None}}).periods == {2: 8, 16: None}


@pytest.mark.parametrize(
    ("text", "given", "message"),
    [
        ("encoder: {layer: 5}", [], r"`encoder\.layer` is an unknown field: did you mean `layers`"),
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
        ("periods: {two: 8}", [], r"`periods\[key\]` must be an integer, but is 'two'"),
        ("- a", [], "must be a mapping"),
        ("a: [", [], "not valid YAML"),
        ("shape: {kind: star}", Drawing, "`shape.kind` must be one of square, circle, but is 's"),
        ("shape: {kind: circle, side: 2}", Drawing, "`shape.side` is an unknown field"),
        ("shape: 3", Drawing, "`shape` must be a mapping .* or a mapping .* or null, but is 3"),
        ("encoder: null", Run, r"`encoder` must be a mapping \(Encoder\), but is None"),
    ],
)
def test_each_mistake_has_one_clear_line(recipe, text, given, message):
    """Of `Root` with overrides, or of another configuration."""
    cls, overrides = (Root, given) if isinstance(given, list) else (given, [])
    with pytest.raises(ConfigError, match=message) as caught:
        config.load(cls, recipe(text), overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [("missing.yaml", "does not"), ("nosuch", "must be a YAML file or a recipe's name")],
)
def test_a_missing_recipe(name, message):
    with pytest.raises(ConfigError, match=message):
        config.load(Root, name)


def test_what_an_earlier_version_did_not_know_has_its_default():
    existing = {"name": "a", "encoder": {"layers": 5}, "decoder": None, "gone": 1}
    completed = config.complete(Root, existing)
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
def test_a_kind_tells_dataclasses_apart(recipe, text, overrides, expected):
    drawing = config.load(Drawing, recipe(text), overrides)
    assert drawing == Drawing(shape=expected)
    mapping = config.to_mapping(drawing)
    assert config.from_mapping(Drawing, mapping) == drawing
    assert config.complete(Drawing, mapping) == mapping


def test_an_earlier_file_has_the_first_kind():
    completed = config.complete(Drawing, {"shape": {"side": 4}})
    assert completed == {"shape": {"kind": "square", "side": 4}}
    assert config.complete(Drawing, {"shape": {"kind": "circle"}})["shape"]["radius"] == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Circle(radius=7)),
        ("shape: {radius: 2}", Circle(radius=2)),
        ("shape: {kind: circle}", Circle(radius=7)),
        ("shape: {kind: square}", Square()),
    ],
)
def test_what_is_left_out_is_inherited(recipe, text, expected):
    assert config.load(Heir, recipe(text)).shape == expected


def test_an_edited_configuration_of_a_run_is_refused_unless_its_checksum_is_removed(tmp_path):
    text = with_checksum_line("encoder: {layers: 5}\n")
    written, copied = tmp_path / "config.yaml", tmp_path / "mine.yaml"
    written.write_text(text)
    assert config.load(Run, written).encoder.layers == 5
    for path in (written, copied):
        path.write_text(text.replace("layers: 5", "layers: 6"))
    with pytest.raises(ConfigError, match=r"config.yaml does not match the checksum .* remove"):
        config.load(Run, written)
    assert config.load(Run, copied).encoder.layers == 6
    written.write_text("encoder: {layers: 6}\n")
    assert config.load(Run, written).encoder.layers == 6
