"""The sections of a report of one run, in the order of a reader's questions."""

from __future__ import annotations

from html import escape
from typing import Any

from analysis.budget import PARTS
from analysis.verdict import NAMES, milliseconds, percent

from report_page import drawings, style, work
from report_page.markup import (
    Cell,
    figure,
    key,
    legend,
    section,
    table,
    text,
    times,
)

MEANINGS = {
    "compute": "a kernel runs that is no communication",
    "communication": "only communication runs: nothing hides it",
    "copies": "only copies and fills of memory run",
    "data_wait": "the GPU has nothing to do, and the host waits for a batch",
    "host_gap": "the GPU has nothing to do, and the next work is not launched yet",
    "idle": "the GPU has nothing to do for another reason, see below",
}
ON_CPU = {
    "compute": "an operator runs",
    "data_wait": "a batch is made or waited for",
    "host_gap": "no operator runs: Python, and the profiler itself",
    "idle": "outside of every range",
}
IDLE = {
    "queued": "launched but not begun: launch latency, or waiting for other work",
    "synchronizing": "the host is blocked in a synchronizing call",
    "outside": "the host is in no range",
}
_MOST_STEPS = 40
"""Shown one by one; report.json has all."""


def contents(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Identifier and title of the sections that there are."""
    found = []
    if report["budget"]:
        found.append(("budget", "Step budget"))
    found.append(("actions", "What to do"))
    if report["budget"]:
        kernels = "Kernels" if report["budget"]["has_gpu"] else "Operators"
        found += [("timeline", "One step"), ("work", "Work"), ("kernels", kernels)]
    if report["ranks"]:
        found.append(("ranks", "Ranks"))
    return [*found, ("padding", "FLOPs and padding"), ("quality", "Capture quality"),
            ("method", "How to read this")]  # fmt: skip


def all_of(report: dict[str, Any]) -> str:
    """Return the sections that have content."""
    parts = [budget(report)] if report["budget"] else []
    parts.append(actions(report))
    if report["budget"]:
        parts += [timeline(report), work.by_phase(report), work.kernels(report)]
    if report["ranks"]:
        parts.append(ranks(report))
    return "".join([*parts, padding(report), quality(report), method(report)])


def budget(report: dict[str, Any]) -> str:
    """Return the parts of a step, and that they add up."""
    data = report["budget"]
    meanings = MEANINGS if data["has_gpu"] else MEANINGS | ON_CPU
    parts = data["parts"]
    bar = drawings.stacked(
        [("", [(part["name"], part["ms"]) for part in parts])],
        *(style.PARTS, "Parts of a step"),
        names=NAMES,
    )
    rows = []
    for part in parts:
        name = key(style.PARTS[part["name"]]) + escape(NAMES[part["name"]])
        rows.append([Cell(name), *_amounts(part), text(meanings[part["name"]])])
        if part["name"] == "idle" and part["ns"]:
            rows += [
                [Cell(f"&emsp;of it: {name['name']}"), *_amounts(name), text(IDLE[name["name"]])]
                for name in data["idle"]
                if name["ns"]
            ]
    mean = data["step_ms"]["mean"]
    last = [text("the step"), figure(mean, milliseconds(mean)), figure(1, "100.0 %"),
            text("exactly: the parts are the step, divided")]  # fmt: skip
    hidden = data["hidden_communication"]
    more = ""
    if hidden["ns"]:
        more = (
            f'<p class="lead">Another {milliseconds(hidden["ms"])} of communication a step are '
            "hidden under compute and cost nothing.</p>"
        )
    lead = "Every moment of a step counts once: for the first of these parts that holds."
    content = [bar, table(["part", "per step", "share", "when"], rows, last=last), more]
    if len(data["per_step"]) > 1:
        content.append(_per_step(data))
    return section("Step budget", "budget", *content, lead=lead)


def _amounts(part: dict[str, Any]) -> list[Cell]:
    return [
        figure(part["ms"], milliseconds(part["ms"])),
        figure(part["share"], percent(part["share"])),
    ]


def _per_step(data: dict[str, Any]) -> str:
    steps = data["per_step"][:_MOST_STEPS]
    rows = [
        (f"step {step['step']}", [(name, step["parts_ms"][name]) for name in PARTS])
        for step in steps
    ]
    of = f" of {data['per_rank'][0]['name']}" if data["ranks"] > 1 else ""
    left_out = len(data["per_step"]) - len(steps)
    title = f"Step by step{of}" + (f", without the last {left_out}" if left_out else "")
    picture = drawings.stacked(rows, style.PARTS, title, names=NAMES)
    return f"<details><summary>{escape(title)}</summary>{picture}</details>"


def actions(report: dict[str, Any]) -> str:
    """Return possible remedies with their largest gains."""
    if not report["actions"]:
        return section("What to do", "actions", lead="No part but compute takes 0.5 % of a step.")
    rows = [
        [
            Cell(f"{number}. {escape(action['title'])}"),
            figure(action["speedup_at_most"] or 1e9, times(action["speedup_at_most"])),
            figure(action["share"], percent(action["share"])),
            text(action["basis"]),
            text(action["how"]),
        ]
        for number, action in enumerate(report["actions"], 1)
    ]
    lead = (
        "How many times as fast the run would be if the part took no time at all: a bound, not a "
        "forecast."
    )
    heads = ["action", "at most", "share of the step", "which part", "how"]
    return section("What to do", "actions", table(heads, rows), lead=lead)


def timeline(report: dict[str, Any]) -> str:
    """Draw a step."""
    picture = report["timeline"]
    phases: dict[str, str] = {}
    for row in picture["rows"]:
        if row["name"] == "host":
            for _, _, name in row["segments"]:
                phases.setdefault(
                    name, style.CYCLE[len(phases)] if len(phases) < len(style.CYCLE) else "--grey"
                )

    def color_of(row: str, name: str) -> str:
        if row == "budget":
            return style.PARTS[name]
        return phases[name] if row == "host" else style.CATEGORIES.get(name, "--grey")

    def used(chosen) -> list[str]:
        names = [
            name for row in picture["rows"] if chosen(row["name"]) for *_, name in row["segments"]
        ]
        return list(dict.fromkeys(names))

    on_device = [
        n for n in style.CATEGORIES if n in used(lambda row: row not in ("budget", "host"))
    ]
    legends = [
        ("Budget", [(NAMES[name], style.PARTS[name]) for name in PARTS if name in used(
            lambda row: row == "budget")]),
        ("Host", [*list(phases.items())[: len(style.CYCLE)],
                  *([("others", "--grey")] if len(phases) > len(style.CYCLE) else [])]),
        ("Device" if report["budget"]["has_gpu"] else "Operators",
         [(name, style.CATEGORIES[name]) for name in on_device]),
    ]  # fmt: skip
    keys = "".join(
        f'<p class="lead" style="margin:6px 0 0">{title}</p>{legend(entries)}'
        for title, entries in legends
        if entries
    )
    more = picture["streams_left_out"]
    lead = (
        f"Step {picture['step']} of {picture['process']}, the one of median length. trace.json "
        "shows every kernel in ui.perfetto.dev, with the range that made it."
    ) + (f" {more} less busy streams are left out." if more else "")
    drawn = drawings.timeline(picture, color_of)
    return section("One step", "timeline", drawn, keys, lead=lead)


def ranks(report: dict[str, Any]) -> str:
    """Who the others wait for."""
    data = report["ranks"]
    values = [value for rank in data["ranks"] for value in rank["own_ms"]]
    low, high = min(values, default=0.0), max(values, default=1.0)
    shown = data["steps"][:_MOST_STEPS]
    heads = ["rank", *(f"step {number}" for number in shown), "mean", "communication"]
    rows = []
    for rank in data["ranks"]:
        name = escape(rank["name"]) + (" ← slowest" if rank["name"] == data["slowest"] else "")
        cells = "".join(_heat(value, low, high) for value in rank["own_ms"][:_MOST_STEPS])
        rows.append(
            f'<tr><th scope="row">{name}</th>{cells}<td>{milliseconds(rank["mean_own_ms"])}</td>'
            f"<td>{milliseconds(rank['communication_ms'])}</td></tr>"
        )
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    grid = (
        '<div class="scroll"><table class="heat"><caption>Own time of each rank in each step: the '
        "step without its exposed communication. Darker is slower.</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
    waiting = data.get("waiting_ms")
    lead = (
        f"{data['slowest']} is the slowest, {percent(data['slowest_by'])} over the mean. Fast "
        "ranks spend the difference in the exchange of gradients"
        + (f": {milliseconds(waiting)} a step on average." if waiting is not None else ".")
    )
    return section("Ranks", "ranks", grid, lead=lead)


def _heat(value: float, low: float, high: float) -> str:
    strength = 0.06 + 0.6 * (value - low) / (high - low) if high > low else 0.06
    return f'<td style="background:rgb(var(--heat) / {strength:.2f})">{milliseconds(value)}</td>'


def padding(report: dict[str, Any]) -> str:
    """Return the section with the losses from the peak to useful FLOPs, and the padding."""
    fall = report["waterfall"]
    if "bars" in fall:
        content = drawings.waterfall(fall["bars"])
        if fall["is_estimate"]:
            content += (
                '<p class="lead">The padded share is estimated: useful FLOPs divided by the share '
                "of frames that are no padding.</p>"
            )
    else:
        content = f'<p class="lead">No share of a peak: {escape(fall["reason"])}.</p>'
    if "useful_tflops" in report["log"]:
        rate = report["log"]["useful_tflops"]["mean"]
        content += (
            f'<p class="lead">{rate:.4g} TFLOP/s useful on each rank, padding left out, by '
            "metrics.jsonl.</p>"
        )
    pictures = "".join(
        f"<div><h3>Padding of {escape(data['label'])}</h3>"
        f"{drawings.histogram(data, '--aqua')}</div>"
        for data in report["padding"].values()
    )
    if pictures:
        pictures = f'<div class="columns">{pictures}</div>'
    return section("FLOPs and padding", "padding", content, pictures)


def quality(report: dict[str, Any]) -> str:
    """Return how far the figures can be trusted."""
    items = "".join(
        f'<li class="{note["level"]}"><b>{note["level"]}</b>{escape(note["text"])}</li>'
        for note in report["quality"]
    )
    return section("Capture quality", "quality", f'<ul class="notes">{items}</ul>')


def method(report: dict[str, Any]) -> str:
    """Return the definitions and the sources of the figures."""
    patterns = table(
        ["category", "names that match, without regard to case"],
        [[text(name), Cell(f"<code>{escape(pattern)}</code>")] for name, pattern in
         report["patterns"].items()],
        caption="The first category whose pattern is found in the name of a kernel is its own.",
    )  # fmt: skip
    made = escape(", ".join(report["sources"]) or "metrics.jsonl alone")
    return section(
        *("How to read this", "method"),
        f'<p class="lead">Made from {made}. Wall time is always the length of a union of '
        "intervals: kernels that overlap are not added up. <b>Work</b> is the sum of durations, "
        "which may exceed the step where streams overlap; <b>wall</b> is what something adds to "
        "the time in which anything runs. A step ends when the work that it launched is done, and "
        "the next begins there. A kernel counts for one range only: the innermost around its "
        "launch, or for a kernel of the backward the range of the forward operator that it belongs "
        "to. trace.json holds the first steps, up to 50,000 kernels of each rank.</p>"
        f"<details><summary>Categories of kernels</summary>{patterns}</details>",
    )
