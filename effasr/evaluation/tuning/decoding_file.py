"""The file with the options of a search, which ``effasr tune`` writes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from effasr.config import from_mapping
from effasr.data.atomic_files import write_atomically
from effasr.decoding.config import DecodingConfig
from effasr.untrusted.display import escape_line
from effasr.untrusted.documents import dump_yaml, read_yaml

DECODING_FILE = "decoding.yaml"

_WEIGHTS = {
    "lm": ("lm_unit", "lm_weight"),
    "second_lm": ("second_lm_weight", "second_word_bonus"),
    "corrector": ("corrector_margin", "corrector_source"),
}
"""What holds for one language model or corrector alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    """The fields of `DecodingConfig` that the file may have, in types of YAML."""

    method: Literal["auto", "attention", "transducer", "ctc", "language_model"] | None = None
    beam: int | None = None
    length_penalty: float | None = None
    coverage_penalty: float | None = None
    ctc_weight: float | None = None
    no_repeat_ngram: int | None = None
    lm: str | None = None
    lm_unit: Literal["token", "word"] | None = None
    lm_weight: float | None = None
    second_lm: str | None = None
    second_lm_weight: float | None = None
    second_word_bonus: float | None = None
    corrector: str | None = None
    corrector_margin: float | None = None
    corrector_source: str | None = None


def read_decoding(path: str | Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of `DecodingConfig`: those that are given, and others from a file.

    With another language model than that of the file, the weights of the file's are left out.

    Args:
        path: A file of `write_decoding`.
        given: Fields with precedence; None for those that are not given.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no mapping of these fields, or a value is of the wrong type.
    """
    try:
        found = asdict(from_mapping(_Stored, read_yaml(path)))
    except ValueError as error:
        raise ValueError(
            f"`decoding` {path} must have options of a search, as `effasr tune` writes them, but "
            f"has not: {error}"
        ) from error
    fields = {name: value for name, value in found.items() if value is not None}
    chosen = {name: value for name, value in given.items() if value is not None}
    for name, weights in _WEIGHTS.items():
        if name in fields:
            fields[name] = _absolute(fields[name])
        if name in chosen and _absolute(chosen[name]) != fields.get(name):
            fields = {key: value for key, value in fields.items() if key not in weights}
    return fields | chosen


def write_decoding(path: str | Path, config: DecodingConfig, comment: str) -> None:
    """Write the options of a search, atomically; creates the folder.

    Args:
        path: The file.
        config: The configuration; only what differs from the defaults is written. The paths of its
            language models become absolute.
        comment: One line that says where the options come from.
    """
    plain, row = DecodingConfig(), {}
    for name in asdict(_Stored()):
        value = getattr(config, name)
        if value != getattr(plain, name):
            row[name] = str(_absolute(value)) if isinstance(value, Path) else value
    text = f"# {escape_line(comment)}\n{dump_yaml(row)}"
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode("utf-8"))


def _absolute(path: str | Path) -> Path:
    return Path(os.path.abspath(path))
