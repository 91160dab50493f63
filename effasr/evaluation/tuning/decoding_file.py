"""The file with the options of a search, which ``effasr tune`` writes."""

import os
from collections.abc import Mapping
from dataclasses import asdict, make_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from effasr.config import from_mapping
from effasr.data.atomic_files import write_atomically
from effasr.decoding.config import SEARCH, SECOND_PASS, DecodingConfig
from effasr.untrusted.display import escape_line
from effasr.untrusted.documents import dump_yaml, read_yaml

DECODING_FILE = "decoding.yaml"

_NAMES = *SEARCH, *SECOND_PASS
# Fields of the file, in types of YAML, which has no paths.
_TYPES = {
    name: str | None if hint == Path | None else hint | None
    for name, hint in get_type_hints(DecodingConfig).items()
}
_Stored = make_dataclass("_Stored", [(name, _TYPES[name], None) for name in _NAMES])


def read_decoding(path: str | Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return these fields and a file's others, but no weights for another language model."""
    try:
        stored = asdict(from_mapping(_Stored, read_yaml(path)))
    except ValueError as error:
        raise ValueError(
            f"`decoding` {path} must have options of a search, as `effasr tune` writes them, but "
            f"has not: {error}"
        ) from error
    fields = {name: value for name, value in stored.items() if value is not None}
    chosen = {name: value for name, value in options.items() if value is not None}
    # The other fields of each group hold for one language model alone.
    for name, *weights in (("lm", "lm_unit", "lm_weight"), SECOND_PASS):
        if name in fields:
            fields[name] = _absolute(fields[name])
        if name in chosen and _absolute(chosen[name]) != fields.get(name):
            fields = {key: value for key, value in fields.items() if key not in weights}
    return fields | chosen


def write_decoding(path: str | Path, config: DecodingConfig, comment: str) -> None:
    """Write the options of a search, atomically; creates the folder."""
    plain, row = DecodingConfig(), {}
    for name in _NAMES:
        value = getattr(config, name)
        if value != getattr(plain, name):
            row[name] = str(_absolute(value)) if isinstance(value, Path) else value
    text = f"# {escape_line(comment)}\n{dump_yaml(row)}"
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode("utf-8"))


def _absolute(path: str | Path) -> Path:
    return Path(os.path.abspath(path))
