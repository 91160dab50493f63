"""Pieces of HTML: escaped text, figures, tables."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from analysis.verdict import milliseconds, percent

# As in effasr.untrusted.display, which a report does not need to be installed.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029"
    "\ud800-\udfff]"
)


@dataclass(frozen=True, slots=True)
class Cell:
    html: str
    value: float | None = None


def without_controls(value: str) -> str:
    """Return a text with control characters and marks of direction as visible escapes."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), value)


def text(value: object) -> Cell:
    return Cell(escape(str(value)))


def figure(value: float | None, html: str) -> Cell:
    return Cell("&ndash;", 0.0) if value is None else Cell(html, value)


def unbroken(sentence: str) -> str:
    """Return a sentence whose figures are not parted from their units at the end of a line."""
    return re.sub(r"(\d) (ms|%|\u00b5s|times)", r"\1&nbsp;\2", escape(sentence))


def times(ratio: float | None) -> str:
    return "no bound" if ratio is None else f"{ratio:.2f} \u00d7"


def key(color: str) -> str:
    return f'<span class="key" style="background:var({color})"></span>'


def keyed(color: str, name: str) -> str:
    return f'<span class="keyed">{key(color)}{escape(name)}</span>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    items = "".join(f"<li>{key(color)}{escape(name)}</li>" for name, color in entries)
    return f'<ul class="legend">{items}</ul>'


def duration(field: str) -> Callable[[Any], Cell]:
    return lambda entry: figure(entry[field], milliseconds(entry[field]))


def share(field: str) -> Callable[[Any], Cell]:
    return lambda entry: figure(entry[field], percent(entry[field]))


def records(
    columns: Mapping[str, Callable[[Any], Cell]],
    entries: Iterable[Any],
    *,
    caption: str = "",
    last: Any = None,
    sortable: bool = False,
) -> str:
    """Return a table with a row for each entry, and one for ``last``; the first column names it."""
    rows = [[cell(entry) for cell in columns.values()] for entry in entries]
    head = "".join(
        f'<th scope="col"{_class(any(row[n].value is not None for row in rows))}>'
        f"{escape(name.rstrip())}</th>"
        for n, name in enumerate(columns)
    )
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    if last is not None:
        body += f'<tr class="sum">{_cells([cell(last) for cell in columns.values()])}</tr>'
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll"><table class="{"sortable" if sortable else ""}">{title}<thead>'
        f"<tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _class(is_figure: bool) -> str:
    return ' class="n"' if is_figure else ""


def _cells(row: Sequence[Cell]) -> str:
    made = []
    for number, cell in enumerate(row):
        attributes = _class(cell.value is not None)
        if cell.value is not None:
            attributes += f' data-v="{cell.value:.9g}"'
        tag = 'th scope="row"' if number == 0 else "td"
        made.append(f"<{tag}{attributes}>{cell.html}</{tag.split()[0]}>")
    return "".join(made)


def paragraph(sentence: str) -> str:
    return f"<p>{escape(sentence)}</p>"


def lead(sentence: str) -> str:
    return f'<p class="lead">{escape(sentence)}</p>'


def section(title: str, identifier: str, content: str) -> str:
    return f'<section id="{identifier}"><h2>{escape(title)}</h2>{content}</section>'


# Pictures as inline SVG; every mark says in a title what it is, and a table says the same.

WIDTH = 1080


def _open(height: float, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'
        f"<title>{escape(label)}</title>"
    )


def _text(x: float, y: float, text: str, *, soft: bool = True) -> str:
    kind = ' class="soft"' * soft
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _rectangle(
    x: float, y: float, width: float, height: float, color: str, title: str, radius: float = 2
) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.6):.2f}" height="{height:.1f}" '
        f'rx="{min(radius, width / 2):.1f}" fill="var({color})">'
        f"<title>{escape(title)}</title></rect>"
    )


def stacked(
    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]],
    colors: dict[str, str],
    label: str,
    names: dict[str, str] | None = None,
    show: Callable[[float], str] = milliseconds,
) -> str:
    named = any(name for name, _ in rows)
    left, right = (230 if named else 0), 90
    longest = max((sum(v for _, v in parts) for _, parts in rows), default=0) or 1
    scale = (WIDTH - left - right) / longest
    height = 34 if len(rows) == 1 else 26
    out = [_open(len(rows) * (height + 8) + 4, label)]
    for number, (name, parts) in enumerate(rows):
        y, x = number * (height + 8) + 4, float(left)
        middle, total = y + height / 2 + 4.5, sum(value for _, value in parts)
        if named:
            out.append(_text(0, middle, _cut(name, 32), soft=False))
        for part, value in parts:
            if value > 0:
                wide = value * scale
                title = f"{(names or {}).get(part, part)}: {show(value)}, {percent(value / total)}"
                out.append(_rectangle(x, y, wide - 1.5, height, colors.get(part, "--grey"), title))
                x += wide
        out.append(_text(x + 8, middle, show(total)))
    return "".join(out) + "</svg>"


def timeline(picture: dict[str, Any], color_of: Callable[[str, str], str]) -> str:
    left, height, gap = 130, 24, 10
    length = picture["length_ms"] or 1
    scale = (WIDTH - left - 10) / length
    rows = picture["rows"]
    total = len(rows) * (height + gap) + 28
    label = f"Step {picture['step']} of {picture['process']}, {milliseconds(length)}"
    out = [_open(total, label)]
    bottom = len(rows) * (height + gap) + 4
    for tick in _ticks(length):
        x = left + tick * scale
        out.append(f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{bottom}"/>')
        out.append(_text(x + 3, bottom + 14, milliseconds(tick)))
    for number, row in enumerate(rows):
        y = number * (height + gap) + 4
        out.append(_text(0, y + height / 2 + 4.5, _cut(row["name"], 18), soft=False))
        out.append(f'<rect class="track" x="{left}" y="{y}" width="{WIDTH - left - 10}" '
                   f'height="{height}"/>')  # fmt: skip
        for begin, end, name in row["segments"]:
            title = f"{name}: {milliseconds(end - begin)} from {milliseconds(begin)}"
            position = left + begin * scale, y, (end - begin) * scale, height
            out.append(_rectangle(*position, color_of(row["name"], name), title, 0))
    return "".join(out) + "</svg>"


def _ticks(length: float) -> list[float]:
    power = 10 ** math.floor(math.log10(length / 9))
    step = next(m * power for m in (1, 2, 5, 10) if length / (m * power) <= 9)
    return [
        step * number for number in range(int(length / step) + 1) if step * number < length * 0.97
    ]


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
