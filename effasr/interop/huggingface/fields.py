"""Maps fields of transformers' configurations to those of this project."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Fields:
    """A section of a configuration of transformers, read and written by one table.

    Attributes:
        section: Name of the section, for messages.
        table: Maps our field: the field of transformers, and the value that transformers 5.23 fills
            in where a file leaves it out.
        fixed: Fields of transformers that can have only one value here.
        choices: Fields of transformers, all of the table, that can have only these values here.
    """

    section: str
    table: Mapping[str, tuple[str, Any]]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def read(self, mapping: Mapping[str, Any]) -> dict[str, Any]:
        """Our fields of a section.

        Raises:
            ValueError: A field has a value that is not possible here.
        """
        for key, only in self.fixed.items():
            if mapping.get(key, only) != only:
                raise ValueError(f"`{self.section}.{key}` must be {only}, but is {mapping[key]}.")
        values = {}
        for ours, (theirs, default) in self.table.items():
            value = mapping.get(theirs, default)
            if value not in self.choices.get(theirs, (value,)):
                rule = " or ".join(map(str, self.choices[theirs]))
                raise ValueError(f"`{self.section}.{theirs}` must be {rule}, but is {value}.")
            values[ours] = float(value or 0.0) if isinstance(default, float) else value
        return values

    def write(self, config: object) -> dict[str, Any]:
        """Return the section of one of our configurations, fixed fields included."""
        fields = {theirs: getattr(config, ours) for ours, (theirs, _) in self.table.items()}
        return {**fields, **self.fixed}
