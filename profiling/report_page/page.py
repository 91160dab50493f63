"""The page, from report.json: the verdict first, then what it rests on."""

from __future__ import annotations

from html import escape
from typing import Any

from analysis.budget import PARTS
from analysis.verdict import NAMES, milliseconds, percent

from report_page import markup, style
from report_page.markup import (
    Cell,
    figure,
    key,
    keyed,
    legend,
    section,
    table,
    text,
    times,
    unbroken,
)

_NOTABLE = 0.005
"""Ranks whose times differ by less are the same."""


def render(report: dict[str, Any]) -> str:
    if "comparison" in report:
        title = f"{report['comparison']['after']} against {report['comparison']['before']}"
        body = _comparison(report)
    else:
        title = report["name"]
        body = _header(report) + all_of(report)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Where the time goes: {escape(title)}</title><style>{style.CSS}</style></head>"
        f"<body><main>{body}</main><script>{style.SCRIPT}</script></body></html>\n"
    )


def _header(report: dict[str, Any]) -> str:
    facts = " · ".join(f"{escape(name)}: {escape(fact)}" for name, fact in report["facts"].items())
    links = "".join(
        f'<a href="#{identifier}">{escape(title)}</a>' for identifier, title in contents(report)
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


# The sections of a report of one run, in the order of a reader's questions.

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
    parts = [budget(report)] if report["budget"] else []
    parts.append(actions(report))
    if report["budget"]:
        parts += [timeline(report), by_phase(report), kernels(report)]
    if report["ranks"]:
        parts.append(ranks(report))
    return "".join([*parts, padding(report), quality(report), method(report)])


def budget(report: dict[str, Any]) -> str:
    data = report["budget"]
    meanings = MEANINGS if data["has_gpu"] else MEANINGS | ON_CPU
    parts = data["parts"]
    bar = markup.stacked(
        [("", [(part["name"], part["ms"]) for part in parts])],
        *(style.PARTS, "Parts of a step"),
        names=NAMES,
    )
    rows = []
    for part in parts:
        name = key(style.PARTS[part["name"]]) + escape(NAMES[part["name"]])
        rows.append([Cell(name), *_part_amounts(part), text(meanings[part["name"]])])
        if part["name"] == "idle" and part["ns"]:
            rows += [
                [
                    Cell(f"&emsp;of it: {name['name']}"),
                    *_part_amounts(name),
                    text(IDLE[name["name"]]),
                ]
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


def _part_amounts(part: dict[str, Any]) -> list[Cell]:
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
    picture = markup.stacked(rows, style.PARTS, title, names=NAMES)
    return f"<details><summary>{escape(title)}</summary>{picture}</details>"


def actions(report: dict[str, Any]) -> str:
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
    drawn = markup.timeline(picture, color_of)
    return section("One step", "timeline", drawn, keys, lead=lead)


def ranks(report: dict[str, Any]) -> str:
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
    fall = report["waterfall"]
    if "bars" in fall:
        content = markup.waterfall(fall["bars"])
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
        f"<div><h3>Padding of {escape(data['label'])}</h3>{markup.histogram(data, '--aqua')}</div>"
        for data in report["padding"].values()
    )
    if pictures:
        pictures = f'<div class="columns">{pictures}</div>'
    return section("FLOPs and padding", "padding", content, pictures)


def quality(report: dict[str, Any]) -> str:
    items = "".join(
        f'<li class="{note["level"]}"><b>{note["level"]}</b>{escape(note["text"])}</li>'
        for note in report["quality"]
    )
    return section("Capture quality", "quality", f'<ul class="notes">{items}</ul>')


def method(report: dict[str, Any]) -> str:
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


# Sections on what the device works on: phases, categories, ranges, kernels.

_MOST_PHASES, _MOST_RANGES = 12, 60


def by_phase(report: dict[str, Any]) -> str:
    data = report["phases"]
    names = data["categories"]
    order = sorted(names, key=list(style.CATEGORIES).index)
    bars = [
        (phase, [(name, work[names.index(name)]) for name in order])
        for phase, work in zip(data["phases"], data["work_ms"], strict=True)
    ]
    left_out = len(bars) - _MOST_PHASES
    picture = markup.stacked(bars[:_MOST_PHASES], style.CATEGORIES, "Work of each phase")
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


# The page of two runs: what changed, then each of them.

_LOG = {
    "step_s": ("step, by the log", lambda value: milliseconds(value * 1e3)),
    "data_wait_s": ("waiting for data, by the log", lambda value: milliseconds(value * 1e3)),
    "rank_imbalance": ("imbalance of the ranks", lambda value: f"{100 * value:.2f} %"),
    "audio_seconds": ("audio a step", lambda value: f"{value:,.1f} s"),
    "padding_frames": ("padding of frames", lambda value: f"{100 * value:.2f} %"),
    "padding_tokens": ("padding of tokens", lambda value: f"{100 * value:.2f} %"),
}
_NOTABLE_CHANGE = 0.01
"""A smaller change is shown in neither colour."""


def _comparison(report: dict[str, Any]) -> str:
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
            + _with_own_names(all_of(single), single["name"])
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
        content.append(markup.stacked(bars, style.PARTS, "Parts of a step", names=NAMES))
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
    is_change = ratio is None or abs(ratio - 1) > _NOTABLE_CHANGE
    if not delta or not is_change or row["name"] == "audio_seconds":
        mark = ""
    return [
        text(name),
        figure(row["before"], show(row["before"])),
        figure(row["after"], show(row["after"])),
        figure(delta, f'<span class="{mark}">{sign}{show(delta)}</span>'),
        figure(ratio, "" if ratio is None else f"{ratio:.2f}"),
    ]
