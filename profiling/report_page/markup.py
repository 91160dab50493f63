"""Figures and pictures of times, on top of the pieces that all pages share."""

import re
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from analysis.verdict import milliseconds, percent

from effasr.pages.markup import Cell, figure, open_svg, rectangle, svg_text, ticks


def unbroken(sentence: str) -> str:
    """Return a sentence whose figures are not parted from their units at the end of a line."""
    return re.sub(r"(\d) (ms|%|\u00b5s|times)", r"\1&nbsp;\2", escape(sentence))


def times(ratio: float | None) -> str:
    return "no bound" if ratio is None else f"{ratio:.2f} \u00d7"


def duration(field: str) -> Callable[[Any], Cell]:
    return lambda entry: figure(entry[field], milliseconds(entry[field]))


def share(field: str) -> Callable[[Any], Cell]:
    return lambda entry: figure(entry[field], percent(entry[field]))


# Pictures as inline SVG; every mark says in a title what it is, and a table says the same.

WIDTH = 1080


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
    out = [open_svg(WIDTH, len(rows) * (height + 8) + 4, label)]
    for number, (name, parts) in enumerate(rows):
        y, x = number * (height + 8) + 4, float(left)
        middle, total = y + height / 2 + 4.5, sum(value for _, value in parts)
        if named:
            out.append(svg_text(0, middle, _cut(name, 32), soft=False))
        for part, value in parts:
            if value > 0:
                wide = value * scale
                title = f"{(names or {}).get(part, part)}: {show(value)}, {percent(value / total)}"
                out.append(rectangle(x, y, wide - 1.5, height, colors.get(part, "--grey"), title))
                x += wide
        out.append(svg_text(x + 8, middle, show(total)))
    return "".join(out) + "</svg>"


def timeline(picture: dict[str, Any], color_of: Callable[[str, str], str]) -> str:
    left, height, gap = 130, 24, 10
    length = picture["length_ms"] or 1
    scale = (WIDTH - left - 10) / length
    rows = picture["rows"]
    total = len(rows) * (height + gap) + 28
    label = f"Step {picture['step']} of {picture['process']}, {milliseconds(length)}"
    out = [open_svg(WIDTH, total, label)]
    bottom = len(rows) * (height + gap) + 4
    for tick in ticks(length):
        x = left + tick * scale
        out.append(f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{bottom}"/>')
        out.append(svg_text(x + 3, bottom + 14, milliseconds(tick)))
    for number, row in enumerate(rows):
        y = number * (height + gap) + 4
        out.append(svg_text(0, y + height / 2 + 4.5, _cut(row["name"], 18), soft=False))
        out.append(f'<rect class="track" x="{left}" y="{y}" width="{WIDTH - left - 10}" '
                   f'height="{height}"/>')  # fmt: skip
        for begin, end, name in row["segments"]:
            title = f"{name}: {milliseconds(end - begin)} from {milliseconds(begin)}"
            position = left + begin * scale, y, (end - begin) * scale, height
            out.append(rectangle(*position, color_of(row["name"], name), title, 0))
    return "".join(out) + "</svg>"


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
