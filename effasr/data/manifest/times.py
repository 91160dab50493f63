"""Times of words and segments in manifests: fields, and tokens of times in a text."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lhotse.supervision import AlignmentItem

from effasr.data.manifest.row import SEGMENTS, WORDS, ManifestRow

Alignment = dict[str, list[AlignmentItem]]
"""The items of ``word`` and ``segment``: in lhotse, times are from the beginning of a recording."""

_TOKEN = re.compile(r"<\|(\d+(?:\.\d\d)?)\|>")
_FRAME_SECONDS = 0.08  # of NeMo's tokens


def with_times(row: ManifestRow, text: str) -> tuple[str, Alignment | None]:
    """Return a text without tokens of times, and the times in the utterance; None without any.

    Rows of NeMo have ``<|0|> word <|7|>`` in the text, in frames of 80 ms, Whisper's
    ``<|0.00|> words <|1.20|>`` in seconds; others have lists of ``words`` and ``segments``.
    """
    if _TOKEN.search(text):
        texts, numbers = (_TOKEN.split(text)[first::2] for first in (0, 1))
        is_words = "." not in numbers[0] and all(len(part.split()) < 2 for part in texts)
        times = [float(x) * (1.0 if "." in x else _FRAME_SECONDS) for x in numbers]
        if texts[0].strip() or texts[-1].strip():
            raise row.error("tokens of times must be at both ends of each part.", "text")
        parts = zip(texts[1:-1], times, times[1:], strict=False)
        values = [{"text": x, "start": start, "end": end} for x, start, end in parts if x.strip()]
        kind = "word" if is_words else "segment"
        return " ".join(_TOKEN.sub(" ", text).split()), {kind: _items(row, values)}
    segments = _timed(row.values.get(row.first(SEGMENTS)))
    words = _timed(row.values.get(row.first(WORDS)))
    words = words or [word for part in segments for word in _timed(part.get("words"))]
    lists = {"word": _items(row, words), "segment": _items(row, segments)}
    return text, {kind: items for kind, items in lists.items() if items} or None


def shifted(alignment: Alignment | None, seconds: float) -> Alignment | None:
    if not alignment or not seconds:
        return alignment
    return {kind: [x.with_offset(seconds) for x in items] for kind, items in alignment.items()}


def _timed(values: Any) -> list[Mapping[str, Any]]:
    """Return objects with times; a field with others has another use."""
    values = values if isinstance(values, list) else [None]
    is_timed = all(isinstance(x, Mapping) and {"start", "end"} <= x.keys() for x in values)
    return values if is_timed else []


def _items(row: ManifestRow, values: Sequence[Mapping[str, Any]]) -> list[AlignmentItem]:
    items = []
    for value in values:
        part = replace(row, values=value)
        text = part.string(part.first(("word", "segment", "text"))).strip()
        start, end = part.seconds("start", zero=True), part.seconds("end", zero=True)
        if start is None or end is None or end < start:
            raise row.error(f"{text!r} must end after it starts, but has {start} to {end} s.")
        if text:
            items.append(AlignmentItem(text, start, round(end - start, 6)))
    return items
