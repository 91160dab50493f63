"""The page, from report.json: the verdict first, then what it rests on."""

from __future__ import annotations

from html import escape
from typing import Any

from analysis.verdict import NAMES, milliseconds, percent

from report_page import compared, sections, style
from report_page.markup import unbroken

_NOTABLE = 0.005
"""Ranks whose times differ by less are the same."""


def render(report: dict[str, Any]) -> str:
    """Return the whole page.

    Args:
        report: Content of report.json: of one run, or, with ``comparison``, of two.
    """
    if "comparison" in report:
        title = f"{report['comparison']['after']} against {report['comparison']['before']}"
        body = compared.body(report)
    else:
        title = report["name"]
        body = _header(report) + sections.all_of(report)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Where the time goes: {escape(title)}</title><style>{style.CSS}</style></head>"
        f"<body><main>{body}</main><script>{style.SCRIPT}</script></body></html>\n"
    )


def _header(report: dict[str, Any]) -> str:
    facts = " · ".join(f"{escape(name)}: {escape(fact)}" for name, fact in report["facts"].items())
    links = "".join(
        f'<a href="#{identifier}">{escape(title)}</a>'
        for identifier, title in sections.contents(report)
    )
    return (
        f"<header><h1>Where the time goes: {escape(report['name'])}</h1>"
        f'<p class="verdict">{unbroken(report["verdict"]["text"])}</p><p>{facts}</p>'
        f'<nav aria-label="Contents">{links}</nav></header>{_tiles(report)}'
    )


def _tiles(report: dict[str, Any]) -> str:
    budget, log = report["budget"], report["log"]
    tiles: list[tuple[str, str, str]] = []
    if budget:
        step = budget["step_ms"]
        parts = {part["name"]: part for part in budget["parts"]}
        worst = max((p for p in budget["parts"] if p["name"] != "compute"), key=lambda p: p["ns"])
        spread = f"{milliseconds(step['min'])} to {milliseconds(step['max'])}"
        tiles = [
            ("a step", milliseconds(step["mean"]), spread if budget["windows"] > 1 else ""),
            ("compute", percent(parts["compute"]["share"]), "of the step"),
            (NAMES[worst["name"]], percent(worst["share"]), "the largest other part"),
        ]
    elif "step_s" in log:
        tiles = [("a step", milliseconds(log["step_s"]["mean"] * 1e3), "by metrics.jsonl")]
    if "audio_hours_per_hour" in log:
        tiles.append(("audio", f"{log['audio_hours_per_hour']:,.0f} h", "trained on in an hour"))
    if "padding_frames" in report["padding"]:
        tiles.append(("padding", percent(report["padding"]["padding_frames"]["mean"]), "of frames"))
    if report["ranks"].get("slowest_by", 0.0) >= _NOTABLE:
        ranks = report["ranks"]
        by = f"{percent(ranks['slowest_by'])} over the mean"
        tiles.append(("slowest", ranks["slowest"], by))
    return "<dl class=\"tiles\">" + "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for name, value, more in tiles
    ) + "</dl>"  # fmt: skip
