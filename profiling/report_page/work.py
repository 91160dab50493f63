"""Sections on what the device works on: phases, categories, ranges, kernels."""

from __future__ import annotations

from html import escape
from typing import Any

from analysis.verdict import milliseconds, percent

from report_page import drawings, style
from report_page.markup import Cell, figure, keyed, legend, section, table, text

_MOST_PHASES, _MOST_RANGES = 12, 60


def by_phase(report: dict[str, Any]) -> str:
    """Work of each phase, by category, and by the range that made it."""
    data = report["phases"]
    names = data["categories"]
    order = sorted(names, key=list(style.CATEGORIES).index)
    bars = [
        (phase, [(name, work[names.index(name)]) for name in order])
        for phase, work in zip(data["phases"], data["work_ms"], strict=True)
    ]
    left_out = len(bars) - _MOST_PHASES
    picture = drawings.stacked(bars[:_MOST_PHASES], style.CATEGORIES, "Work of each phase")
    keys = legend((name, style.CATEGORIES[name]) for name in order)
    rows = [
        [
            Cell(keyed(style.CATEGORIES.get(entry["name"], "--grey"), entry["name"])),
            *_amounts(entry),
        ]
        for entry in report["categories"]
    ]
    lead = "Summed durations per step and rank, by phase of the step and kind of kernel."
    if left_out > 0:
        lead += f" {left_out} phases with less work are left out of the picture."
    heads = ["category", "work", "wall", "share of work"]
    return section(
        *("Work", "work", picture, keys, table(heads, rows, sortable=True)),
        _ranges(report["ranges"]),
        lead=lead,
    )


def _ranges(ranges: list[dict[str, Any]]) -> str:
    rows = [
        [
            text(entry["name"]),
            figure(entry["forward_ms"], milliseconds(entry["forward_ms"])),
            figure(entry["backward_ms"], milliseconds(entry["backward_ms"])),
            figure(entry["share"], percent(entry["share"])),
            Cell(_bar(entry["share"])),
        ]
        for entry in ranges[:_MOST_RANGES]
    ]
    rest = len(ranges) - _MOST_RANGES
    caption = "Each kernel counts once, for the range that made it; one of the backward for the "
    caption += "range of its forward where that is known."
    if rest > 0:
        caption += f" {rest} ranges with less work are in report.json."
    total = sum(entry["share"] for entry in ranges)
    last = [
        text("all ranges"),
        *(
            figure(value, milliseconds(value))
            for value in (sum(e[k] for e in ranges) for k in ("forward_ms", "backward_ms"))
        ),
        figure(total, percent(total)),
        text(""),
    ]
    heads = ["range", "forward", "backward", "share of work", ""]
    made = table(heads, rows, caption=caption, last=last, sortable=True)
    return f"<h3>By the range that made it</h3>{made}"


def kernels(report: dict[str, Any]) -> str:
    """Return the kernels with most work."""
    data = report["kernels"]
    rows = [
        [
            Cell(f"<code>{escape(entry['name'])}</code>"),
            Cell(keyed(style.CATEGORIES.get(entry["category"], "--grey"), entry["category"])),
            figure(entry["calls"], f"{entry['calls']:,.4g}"),
            figure(entry["median_us"], milliseconds(entry["median_us"] / 1e3)),
            *_amounts(entry),
        ]
        for entry in data["top"]
    ]
    others = data["others"]
    last = None
    if others["kinds"]:
        last = [
            *(text(f"{others['kinds']} others"), text("")),
            *(figure(others["calls"], f"{others['calls']:,.4g}"), text("")),
            *_amounts(others),
        ]
    what = "Kernel" if report["budget"]["has_gpu"] else "Operator"
    heads = [what.lower(), "category", "calls", "median", "work", "wall", "share of work"]
    return section(
        *(f"{what}s", "kernels", table(heads, rows, last=last, sortable=True)),
        lead="Per step and rank, most work first.",
    )


def _amounts(entry: dict[str, Any]) -> list[Cell]:
    return [
        figure(entry["work_ms"], milliseconds(entry["work_ms"])),
        figure(entry["wall_ms"], milliseconds(entry["wall_ms"])),
        figure(entry["share"], percent(entry["share"])),
    ]


def _bar(share: float) -> str:
    return f'<span class="bar" style="width:{max(120 * share, 1):.0f}px"></span>'
