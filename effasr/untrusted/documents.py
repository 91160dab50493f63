"""Parses untrusted JSON and YAML, every error in which is a `ValueError`; and writes YAML.

Written texts are read as they were by readers of YAML 1.1 and of recipes: PyYAML writes ``1e5`` and
the line separators of Unicode without quotes, so that recipes, which have the numbers of YAML 1.2,
would have a number for the one, and any reader a space for the other.
"""

import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from effasr.untrusted.files import DOCUMENT_BYTES, read_bytes, read_text
from effasr.untrusted.mistaken import mistaken

YAML_BYTES = 4 << 20
"""Largest size of a YAML file in bytes: PyYAML reads about 1 MB in 5 seconds."""

MOST_DEPTH = 64
"""Largest nesting depth of lists and mappings."""

_MOST_NODES = 500_000
"""Largest number of values of a YAML document; values behind an alias count at each use."""

_MOST_JSON_NODES = 4_000_000
"""Largest number of values of a JSON document; a value of two bytes takes a hundred in memory."""

_MOST_NUMBER = 400
"""Largest number of characters of a number: parsing time grows with the square."""

_CHECKSUM_LINE = "# CRC-32 of the lines above: {:08x}. Remove this line if you edit them.\n"
_CHECKSUM = re.compile(rb"^# CRC-32 of the lines above: ([0-9a-f]{8})\b.*\n*\Z", re.MULTILINE)

WRONG_VALUES = (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)
"""Exceptions, in addition to ValueError, that code raises on values of unexpected types."""


def read_json(path: str | Path) -> Any:
    try:
        return parse_json(read_text(path, DOCUMENT_BYTES), str(path))
    except ValueError as error:
        if (kind := mistaken(Path(path))) is not None:
            raise ValueError(f"{path} must be JSON, but is {kind[0]}: {kind[1]}.") from error
        raise


def read_json_object(path: str | Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, but holds a {type(value).__name__}.")
    return value


def parse_json(text: str, name: str) -> Any:
    """Parse a JSON document; a ValueError with its name for whatever is wrong with it."""
    check_json_nodes(text, name)
    try:
        value = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not valid JSON: {error}.") from error
    if is_deep(value):
        raise ValueError(f"{name} must be nested at most {MOST_DEPTH} deep, but is deeper.")
    return value


def check_json_nodes(text: str, name: str) -> None:
    """Check the number of values of a JSON text, before memory is taken for them."""
    # Each value but the first follows one of these, which texts may contain, too.
    if len(text) > _MOST_JSON_NODES and sum(map(text.count, "[{:,")) >= _MOST_JSON_NODES:
        raise ValueError(f"{name} must have at most {_MOST_JSON_NODES} values, but has more.")


def is_deep(value: Any) -> bool:
    level, depth = [value], 0
    while level := [inner for outer in level for inner in _children(outer)]:
        depth += 1
        if depth > MOST_DEPTH:
            return True
    return False


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        yield from value.values() if isinstance(value, dict) else value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice[:100]!r} appears twice in an object")
    return mapping


def read_yaml(
    path: str | Path,
    loader: type[yaml.SafeLoader] = yaml.SafeLoader,
    *,
    has_checksum: bool = False,
) -> Any:
    """Parse a YAML file, and compare it with its checksum line, which may have been removed."""
    if has_checksum:
        _verify_checksum_line(read_bytes(path, YAML_BYTES), str(path))
    return parse_yaml(read_text(path, YAML_BYTES), str(path), loader)


def with_checksum_line(text: str) -> str:
    return text + _CHECKSUM_LINE.format(zlib.crc32(text.encode()))


def _verify_checksum_line(content: bytes, name: str) -> None:
    match = _CHECKSUM.search(content)
    if match is not None and zlib.crc32(content[: match.start()]) != int(match[1], 16):
        raise ValueError(
            f"{name} does not match the checksum in its last line: restore it if it is damaged; "
            "if you have edited it, remove that line."
        )


def parse_yaml(text: str, name: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """Parse a YAML document of plain data; a ValueError with its name for whatever is wrong."""
    try:
        reader = loader(text)
        try:
            node = reader.get_single_node()
            if node is None:
                return None
            _expanded(node, {}, 0)
            return reader.construct_document(node)
        finally:
            reader.dispose()
    except RecursionError:
        raise ValueError(f"{name} is not valid YAML: it is nested too deep.") from None
    # PyYAML raises various exceptions for values such as `!!int ""`, `!!bool x` or 2001-99-99.
    except (yaml.YAMLError, ValueError, *WRONG_VALUES) as error:
        raise ValueError(f"{name} is not valid YAML: {' '.join(str(error).split())}.") from error


def _expanded(node: yaml.Node, sizes: dict[int, int], depth: int) -> int:
    """The number of values in a node after all aliases are expanded."""
    if depth > MOST_DEPTH:
        raise ValueError(f"it must be nested at most {MOST_DEPTH} deep, but is deeper")
    if isinstance(node, yaml.ScalarNode):
        if node.tag.endswith((":int", ":float")) and len(node.value) > _MOST_NUMBER:
            raise ValueError(f"a number has {len(node.value)} characters")
        return 1
    if id(node) in sizes:
        if not sizes[id(node)]:
            raise ValueError("it contains itself")
        return sizes[id(node)]
    sizes[id(node)] = 0
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if (key.tag, key.value) in seen:
                    line = key.start_mark.line + 1
                    raise ValueError(f"line {line}: the key {key.value[:100]!r} appears twice")
                seen.add((key.tag, key.value))
        parts = [part for pair in node.value for part in pair]
    else:
        parts = node.value
    size = 1 + sum(_expanded(part, sizes, depth + 1) for part in parts)
    if size > _MOST_NODES:
        raise ValueError(f"it has more than {_MOST_NODES} values, or its aliases stand for so many")
    sizes[id(node)] = size
    return size


NUMBER = re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$")
"""Floats of YAML 1.2 that are text in YAML 1.1."""

_SEPARATORS = re.compile("[\x85\u2028\u2029]")


class _Dumper(yaml.SafeDumper):
    pass


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # In double quotes, separators are written as escapes.
    style = '"' if _SEPARATORS.search(text) else "'" if NUMBER.match(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _represent_text)


def dump_yaml(value: Any) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def dump_scalar(value: Any) -> str:
    """A value on one line, such as a text, quoted where necessary."""
    dumped = yaml.dump(
        [value],
        Dumper=_Dumper,
        default_flow_style=True,
        default_style='"' if isinstance(value, str) and "\n" in value else None,
        allow_unicode=True,
        width=10**6,
    )
    return dumped.strip()[1:-1]
