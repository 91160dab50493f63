"""Draws horizontal bars side by side, as SVG for light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from effasr.data.atomic_files import write_atomically
from effasr.planning.study import StrategyResult
from effasr.planning.text import percent

_STYLE = """\
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328; }
.title { font-size: 15px; font-weight: 600; }
.head { font-weight: 600; }
.quiet { fill: #59636e; }
.filled { fill: #0969da; }
.rest { fill: #f0b37e; }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc; }
  .quiet { fill: #9198a1; }
  .filled { fill: #4493f8; }
  .rest { fill: #8a4f1d; }
}"""
_CHARACTER = 7.3
"""Mean width of a character, rounded up so that names do not run into bars with any system font."""
_BAR = 170
_LABEL = 62
_GAP = 18
_TOP = 92
_ROW = 30
_HEIGHT = 18
_BASE = 14
"""Distance of a label's baseline from the top of its bar."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A column of bars, one for each row; the longest bar takes the whole width."""

    title: str  # above the bars, with the unit
    filled: Sequence[float]  # lengths of the first parts of the bars
    labels: Sequence[str]  # to the right of the bars
    rest: Sequence[float] | None = None  # lengths of the second parts


def padding_picture(
    path: Path, results: Sequence[StrategyResult], *, title: str, subtitle: str
) -> None:
    """Draw the share of padding in the frames, tokens and FLOPs of each strategy."""
    panels = [
        Panel(
            f"{name}: padding %",
            [1 - share for share in shares],
            [percent(share) for share in shares],
            shares,
        )
        for name, field in (
            ("frames", "padding_frames"),
            ("tokens", "padding_tokens"),
            ("FLOPs", "padding_flops"),
        )
        for shares in [[getattr(result.report, field) for result in results]]
    ]
    rows = [result.strategy for result in results]
    picture = draw(rows, panels, title=title, subtitle=subtitle, legend=("utterances", "padding"))
    write_atomically(path, picture.encode())


def draw(
    rows: Sequence[str],
    panels: Sequence[Panel],
    *,
    title: str,
    subtitle: str = "",
    legend: tuple[str, str] | None = None,
    groups: Sequence[str] | None = None,
) -> str:
    """Return panels side by side as an SVG document.

    ``legend`` has the meanings of the first and second part of a bar. ``groups`` has the group of
    each row, which is shown as a heading where it changes.
    """
    headings, tops = _arrange(len(rows), groups)
    names = round(_CHARACTER * max(map(len, rows), default=0)) + _GAP
    width = names + len(panels) * (_BAR + _LABEL + _GAP) - _GAP
    height = tops[-1] + _ROW + 6 if tops else _TOP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:g}" '
        f'viewBox="0 0 {width} {height:g}" role="img" aria-label="{escape(title)}">',
        f"<style>\n{_STYLE}\n</style>",
        _text(0, 18, title, "title"),
        _text(0, 38, subtitle, "quiet"),
        *(_legend(width, legend) if legend else ()),
        *(_text(0, top + _BASE, name, "head") for top, name in headings),
        *(_text(0, top + _BASE, name) for top, name in zip(tops, rows, strict=True)),
    ]
    for number, panel in enumerate(panels):
        left = names + number * (_BAR + _LABEL + _GAP)
        parts.append(_text(left, _TOP - 14, panel.title, "head"))
        parts += _bars(left, panel, tops)
    return "\n".join([*parts, "</svg>", ""])


def _arrange(
    rows: int, groups: Sequence[str] | None
) -> tuple[list[tuple[float, str]], list[float]]:
    """Return the positions of headings and of rows."""
    headings: list[tuple[float, str]] = []
    tops: list[float] = []
    top = float(_TOP)
    for row in range(rows):
        if groups is not None and (not row or groups[row] != groups[row - 1]):
            headings.append((top, groups[row]))
            top += _ROW
        tops.append(top)
        top += _ROW
    return headings, tops


def _bars(left: float, panel: Panel, tops: Sequence[float]) -> list[str]:
    rest = panel.rest or [0.0] * len(tops)
    if not len(panel.filled) == len(panel.labels) == len(rest) == len(tops):
        raise ValueError(f"`panels`: {panel.title!r} must have {len(tops)} bars, one for each row.")
    scale = _BAR / (max((a + b for a, b in zip(panel.filled, rest, strict=True)), default=0) or 1)
    parts = []
    for top, first, second, label in zip(tops, panel.filled, rest, panel.labels, strict=True):
        parts.append(_bar(left, top, first * scale, "filled"))
        parts.append(_bar(left + first * scale, top, second * scale, "rest"))
        parts.append(_text(left + (first + second) * scale + 6, top + _BASE, label))
    return parts


def _legend(width: float, legend: tuple[str, str]) -> list[str]:
    parts = []
    left = width - 210.0
    for kind, meaning in zip(("filled", "rest"), legend, strict=True):
        parts += [_bar(left, 8, 14, kind, height=12), _text(left + 20, 18, meaning, "quiet")]
        left += 110
    return parts


def _bar(left: float, top: float, width: float, kind: str, height: float = _HEIGHT) -> str:
    return (
        f'<rect class="{kind}" x="{left:.2f}" y="{top:g}" width="{width:.2f}" height="{height}"/>'
    )


def _text(left: float, base: float, content: str, kind: str = "") -> str:
    css = f' class="{kind}"' if kind else ""
    return f'<text x="{left:.2f}" y="{base:g}"{css}>{escape(content)}</text>'
