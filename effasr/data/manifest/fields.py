"""Checks fields of manifest lines; errors name the line, the field and the remedy."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, cast

from effasr.data.prompt import Prompt, Task

_TASKS: dict[str, Task] = {
    "asr": "transcribe",
    "transcribe": "transcribe",
    "transcription": "transcribe",
    "ast": "translate",
    "s2t_translation": "translate",
    "translate": "translate",
    "translation": "translate",
}
_YES_NO = {
    "yes": True,
    "true": True,
    "pnc": True,
    "no": False,
    "false": False,
    "nopnc": False,
}


def text_field(row: Mapping[str, Any], name: str, origin: str) -> str:
    """Return a field that must be there and must be a string.

    Raises:
        ValueError: It is missing or of another type.
    """
    if name not in row:
        raise ValueError(f"{origin}: `{name}` is missing: every line needs it.")
    value = row[name]
    if not isinstance(value, str):
        raise ValueError(f"{origin}: `{name}` must be a string, but is {value!r}.")
    return value


def transcript_field(
    row: Mapping[str, Any], name: str, origin: str, *, untranscribed: bool = False
) -> str:
    """Return a transcript, stripped; null is an empty one, which filters drop.

    With ``untranscribed`` it may be missing, too.

    Raises:
        ValueError: It is missing where it must not be, or no string.
    """
    if untranscribed or name in row:
        return (optional_text(row, name, origin) or "").strip()
    return text_field(row, name, origin).strip()


def optional_text(row: Mapping[str, Any], name: str, origin: str) -> str | None:
    """Return a string field that may be missing, null or empty.

    Raises:
        ValueError: It is of another type.
    """
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{origin}: `{name}` must be a string, but is {value!r}.")
    return value or None


def seconds_field(
    row: Mapping[str, Any], name: str, origin: str, *, zero: bool = False
) -> float | None:
    """Return a time in seconds that may be missing; 0 is valid with ``zero``.

    Raises:
        ValueError: It is not a finite number, or negative, or 0 where that is not allowed.
    """
    value = row.get(name)
    if value is None:
        return None
    # Python counts further than a float reaches.
    finite = isinstance(value, int | float) and abs(value) <= sys.float_info.max
    if isinstance(value, bool) or not finite:
        shown = repr(value)[:60]
        raise ValueError(f"{origin}: `{name}` must be a number of seconds, but is {shown}.")
    if value < 0 or (value == 0 and not zero):
        rule = "at least 0" if zero else "greater than 0"
        raise ValueError(f"{origin}: `{name}` must be {rule}, but is {value}.")
    return float(value)


def prompt_fields(row: Mapping[str, Any], origin: str, language: str) -> Prompt:
    """Languages, task and punctuation, by the names that NeMo's manifests use.

    ``source_lang`` is the language spoken; without it ``lang`` is. ``target_lang`` is the
    language of the text; without it ``lang`` is, beside a ``source_lang``, and else the
    language spoken. ``task`` or ``taskname`` says transcription or translation; without it
    the languages do. ``pnc`` is true by default.

    Raises:
        ValueError: A field has the wrong type, a task is unknown, or they contradict each other.
    """
    lang = optional_text(row, "lang", origin) or optional_text(row, "language", origin)
    spoken = optional_text(row, "source_lang", origin)
    source = spoken or lang or language
    target = optional_text(row, "target_lang", origin) or (lang if spoken else None) or source
    named = optional_text(row, "task", origin) or optional_text(row, "taskname", origin)
    task: Task = "transcribe" if source == target else "translate"
    if named is not None:
        task = _TASKS.get(named.lower(), cast(Task, ""))
        if not task:
            raise ValueError(
                f"{origin}: `task` must be one of {', '.join(_TASKS)}, but is {named!r}."
            )
    punctuation = _punctuation(row.get("pnc"), origin)
    try:
        return Prompt(source, target, task, punctuation)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from error


def _punctuation(value: object, origin: str) -> bool:
    if value is None or value == "":
        return True
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _YES_NO:
        return _YES_NO[value.lower()]
    raise ValueError(
        f"{origin}: `pnc` must be true, false or one of {', '.join(_YES_NO)}, but is {value!r}."
    )
