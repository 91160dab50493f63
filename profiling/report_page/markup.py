"""Pieces of HTML: escaped text, figures, tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

# As in effasr.untrusted.display, which a report does not need to be installed.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029"
    "\ud800-\udfff]"
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table.

    Attributes:
        html: Content.
        value: A figure to sort by; figures are aligned to the right.
    """

    html: str
    value: float | None = None


def without_controls(value: str) -> str:
    """Return a text with control characters and marks of direction as visible escapes."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), value)


def text(value: object) -> Cell:
    """Return a cell with text."""
    return Cell(escape(str(value)))


def figure(value: float | None, html: str) -> Cell:
    """Return a cell with a figure; a dash where there is none."""
    return Cell("&ndash;", 0.0) if value is None else Cell(html, value)


def unbroken(sentence: str) -> str:
    """Return a sentence whose figures are not parted from their units at the end of a line."""
    return re.sub(r"(\d) (ms|%|\u00b5s|times)", r"\1&nbsp;\2", escape(sentence))


def times(ratio: float | None) -> str:
    """Return how many times as fast a run could become."""
    return "no bound" if ratio is None else f"{ratio:.2f} \u00d7"


def key(color: str) -> str:
    """Return a square in the colour of a legend."""
    return f'<span class="key" style="background:var({color})"></span>'


def keyed(color: str, name: str) -> str:
    """Return a name with the colour of its legend, on one line."""
    return f'<span class="keyed">{key(color)}{escape(name)}</span>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return names and their colours."""
    items = "".join(f"<li>{key(color)}{escape(name)}</li>" for name, color in entries)
    return f'<ul class="legend">{items}</ul>'


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    caption: str = "",
    last: Sequence[Cell] | None = None,
    sortable: bool = False,
    classes: str = "",
) -> str:
    """Return a table whose first column names the rows.

    Args:
        heads: Heads of the columns.
        rows: Cells, a row as long as ``heads``.
        caption: Says what it shows.
        last: A row of sums.
        sortable: Whether the script lets readers sort it.
        classes: More CSS classes.
    """
    rows = list(rows)
    is_figure = [
        any(len(row) > column and row[column].value is not None for row in rows)
        for column in range(len(heads))
    ]
    head = "".join(
        f'<th scope="col"{_class(right)}>{escape(name)}</th>'
        for name, right in zip(heads, is_figure, strict=True)
    )
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in rows)
    if last is not None:
        body += f'<tr class="sum">{_cells(last)}</tr>'
    names = " ".join(filter(None, ["sortable" if sortable else "", classes]))
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="scroll"><table class="{names}">{title}<thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
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


def section(title: str, identifier: str, *content: str, lead: str = "") -> str:
    """Return a part of the page."""
    intro = f"<p>{escape(lead)}</p>" if lead else ""
    inner = "".join(content)
    return f'<section id="{identifier}"><h2>{escape(title)}</h2>{intro}{inner}</section>'
