"""Mappings to frozen dataclasses and back, with every key and type checked.

A recipe is a YAML file which lists only what differs from the defaults of the dataclasses. Any
field can be overridden by its dotted path, ``model.encoder.layers=4``. Only an int is converted,
to a float where one is required. A section that is null has its defaults, or is switched off where
its field may be null.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from effasr.checks import check_urls
from effasr.untrusted.documents import NUMBER, dump_scalar, dump_yaml, parse_yaml, read_yaml

T = TypeVar("T")

RECIPES = Path(__file__).parent / "recipes"

RUN_CONFIG = "config.yaml"
"""The file of a run directory that has its configuration; it can be used as a recipe."""


class ConfigError(ValueError):
    """A recipe or an override that cannot be used; the message says where and what to do."""


class UnknownField(ConfigError):
    def __init__(self, where: str, key: str, fields: Iterable[str]) -> None:
        self.where, self.key, self.near = where, key, _nearest(key, list(fields))
        hint = self.near or f"the fields are {', '.join(fields)}."
        super().__init__(f"`{where}` is an unknown field: {hint}")


def load(cls: type[T], recipe: str | Path, overrides: Sequence[str] = ()) -> T:
    """Read a YAML file, or a recipe that comes with effasr, and apply overrides, ``path=value``.

    A class method ``inherited`` of the dataclass, if there is one, fills in what the mapping leaves
    to what it refers to.
    """
    mapping = _read(_find(recipe))
    inherited = getattr(cls, "inherited", None)
    try:
        for override in overrides:
            _apply(cls, mapping, override)
        return from_mapping(cls, mapping if inherited is None else inherited(mapping))
    except UnknownField as error:
        ends = (f".{error.key}",) if error.near else (f".{error.key}", f"_{error.key}")
        if others := dict.fromkeys(path for path in _paths(cls) if path.endswith(ends)):
            raise ConfigError(
                f"`{error.where}` is an unknown field: did you mean `{'` or `'.join(others)}`?"
            ) from error
        raise


def _paths(cls: type, prefix: str = "") -> Iterator[str]:
    """Yield the path of each field, but of those of sections in lists and mappings."""
    for name, annotation in typing.get_type_hints(cls).items():
        yield f"{prefix}{name}"
        for section in _dataclasses(annotation):
            yield from _paths(section, f"{prefix}{name}.")


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` updated with ``changes``; a change of ``kind`` discards the other fields."""
    result = dict(base)
    for key, value in changes.items():
        before = base.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            same = value.get("kind", before.get("kind")) == before.get("kind")
            value = merged(before, value) if same else value
        result[key] = value
    return result


def recipes() -> list[str]:
    """Return the names of the recipes that come with effasr."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def from_mapping(cls: type[T], mapping: Mapping[str, Any], path: str = "") -> T:
    """Build ``cls`` from nested mappings, checking every key and type."""
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"`{path or cls.__name__}` must be a mapping, but is {mapping!r}.")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    values = {}
    for key, value in mapping.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in fields:
            raise UnknownField(where, str(key), fields)
        annotation = hints[key]
        check_urls(where, value, allowed=fields[key].metadata.get("remote", False))
        if value is None and _is_optional_section(fields[key], annotation):
            continue
        values[key] = _convert(annotation, value, where)
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path}: {error}" if path else str(error)) from error


def to_mapping(config: Any) -> dict[str, Any]:
    """Return the inverse of `from_mapping`, of plain types that YAML and JSON can hold."""
    return {
        field.name: _plain(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.init
    }


def complete(cls: type, mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `to_mapping` of an earlier version with defaults of new fields; others stay."""
    hints, result = typing.get_type_hints(cls), dict(mapping)
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        if field.name in result:
            result[field.name] = _complete_value(hints[field.name], result[field.name])
        elif field.default is not dataclasses.MISSING:
            # What versions without the field did may not be its default.
            result[field.name] = _plain(field.metadata.get("before", field.default))
        elif field.default_factory is not dataclasses.MISSING:
            result[field.name] = _plain(field.default_factory())
    return result


def _complete_value(annotation: Any, value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if kinds := _dataclasses(annotation):
        try:
            return complete(_select(kinds, value, ""), value)
        except ConfigError:
            return value
    if (inner := _dict_of(annotation)) is not None:
        return {key: _complete_value(typing.get_args(inner)[1], x) for key, x in value.items()}
    return value


def _dict_of(annotation: Any) -> Any:
    """Return the annotation's option that is a dict, if any."""
    options = (x for x in _options(annotation) if typing.get_origin(x) is dict)
    return next(options, None)


def dump(config: Any) -> str:
    """Return the configuration as YAML, every field written out."""
    return dump_yaml(to_mapping(config))


def _find(recipe: str | Path) -> Path:
    path = Path(recipe)
    if path.suffix in {".yaml", ".yml"} or path.is_file():
        if not path.is_file():
            raise ConfigError(f"`recipe` must be a file that exists, but {str(path)!r} does not.")
        return path
    shipped = RECIPES / f"{recipe}.yaml"
    if not shipped.is_file():
        hint = _nearest(str(recipe), recipes()) or f"the recipes are {', '.join(recipes())}."
        raise ConfigError(
            f"`recipe` must be a YAML file or a recipe's name, but is {str(recipe)!r}: {hint}"
        )
    return shipped


def _read(path: Path) -> dict[str, Any]:
    try:
        mapping = read_yaml(path, _Loader, has_checksum=path.name == RUN_CONFIG)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if mapping is None:
        return {}
    if not isinstance(mapping, dict):
        raise ConfigError(f"{path}: a recipe must be a mapping of keys to values.")
    return mapping


class _Loader(yaml.SafeLoader):
    """YAML 1.2 numbers: ``1e-3`` is a float, which PyYAML's own (YAML 1.1) reads as a string."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+0123456789"))


def _apply(cls: type, mapping: dict[str, Any], override: str) -> None:
    dotted, separator, text = override.partition("=")
    dotted = dotted.removeprefix("--")
    if not separator or not dotted:
        raise ConfigError(f"an override must be `path.to.field=value`, but is {override!r}.")
    try:
        value = parse_yaml(text, dotted, _Loader)
    except ValueError as error:
        raise ConfigError(f"`{dotted}`: the value {text!r} is not valid YAML.") from error
    *parents, last = dotted.split(".")
    node, owner, where = mapping, cls, ""
    for key in parents:
        annotation = _child(owner, key, where)
        where = f"{where}.{key}" if where else key
        if not isinstance(node.get(key), dict):
            node[key] = {}
        node, kinds = node[key], _dataclasses(annotation)
        owner = _select(kinds, node, where) if kinds else annotation
    if value is not None and dataclasses.is_dataclass(owner):
        for field in dataclasses.fields(owner):
            # Of two fields of which one may be given, the later override replaces the other.
            pair = (field.name, field.metadata.get("replaces", field.name))
            if last in pair and len(set(pair)) > 1:
                node.pop(pair[pair.index(last) - 1], None)
    node[last] = value


def _child(owner: Any, key: str, path: str) -> Any:
    """Return the type of field ``key``, so that a typing error is named before it is buried.

    It is a dataclass, or a dict, which has a field of any name.
    """
    where = f"{path}.{key}" if path else key
    if typing.get_origin(owner) is dict:
        annotation = typing.get_args(owner)[1]
    else:
        hints = typing.get_type_hints(owner)
        if key not in hints:
            raise UnknownField(where, key, hints)
        annotation = hints[key]
    if _dataclasses(annotation):
        return annotation
    if (option := _dict_of(annotation)) is not None:
        return option
    raise ConfigError(f"`{where}` must be given a value itself, as it has no fields.")


def _is_optional_section(field: dataclasses.Field, annotation: Any) -> bool:
    """Return whether null stands for a field's defaults, like an empty YAML section."""
    has_default = (field.default, field.default_factory) != (dataclasses.MISSING,) * 2
    return has_default and type(None) not in _options(annotation) and bool(_dataclasses(annotation))


def _options(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _dataclasses(annotation: Any) -> list[type]:
    options = _options(annotation)
    return [x for x in options if isinstance(x, type) and dataclasses.is_dataclass(x)]


def _select(classes: Sequence[type], mapping: Mapping[str, Any], where: str) -> type:
    """Return the dataclass whose ``kind`` a mapping names; by default the first of several."""
    if len(classes) == 1 or "kind" not in mapping:
        return classes[0]
    # Each has a field ``kind``, whose default is its name.
    by_kind = {
        str(field.default): cls
        for cls in classes
        for field in dataclasses.fields(cls)
        if field.name == "kind"
    }
    if mapping["kind"] not in by_kind:
        kinds = ", ".join(by_kind)
        raise ConfigError(f"`{where}.kind` must be one of {kinds}, but is {mapping['kind']!r}.")
    return by_kind[mapping["kind"]]


def _convert(annotation: Any, value: Any, where: str) -> Any:
    options = _options(annotation)
    if value is None and type(None) in options:
        return None
    if isinstance(value, Mapping) and (kinds := _dataclasses(annotation)):
        return from_mapping(_select(kinds, value, where), value, where)
    for option in options:
        matched, converted = _match(option, value, where)
        if matched:
            return converted
    is_list = any(Ellipsis in typing.get_args(option) for option in options)
    is_scalar = isinstance(value, str | int | float)
    hint = f": write [{value}] for a list of one." if is_list and is_scalar else "."
    if is_list and value is None:
        hint = ": write [] for none."
    raise ConfigError(f"`{where}` must be {_describe(annotation)}, but is {value!r}{hint}")


def _match(option: Any, value: Any, where: str) -> tuple[bool, Any]:
    origin, arguments = typing.get_origin(option), typing.get_args(option)
    if origin is typing.Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments), value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            return False, None
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            arguments = (arguments[0],) * len(value)
        if len(arguments) != len(value):
            return False, None
        pairs = zip(arguments, value, strict=True)
        return True, tuple(_convert(a, v, f"{where}[{i}]") for i, (a, v) in enumerate(pairs))
    if origin is dict:
        if not isinstance(value, Mapping):
            return False, None
        keys, values = arguments
        return True, {
            _key(keys, k, f"{where}[key]"): _convert(values, v, f"{where}.{k}")
            for k, v in value.items()
        }
    if option is float and type(value) in (int, float):
        return math.isfinite(value), float(value)
    return isinstance(option, type) and type(value) is option, value


def _key(annotation: Any, key: Any, where: str) -> Any:
    """Return a key of a mapping; JSON and dotted paths have numbers only as text."""
    if annotation is str and not isinstance(key, str):
        raise ConfigError(
            f"`{where}` must be text, but is {key!r}: put it in quotes (YAML reads no, yes, on and "
            "off as true or false)."
        )
    is_number = annotation is int and isinstance(key, str) and key.isdecimal()
    return _convert(annotation, int(key) if is_number else key, where)


def _describe(annotation: Any) -> str:
    if annotation is type(None):
        return "null"
    if typing.get_origin(annotation) is typing.Literal:
        return "one of " + ", ".join(repr(choice) for choice in typing.get_args(annotation))
    if typing.get_origin(annotation) is tuple:
        inner = typing.get_args(annotation)
        if inner[-1] is Ellipsis:
            return f"a list, each {_describe(inner[0])}"
        return f"a list of {len(inner)}"
    options = _options(annotation)
    if len(options) > 1:
        return " or ".join(_describe(option) for option in options)
    names = {int: "an integer", float: "a finite number", str: "text", bool: "true or false"}
    return names.get(annotation, f"a mapping ({getattr(annotation, '__name__', annotation)})")


def _nearest(word: str, words: Sequence[str]) -> str:
    matches = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"did you mean `{matches[0]}`?" if matches else ""


def text_of(value: Any) -> str:
    """Return a value as it may stand in an override."""
    return dump_scalar(_plain(value))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_mapping(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
