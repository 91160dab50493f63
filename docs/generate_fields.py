"""Writes docs/fields.md: every field of a recipe, from the docstrings of the configuration.

    python docs/generate_fields.py [--check]

--check writes nothing, and exits with 1 if the page is not up to date.
"""

import argparse
import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from effasr.training.config import TrainConfig

PAGE = Path(__file__).parent / "fields.md"
_HEAD = """\
# Fields of a recipe

After this page you can look up what a field of a recipe means, what it may be, and what it is by
default.

<!-- Written by docs/generate_fields.py. -->

A recipe has what differs from the defaults. `effasr train RECIPE field=value` overrides a field by
its path, and `effasr train RECIPE --show` prints all of them. `null` turns a part off where it is
allowed. An unknown field is an error that names the nearest one. A field that has no effect beside
the others must have its default.
"""
_ENTRY = re.compile(r"(\w+(?:, \w+)*): (.*)")
_PLAIN = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null"}


def sections(cls: type) -> dict[type, list[str]]:
    """Return the classes of a configuration, each with the paths at which it stands."""
    found: dict[type, list[str]] = {}
    _collect(cls, "", found)
    return found


def _collect(cls: type, path: str, found: dict[type, list[str]]) -> None:
    found.setdefault(cls, []).append(path)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        own = f"{path}.{field.name}".lstrip(".")
        for inner, suffix in _classes(hints[field.name]):
            # A class may hold itself, such as a source of sources.
            if own + suffix not in found.get(inner, []) and inner is not cls:
                _collect(inner, own + suffix, found)


def _classes(annotation: Any) -> Iterator[tuple[type, str]]:
    """Yield the classes of sections in an annotation, with what their paths add to its own."""
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        yield annotation, ""
    elif typing.get_origin(annotation) is dict:
        yield from ((one, ".NAME") for one, _ in _classes(typing.get_args(annotation)[1]))
    elif typing.get_origin(annotation) is tuple:
        yield from ((one, "[]") for one, _ in _classes(typing.get_args(annotation)[0]))
    elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for option in typing.get_args(annotation):
            yield from _classes(option)


def meanings(cls: type) -> dict[str, str]:
    """Return the text of each field in the section ``Attributes`` of a docstring."""
    _, _, text = (inspect.getdoc(cls) or "").partition("\nAttributes:\n")
    found: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc(re.split(r"\n(?=\w+:\n)", text)[0]).splitlines():
        if not line.startswith(" ") and (match := _ENTRY.fullmatch(line)):
            names = match[1].split(", ")
            found |= dict.fromkeys(names, match[2])
        else:
            found |= {name: f"{found[name]} {line.strip()}".rstrip() for name in names}
    return found


def describe(annotation: Any, titles: Mapping[type, str]) -> str:
    """Return what a value may be.

    Args:
        annotation: Type of the field.
        titles: Titles of the sections that it may be.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe(one, titles) for one in arguments))
    if origin is tuple:
        inner = describe(arguments[0], titles)
        return f"list: {inner}" if arguments[-1] is Ellipsis else f"{len(arguments)} of: {inner}"
    if origin is dict:
        return f"mapping to: {describe(arguments[1], titles)}"
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        title = titles[annotation]
        return f"[{title}](#{_anchor(title)})"
    return _PLAIN.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(field: dataclasses.Field) -> str:
    value: Any = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING:
        return "required"
    if dataclasses.is_dataclass(value):
        return ""
    return f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_yaml(item)}' for key, item in value.items())}}}"
    names = {None: "null", True: "true", False: "false", "": '""'}
    is_name = value is None or isinstance(value, bool | str)
    return names.get(value, str(value)) if is_name else f"{value:g}" if value else "0"


def _title(cls: type, paths: Sequence[str]) -> str:
    """Return the first path of a section, and its ``kind`` where the path has several."""
    kinds = [field.default for field in dataclasses.fields(cls) if field.name == "kind"]
    of_kind = f" ({kinds[0]})" if kinds and paths[0] != "model.features" else ""
    return f"{paths[0] or 'Top level'}{of_kind}"


def _anchor(title: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")


def _cell(text: str) -> str:
    text = re.sub(r"``(.+?)``", r"`\1`", text)
    text = re.sub(r"`effasr\.([\w.]+)`", r"`\1`", text)
    text = re.sub(r"\bNone\b", "null", text)  # as a recipe has it
    return text.replace("|", "\\|")


def render() -> str:
    """Return the page."""
    lines, found = [_HEAD], sections(TrainConfig)
    titles = {cls: _title(cls, paths) for cls, paths in found.items()}
    for cls, title in titles.items():
        summary = (inspect.getdoc(cls) or "").partition("\n\n")[0]
        lines.append(f"- [{title}](#{_anchor(title)}): {_cell(' '.join(summary.split()))}")
    for cls, paths in found.items():
        lines += ["", f"## {titles[cls]}", ""]
        if paths[1:]:
            lines += [f"Also {', '.join(f'`{path}`' for path in paths[1:])}.", ""]
        lines += ["| field | value | default | meaning |", "|---|---|---|---|"]
        hints, texts = typing.get_type_hints(cls), meanings(cls)
        for field in dataclasses.fields(cls):
            if field.init:
                row = f"`{field.name}`", describe(hints[field.name], titles), _default(field)
                lines.append(f"| {' | '.join(row)} | {_cell(texts[field.name])} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or check it; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only report an outdated page")
    options, text = parser.parse_args(arguments), render()
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    if options.check:
        sys.stderr.write(f"{PAGE} is not up to date: run python docs/generate_fields.py\n")
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
