"""Writes YAML whose texts are read as they were, by readers of YAML 1.1 and of recipes.

PyYAML writes ``1e5`` and the line separators of Unicode without quotes: recipes, which have the
numbers of YAML 1.2, would have a number for the one, and any reader a space for the other.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

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


def dump_scalar(text: str | None) -> str:
    """A text as a scalar on one line, quoted where necessary."""
    dumped = yaml.dump(
        [text],
        Dumper=_Dumper,
        default_flow_style=True,
        default_style='"' if text and "\n" in text else None,
        allow_unicode=True,
        width=10**6,
    )
    return dumped.strip()[1:-1]
