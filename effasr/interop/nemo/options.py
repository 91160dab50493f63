"""Strict reading of sections of NeMo's YAML files: unknown options are errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Rule = tuple[Any, Callable[[Any], bool], str]
"""Rule of an option with only one supported meaning: NeMo's default, a check and a description."""


@dataclass(frozen=True, slots=True)
class Section:
    """Options of a section.

    Attributes:
        defaults: Options that are read, with NeMo's defaults.
        fields: Our fields of the same meaning: for each the option, and what checks its value.
        fixed: Options that must have one value or meaning.
        training: Training options without counterpart here, with the value that turns them off.
        ignored: Options that affect neither the function nor the objective, separated by spaces.
        classes: Classes that ``_target_`` may name, without their modules; empty for any.
    """

    defaults: Mapping[str, Any]
    fields: Mapping[str, tuple[str, Callable[[str, Any], Any]]] = field(default_factory=dict)
    fixed: Mapping[str, Rule] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    ignored: str = ""
    classes: tuple[str, ...] = ()

    def read(self, where: str, mapping: Any, unused: list[str]) -> dict[str, Any]:
        """Read the options of the section.

        Args:
            where: Name of the section, for messages.
            mapping: Content of the section.
            unused: Receives the training options that are not used here.

        Raises:
            ValueError: It is no mapping, or an option is unknown or has another value.
        """
        if not isinstance(mapping, Mapping):
            raise ValueError(f"`{where}` must be a mapping, but is {mapping!r}.")
        self._check_class(where, mapping.get("_target_"))
        known = {*self.defaults, *self.fixed, *self.training, *self.ignored.split(), "_target_"}
        for key, value in mapping.items():
            if key not in known and value is not None:
                raise ValueError(
                    f"`{where}.{key}` must be left out, as it is unknown here and may change what "
                    f"the model computes, but is {value!r}."
                )
        for key, (default, is_met, rule) in self.fixed.items():
            value = mapping.get(key, default)
            if not is_met(value):
                raise ValueError(f"`{where}.{key}` must be {rule}, but is {_shown(value)}.")
        for key, off in self.training.items():
            value = mapping.get(key)
            if value is not None and value != off:
                unused.append(f"{where}.{key} = {value}")
        return {key: mapping.get(key, default) for key, default in self.defaults.items()}

    def convert(self, where: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Our fields, from what `read` returned.

        Raises:
            ValueError: A value has the wrong type.
        """
        return {
            ours: check(f"{where}.{option}", values[option])
            for ours, (option, check) in self.fields.items()
        }

    def write(self, config: object) -> dict[str, Any]:
        """Return the options of these fields of one of our configurations."""
        return {option: getattr(config, ours) for ours, (option, _) in self.fields.items()}

    def _check_class(self, where: str, target: Any) -> None:
        if self.classes and str(target).rsplit(".", 1)[-1] not in self.classes:
            raise ValueError(
                f"`{where}._target_` must be {' or '.join(self.classes)}, but is {_shown(target)}."
            )


def only(*values: Any, default: Any = None) -> Rule:
    """Return a rule that allows these values, the first of which is NeMo's default unless given."""
    names = " or ".join(_shown(value) for value in values)
    return values[0] if default is None else default, lambda value: value in values, names


def integer(where: str, value: Any) -> int:
    """Check that an option is an integer, and no unresolved interpolation."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"`{where}` must be an int, but is {value!r}.")
    return value


def one_of(*choices: int) -> Callable[[str, Any], int]:
    """Return a check that an option is one of these integers."""

    def check(where: str, value: Any) -> int:
        if isinstance(value, bool) or value not in choices:
            rule = " or ".join(map(str, choices))
            raise ValueError(f"`{where}` must be {rule}, but is {_shown(value)}.")
        return value

    return check


def number(where: str, value: Any) -> float:
    """Check that an option is a number; null is 0."""
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"`{where}` must be a number, but is {value!r}.")
    return float(value)


def switch(where: str, value: Any) -> bool:
    """Check that an option is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"`{where}` must be true or false, but is {value!r}.")
    return value


def _shown(value: Any) -> str:
    """Return a value as YAML writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
