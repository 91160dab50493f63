"""The page of two runs: what changed, then each of them."""

from __future__ import annotations

from html import escape
from typing import Any

from analysis.verdict import NAMES, milliseconds

from report_page import drawings, sections, style
from report_page.markup import Cell, figure, legend, section, table, text, unbroken

_LOG = {
    "step_s": ("step, by the log", lambda value: milliseconds(value * 1e3)),
    "data_wait_s": ("waiting for data, by the log", lambda value: milliseconds(value * 1e3)),
    "rank_imbalance": ("imbalance of the ranks", lambda value: f"{100 * value:.2f} %"),
    "audio_seconds": ("audio a step", lambda value: f"{value:,.1f} s"),
    "padding_frames": ("padding of frames", lambda value: f"{100 * value:.2f} %"),
    "padding_tokens": ("padding of tokens", lambda value: f"{100 * value:.2f} %"),
}
_NOTABLE = 0.01
"""A smaller change is shown in neither colour."""


def body(report: dict[str, Any]) -> str:
    """Return the content of the page.

    Args:
        report: Report with ``comparison`` and ``reports``.
    """
    data, reports = report["comparison"], report["reports"]
    header = (
        f"<header><h1>Two runs: {escape(data['before'])} and {escape(data['after'])}</h1>"
        f'<p class="verdict">{unbroken(data["text"])}</p></header>'
    )
    parts = [_changes(data, reports)]
    for single in reports:
        verdict = escape(single["verdict"]["text"])
        parts.append(
            f'<h2 class="subject">{escape(single["name"])}</h2><p class="lead">{verdict}</p>'
            + _with_own_names(sections.all_of(single), single["name"])
        )
    return header + "".join(parts)


def _with_own_names(html: str, name: str) -> str:
    """Return the HTML with section ids that are unique on the page."""
    prefix = "".join(letter if letter.isalnum() else "-" for letter in name)
    return html.replace('<section id="', f'<section id="{prefix}-')


def _changes(data: dict[str, Any], reports: list[dict[str, Any]]) -> str:
    content = []
    if "parts" in data:
        bars = [
            (single["name"], [(part["name"], part["ms"]) for part in single["budget"]["parts"]])
            for single in reports
        ]
        content.append(drawings.stacked(bars, style.PARTS, "Parts of a step", names=NAMES))
        content.append(legend((NAMES[name], color) for name, color in style.PARTS.items()))
        rows = [_row(NAMES[row["name"]], row, milliseconds) for row in data["parts"]]
        last = _row("the step", data["step_ms"], milliseconds)
        heads = ["part", *_heads(data)]
        content.append(table(heads, rows, last=last, caption="Per step and rank."))
        for title, name in (
            ("By category", "categories"),
            ("Kernels that changed most", "kernels"),
        ):
            rows = [_row(row["name"], row, milliseconds) for row in data[name]]
            made = table(["name", *_heads(data)], rows, sortable=True)
            content.append(f"<h3>{title}</h3>{made}")
    if data["log"]:
        rows = [_row(_LOG[row["name"]][0], row, _LOG[row["name"]][1]) for row in data["log"]]
        made = table(["figure", *_heads(data)], rows)
        content.append(f"<h3>By the runs' own logs</h3>{made}")
    return section("What changed", "changes", *content)


def _heads(data: dict[str, Any]) -> list[str]:
    return [data["before"], data["after"], "difference", "ratio"]


def _row(name: str, row: dict[str, Any], show) -> list[Cell]:
    delta, ratio = row["delta"], row["ratio"]
    sign = "+" if delta > 0 else ""
    mark = "worse" if delta > 0 else "better"
    is_change = ratio is None or abs(ratio - 1) > _NOTABLE
    if not delta or not is_change or row["name"] == "audio_seconds":
        mark = ""
    return [
        text(name),
        figure(row["before"], show(row["before"])),
        figure(row["after"], show(row["after"])),
        figure(delta, f'<span class="{mark}">{sign}{show(delta)}</span>'),
        figure(ratio, "" if ratio is None else f"{ratio:.2f}"),
    ]
