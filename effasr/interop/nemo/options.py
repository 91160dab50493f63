"""Sections of NeMo's YAML files, read strictly: no option that matters is passed by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Rule = tuple[Any, Callable[[Any], bool], str]
"""Of an option with one meaning here: NeMo's default, whether a value is right, and what is."""


@dataclass(frozen=True, slots=True)
class Section:
    """What a section of a configuration may say.

    Attributes:
        defaults: Options that are read, with what NeMo takes where the file leaves them out.
        fixed: Options that must have one value, or mean it.
        training: Options of training alone that have no counterpart, and what turns them off.
        ignored: Options that change neither the function nor what training aims at, between
            spaces.
        classes: The classes that ``_target_`` may name, without their modules; empty for any.
    """

    defaults: Mapping[str, Any]
    fixed: Mapping[str, Rule] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    ignored: str = ""
    classes: tuple[str, ...] = ()

    def read(self, where: str, mapping: Any, unused: list[str]) -> dict[str, Any]:
        """The options that are read.

        Args:
            where: The name of the section, for messages.
            mapping: Its content.
            unused: Gets the options of training that are not used here.

        Raises:
            ValueError: It is no mapping, or an option is unknown or must have another value.
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

    def _check_class(self, where: str, target: Any) -> None:
        if self.classes and str(target).rsplit(".", 1)[-1] not in self.classes:
            raise ValueError(
                f"`{where}._target_` must be {' or '.join(self.classes)}, but is {_shown(target)}."
            )


def only(*values: Any, default: Any = None) -> Rule:
    """The option has one of these values, the first of which is NeMo's default unless given."""
    names = " or ".join(_shown(value) for value in values)
    return values[0] if default is None else default, lambda value: value in values, names


def integer(where: str, value: Any) -> int:
    """A whole number.

    Raises:
        ValueError: It is none, such as an interpolation that was not resolved.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"`{where}` must be an int, but is {value!r}.")
    return value


def number(where: str, value: Any) -> float:
    """A number; null is 0.

    Raises:
        ValueError: It is none.
    """
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"`{where}` must be a number, but is {value!r}.")
    return float(value)


def switch(where: str, value: Any) -> bool:
    """True or false.

    Raises:
        ValueError: It is neither.
    """
    if not isinstance(value, bool):
        raise ValueError(f"`{where}` must be true or false, but is {value!r}.")
    return value


def _shown(value: Any) -> str:
    """A value as YAML writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
