"""Checks of configurations, with messages of one form: ``field`` must RULE, but is VALUE."""

from __future__ import annotations

import dataclasses
from typing import Any


def check(condition: bool, name: str, rule: str, value: Any, remedy: str = "") -> None:
    if not condition:
        raise ValueError(f"`{name}` must {rule}, but is {value}{f': {remedy}' if remedy else ''}.")


def check_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        check(value >= 1, name, "be at least 1", value)


def check_dropouts(config: Any) -> None:
    """Check that the fields whose names say dropout are in [0, 1)."""
    for field in dataclasses.fields(config):
        if field.name.endswith("dropout"):
            value = getattr(config, field.name)
            check(0 <= value < 1, field.name, "be in [0, 1)", value)


def check_choices(config: object, **choices: tuple[str, ...]) -> None:
    for name, values in choices.items():
        value = getattr(config, name)
        check(value in values, name, f"be one of {', '.join(values)}", repr(value))
