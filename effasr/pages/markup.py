"""Pieces of pages: escaped text, figures, tables, pictures as inline SVG."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from effasr.pages import style
from effasr.untrusted.display import escape_controls


def page(title: str, body: str) -> str:
    """Return a whole document; its texts may be those of anybody."""
    return escape_controls(
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style.CSS}</style></head>"
        f"<body><main>{body}</main><script>{style.SCRIPT}</script></body></html>\n"
    )


def document(name: str, shown: Iterable[tuple[str, str, str]], sections: Mapping[str, str]) -> str:
    """Return a page with figures at its head, and the sections that are not empty."""
    there = [(title.replace(" ", "-"), title, content) for title, content in sections.items()]
    there = [entry for entry in there if entry[2]]
    head = f"<header><h1>{escape(name)}</h1>{tiles(shown)}{contents(there)}</header>"
    body = "".join(section(title, identifier, content) for identifier, title, content in there)
    return page(name, head + body)


@dataclass(frozen=True, slots=True)
class Cell:
    html: str
    value: float | None = None


def text(value: object) -> Cell:
    return Cell(escape(str(value)))


def figure(value: float | None, html: str) -> Cell:
    return Cell("&ndash;", 0.0) if value is None else Cell(html, value)


def key(color: str) -> str:
    return f'<span class="key" style="background:var({color})"></span>'


def keyed(color: str, name: str) -> str:
    return f'<span class="keyed">{key(color)}{escape(name)}</span>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    items = "".join(f"<li>{key(color)}{escape(name)}</li>" for name, color in entries)
    return f'<ul class="legend">{items}</ul>'


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


def table(names: Sequence[str], rows: Iterable[Sequence[Any]], **options: Any) -> str:
    """Return a table of rows of texts, of numbers, and of cells of HTML; None is a dash."""
    columns = {
        name: lambda row, number=number: _cell(row[number]) for number, name in enumerate(names)
    }
    return records(columns, rows, **options)


def _cell(value: Any) -> Cell:
    if isinstance(value, int | float):
        return Cell(f"{value:,}", value)
    return value if isinstance(value, Cell) else Cell(escape(value or "-"))


def item(identifier: str, facts: str, content: str) -> str:
    """Return an utterance: its name and figures, and below them its text and player."""
    return f'<div class="item"><b>{isolated(identifier)}</b> {escape(facts)}{content}</div>'


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


def tiles(entries: Iterable[tuple[str, str, str]]) -> str:
    """Return figures, each with its name and what more is to say of it."""
    shown = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for name, value, more in entries
    )
    return f'<dl class="tiles">{shown}</dl>'


def contents(sections: Iterable[tuple[str, str, object]]) -> str:
    """Return links to sections, each of which begins with its identifier and title."""
    links = (f'<a href="#{identifier}">{escape(title)}</a>' for identifier, title, _ in sections)
    return f'<nav aria-label="Contents">{"".join(links)}</nav>'


# Pictures as inline SVG; every mark says in a title what it is, and a table says the same.


def open_svg(width: float, height: float, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(label)}">'
        f"<title>{escape(label)}</title>"
    )


def svg_text(x: float, y: float, text: str, *, soft: bool = True) -> str:
    kind = ' class="soft"' * soft
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def rectangle(
    x: float, y: float, width: float, height: float, color: str, title: str, radius: float = 2
) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.6):.2f}" height="{height:.1f}" '
        f'rx="{min(radius, width / 2):.1f}" fill="var({color})">'
        f"<title>{escape(title)}</title></rect>"
    )


def ticks(length: float, most: int = 9) -> list[float]:
    power = 10 ** math.floor(math.log10(length / most))
    step = next(m * power for m in (1, 2, 5, 10) if length / (m * power) <= most)
    return [
        step * number for number in range(int(length / step) + 1) if step * number < length * 0.97
    ]


# Charts stand side by side where there is room, and are as wide as a telephone where there is none.

_CHART = 520, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 68, 12, 12, 26
_WIDE_RANGE = 20.0  # of the largest to the smallest value, from which an axis is logarithmic
_MOST_POINTS = 300

Series = tuple[str, str, Sequence[tuple[float, float]]]  # name, colour, and points from left on


def isolated(value: object) -> str:
    """Return a text whose direction changes nothing around it."""
    return f'<bdi dir="auto">{escape(str(value))}</bdi>'


def bar(share: float) -> str:
    return f'<span class="bar" style="width:{max(120 * share, 1):.0f}px"></span>'


def charts(*pictures: str) -> str:
    content = "".join(pictures)
    return content and f'<div class="charts">{content}</div>'


def line_chart(
    title: str, series: Sequence[Series], unit: str = "", bottom: float | None = None
) -> str:
    """Return curves over the steps; ``bottom`` is the least value of the axis, by default any."""
    series = [(name, color, _thinned(points)) for name, color, points in series if points]
    if not series:
        return ""
    steps, values = zip(*(point for *_, points in series for point in points), strict=True)
    low, high = min(values), max(values)
    is_log = bottom is None and low > 0 and high / low > _WIDE_RANGE
    scaled = math.log10 if is_log else float
    low = low if bottom is None else min(bottom, low)
    base, top = scaled(low), scaled(high)
    base, top = (base, top) if top > base else (base - abs(base) / 10 - 1e-9, top + abs(top) / 10)
    last, first = max(steps), min(steps)
    place_x = lambda step: (
        _LEFT
        + (_CHART[0] - _LEFT - _RIGHT) * ((step - first) / (last - first) if last > first else 0.5)
    )
    place_y = lambda value: (
        _CHART[1] - _BOTTOM - (_CHART[1] - _TOP - _BOTTOM) * (scaled(value) - base) / (top - base)
    )
    marks = _powers(low, high) if is_log else _between(base, top)
    out = [open_svg(*_CHART, f"{title} over the steps")]
    for mark in marks:
        y = place_y(mark)
        out.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_CHART[0] - _RIGHT}" y2="{y:.1f}"/>')
        out.append(_anchored(_LEFT - 6, y + 4.5, f"{mark:,.5g}{unit}", "end"))
    for mark in _between(first, last, 5):
        out.append(_anchored(place_x(mark), _CHART[1] - 6, f"{mark:,g}", "middle"))
    for name, color, points in series:
        path = " ".join(f"{place_x(step):.1f},{place_y(value):.1f}" for step, value in points)
        value = f"{name}: {points[-1][1]:,.4g}{unit} at step {points[-1][0]:,}"
        hint = f"<title>{escape(value)}</title>"
        out.append(f'<polyline points="{path}" stroke="var({color})">{hint}</polyline>')
        if len(points) == 1:
            x, y = path.split(",")
            out.append(f'<circle cx="{x}" cy="{y}" r="3" fill="var({color})">{hint}</circle>')
    keys = legend((f"{name} {points[-1][1]:,.4g}{unit}", color) for name, color, points in series)
    return f"<figure><figcaption>{escape(title)}</figcaption>{''.join(out)}</svg>{keys}</figure>"


def histogram(title: str, edges: Sequence[float], counts: Sequence[int], unit: str = "") -> str:
    """Return bars between edges; the last bar may stand for all larger values."""
    width, high = (_CHART[0] - _LEFT - _RIGHT) / max(len(counts), 1), max(max(counts, default=0), 1)
    out = [open_svg(*_CHART, title)]
    for mark in _between(0, high, 4):
        y = _CHART[1] - _BOTTOM - (_CHART[1] - _TOP - _BOTTOM) * mark / high
        out.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_CHART[0] - _RIGHT}" y2="{y:.1f}"/>')
        out.append(_anchored(_LEFT - 6, y + 4.5, f"{mark:,g}", "end"))
    for number, count in enumerate(counts):
        tall = (_CHART[1] - _TOP - _BOTTOM) * count / high
        hint = f"{edges[number]:,.4g} to {edges[number + 1]:,.4g}{unit}: {count:,}"
        position = _LEFT + number * width + 0.5, _CHART[1] - _BOTTOM - tall
        if count:
            out.append(rectangle(*position, width - 1, tall, "--blue", hint, 1))
    for mark in _between(edges[0], edges[-1], 6):
        x = _LEFT + (mark - edges[0]) / (edges[-1] - edges[0]) * width * len(counts)
        out.append(_anchored(x, _CHART[1] - 6, f"{mark:,g}", "middle"))
    return f"<figure><figcaption>{escape(title)}</figcaption>{''.join(out)}</svg></figure>"


def _anchored(x: float, y: float, text: str, anchor: str) -> str:
    return svg_text(x, y, text).replace("<text", f'<text text-anchor="{anchor}"', 1)


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return means of neighbours where there are more points than a picture can show."""
    size = -(-len(points) // _MOST_POINTS)
    groups = [points[begin : begin + size] for begin in range(0, len(points), max(size, 1))]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def _between(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers between two others."""
    if high <= low:
        return [low]
    step = ticks(high - low, most)[1]
    begin = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(begin, math.floor(high / step + 1e-9) + 1)]


def _powers(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(powers) < 4 else (1,)
    marks = (factor * 10.0**power for power in powers for factor in factors)
    return [mark for mark in marks if low <= mark <= high]
